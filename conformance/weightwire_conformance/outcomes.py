"""The five outcomes, and how a scenario gets one.

==============  ============================================================
passed          it proved what it is named for
FAILED          it didn't; or it must refuse and doesn't; or an expected
                failure passes
unsupported     the capability that it needs isn't declared, and asking for it
                raised ``UnsupportedOperation``
xfail           it fails as a file of expected failures says, with a reason,
                whose fault it is and a link
unavailable     the backend can't run here; never counted as passed
==============  ============================================================
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from weightwire.errors import ConfigError

__all__ = ["ExpectedFailure", "Outcome", "Result", "expect", "read_expected"]


class Outcome(Enum):
    PASSED = "passed"
    FAILED = "FAILED"
    UNSUPPORTED = "unsupported"
    XFAIL = "xfail"
    UNAVAILABLE = "unavailable"


@dataclass(frozen=True)
class Result:
    """One scenario over one backend.

    Attributes:
        reason: one line; empty when it passed.
        detail: all that is known about a failure.
    """

    backend: str
    scenario: str
    theme: str
    outcome: Outcome
    seconds: float = 0.0
    reason: str = ""
    detail: str = ""


@dataclass(frozen=True)
class ExpectedFailure:
    """A scenario that fails for somebody else's fault, until that is mended.

    Attributes:
        fault: the project whose fault it is.
        link: where it was reported.
    """

    backend: str
    scenario: str
    reason: str
    fault: str
    link: str


def read_expected(
    path: Path, scenarios: Iterable[str], backends: Iterable[str]
) -> list[ExpectedFailure]:
    """Read a TOML file of ``[[xfail]]`` tables.

    Args:
        scenarios, backends: those that there are.

    Raises:
        ConfigError: the file can't be read; an entry lacks its reason, fault or link; or is
            about something that there isn't.
    """
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"expected failures {path} can't be read: {error}") from error
    known = {"scenario": set(scenarios), "backend": set(backends)}
    entries = content.pop("xfail", ())
    tables = isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)
    if content or not tables:
        wrong = sorted(content)[0] if content else "xfail"
        raise ConfigError(f"{path} has {wrong!r}: write [[xfail]] tables, and nothing else")
    return [
        _checked(entry, f"{path}, [[xfail]] {number}", known)
        for number, entry in enumerate(entries, 1)
    ]


def _checked(entry: dict[str, Any], where: str, known: dict[str, set[str]]) -> ExpectedFailure:
    fields = ("backend", "scenario", "reason", "fault", "link")
    for field in fields:
        if not isinstance(entry.get(field), str) or not entry[field].strip():
            raise ConfigError(f"{where} has no {field!r}: write {', '.join(fields)}")
    if extra := sorted(entry.keys() - set(fields)):
        raise ConfigError(f"{where} has {extra[0]!r}: write only {', '.join(fields)}")
    if not entry["link"].startswith("https://"):
        raise ConfigError(f"{where}: link {entry['link']!r} isn't one: report it, and link to that")
    for what, names in known.items():
        if entry[what] not in names:
            near = difflib.get_close_matches(entry[what], sorted(names), 3, 0.0)
            raise ConfigError(
                f"{where}: there is no {what} {entry[what]!r}: the nearest are {', '.join(near)}"
            )
    return ExpectedFailure(**entry)


def expect(result: Result, expected: Sequence[ExpectedFailure]) -> Result:
    """The result in the light of what was expected to fail."""
    for failure in expected:
        if (failure.backend, failure.scenario) != (result.backend, result.scenario):
            continue
        why = f"{failure.reason} (fault of {failure.fault}: {failure.link})"
        if result.outcome is Outcome.FAILED:
            return _with(result, Outcome.XFAIL, why)
        if result.outcome is Outcome.PASSED:
            return _with(result, Outcome.FAILED, f"passes, and was expected to fail: {why}")
        if result.outcome is Outcome.UNSUPPORTED:
            return _with(result, Outcome.FAILED, f"is refused, and was expected to fail: {why}")
    return result


def _with(result: Result, outcome: Outcome, reason: str) -> Result:
    return Result(
        result.backend,
        result.scenario,
        result.theme,
        outcome,
        result.seconds,
        reason,
        result.detail or reason,
    )
