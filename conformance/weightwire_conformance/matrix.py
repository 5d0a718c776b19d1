"""Results of a run, as scenarios × backends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from weightwire_conformance.outcomes import Outcome, Result
from weightwire_conformance.scenarios import THEMES

__all__ = ["Matrix", "as_property", "from_property"]

_PREFIX = "weightwire_"


class Matrix:
    """Results in the order in which they came.

    Attributes:
        capabilities: by backend, what it declares; absent where that isn't known.
    """

    def __init__(
        self,
        results: Iterable[Result] = (),
        capabilities: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self._results = {(result.scenario, result.backend): result for result in results}
        self.capabilities = dict(capabilities or {})

    def add(self, result: Result) -> None:
        self._results[result.scenario, result.backend] = result

    def __len__(self) -> int:
        return len(self._results)

    @property
    def results(self) -> Sequence[Result]:
        return tuple(self._results.values())

    @property
    def backends(self) -> Sequence[str]:
        return tuple(dict.fromkeys(result.backend for result in self.results))

    def scenarios(self, theme: str | None = None) -> Sequence[str]:
        return tuple(
            dict.fromkeys(
                result.scenario for result in self.results if theme in (None, result.theme)
            )
        )

    @property
    def themes(self) -> Sequence[str]:
        present = {result.theme for result in self.results}
        return tuple(theme for theme in THEMES if theme in present)

    def get(self, scenario: str, backend: str) -> Result | None:
        return self._results.get((scenario, backend))

    def counts(self, backend: str | None = None, theme: str | None = None) -> dict[Outcome, int]:
        """How many there are of each outcome that occurs."""
        found: dict[Outcome, int] = {}
        for result in self.results:
            if backend in (None, result.backend) and theme in (None, result.theme):
                found[result.outcome] = found.get(result.outcome, 0) + 1
        return {outcome: found[outcome] for outcome in Outcome if outcome in found}

    def to_dict(self) -> dict[str, Any]:
        """``{"backends": {NAME: {SCENARIO: {...}}}, "counts": {...}}``."""
        backends: dict[str, dict[str, Any]] = {name: {} for name in self.backends}
        for result in self.results:
            backends[result.backend][result.scenario] = {
                "outcome": result.outcome.value,
                "seconds": result.seconds,
                "reason": result.reason,
            }
        counts = self.counts()
        return {
            "backends": backends,
            "counts": {outcome.value: counts.get(outcome, 0) for outcome in Outcome},
        }


def as_property(result: Result) -> dict[str, str]:
    """A result as JUnit properties of its test."""
    return {
        f"{_PREFIX}backend": result.backend,
        f"{_PREFIX}scenario": result.scenario,
        f"{_PREFIX}theme": result.theme,
        f"{_PREFIX}outcome": result.outcome.value,
        f"{_PREFIX}seconds": f"{result.seconds:g}",
        f"{_PREFIX}reason": result.reason,
    }


def from_property(properties: Iterable[tuple[str, object]], detail: str) -> Result | None:
    """The result in a test's properties, or None."""
    found = {name.removeprefix(_PREFIX): str(value) for name, value in properties}
    if "outcome" not in found or "scenario" not in found:
        return None
    return Result(
        backend=found["backend"],
        scenario=found["scenario"],
        theme=found["theme"],
        outcome=Outcome(found["outcome"]),
        seconds=float(found["seconds"]),
        reason=found["reason"],
        detail=detail,
    )
