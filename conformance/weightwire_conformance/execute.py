"""One case over one backend: run, cleaned up after, and judged."""

from __future__ import annotations

import itertools
import os
import time
import traceback
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weightwire_conformance.outcomes import ExpectedFailure, Outcome, Result, expect
from weightwire_conformance.rig import Fleet, LeftBehind, Pool, RemoteError
from weightwire_conformance.scenario import Case

__all__ = ["Bench", "Prepared", "prepare"]

_REFUSAL = "UnsupportedOperation"
_NUMBERS = itertools.count(1)
"""Of scenarios, whoever runs them: their directories may lie side by side."""


@dataclass(frozen=True)
class Prepared:
    """A backend before its first scenario.

    Attributes:
        options: given to it on both sides.
        capabilities: what it declares; None when it can't be used.
        unavailable: the probe's reason, or "".
        broken: why its plug-in or options are wrong, or "".
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    capabilities: Mapping[str, Any] | None = None
    unavailable: str = ""
    broken: str = ""


def prepare(pool: Pool, name: str, options: Mapping[str, Any]) -> Prepared:
    """Ask a worker for a backend's declaration, and whether it runs here."""
    worker = pool.take(name)
    try:
        described = worker.call("describe", backend=name)
        worker.call("select", backend={"backend": name, **options})
    except RemoteError as error:
        if "BackendUnavailable" in error.kinds:
            return Prepared(name, options, unavailable=error.message)
        return Prepared(name, options, broken=f"{error.kind}: {error.message}")
    except AssertionError as error:  # not even its 20 s ended the probe
        reason = f"backend {name!r} holds its process while it is probed: upgrade it"
        return Prepared(name, options, broken=f"{reason}\n{error}")
    finally:
        worker.discard()
    return Prepared(name, options, described["capabilities"])


class Bench:
    """Runs cases, several at once from as many threads.

    Args:
        expected: failures that were declared beforehand.
        require: a backend that can't run here counts as FAILED.
    """

    def __init__(
        self, pool: Pool, *, expected: Sequence[ExpectedFailure] = (), require: bool = False
    ) -> None:
        self._pool = pool
        self._expected = expected
        self._require = require

    def preload(self, cases: Sequence[Case]) -> None:
        """Import what some of these need, before any of them runs."""
        self._pool.preload(*(module for case in cases for module in case.imports))

    def run(self, case: Case, backend: Prepared) -> Result:
        """One case, from its processes to its outcome."""
        began = time.monotonic()
        outcome, reason, detail = self._judge(case, backend)
        seconds = round(time.monotonic() - began, 3)
        result = Result(backend.name, case.name, case.theme, outcome, seconds, reason, detail)
        return expect(result, self._expected)

    def _judge(self, case: Case, backend: Prepared) -> tuple[Outcome, str, str]:
        if backend.unavailable:
            outcome = Outcome.FAILED if self._require else Outcome.UNAVAILABLE
            return outcome, _first(backend.unavailable), backend.unavailable
        if backend.capabilities is None:
            return Outcome.FAILED, _first(backend.broken), backend.broken
        declared = case.need is None or case.need.declared(backend.capabilities)
        failure = self._attempt(case, backend, backend.capabilities)
        if failure is None:
            if declared:
                return Outcome.PASSED, "", ""
            assert case.need is not None  # noqa: S101 - else it would be declared
            reason = f"works, and isn't declared: {case.need.text}"
            return Outcome.FAILED, reason, f"{reason}\ndeclare it in the backend's Capabilities"
        detail = "".join(traceback.format_exception(failure))
        reason = _first(str(failure)) or type(failure).__name__
        kinds = failure.kinds if isinstance(failure, RemoteError) else ()
        if _REFUSAL in kinds and not declared:
            return Outcome.UNSUPPORTED, reason, detail
        if _REFUSAL in kinds:
            reason = f"can't be refused: {reason}"
        elif not declared and not isinstance(failure, LeftBehind):
            reason = f"must be refused with {_REFUSAL}, and got {reason}"
        return Outcome.FAILED, reason, detail

    def _attempt(
        self, case: Case, backend: Prepared, capabilities: Mapping[str, Any]
    ) -> Exception | None:
        seed = int(os.environ.get("WEIGHTWIRE_SEED", "0")) ^ zlib.crc32(case.name.encode())
        fleet = Fleet(
            self._pool,
            backend.name,
            backend.options,
            capabilities,
            f"scenario-{next(_NUMBERS)}",
            seed=seed,
        )
        failure: Exception | None = None
        reuse = False
        try:
            self._pool.preload(*case.imports)
            case.run(fleet)
            reuse = True
        except Exception as error:
            failure = error
            # A refusal is an orderly end: its processes must be clean too.
            reuse = isinstance(error, RemoteError) and _REFUSAL in error.kinds
        finally:
            try:
                fleet.close(reuse=reuse)
            except LeftBehind as left:
                failure = left
        return failure


def _first(text: str) -> str:
    return text.strip().partition("\n")[0]
