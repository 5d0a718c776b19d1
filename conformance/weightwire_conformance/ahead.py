"""Cases that run beside each other: most of what one does is waiting."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from weightwire_conformance.execute import Bench, Prepared
from weightwire_conformance.outcomes import Result
from weightwire_conformance.scenario import Case

__all__ = ["JOBS", "Ahead"]

JOBS = min(8, 2 * (os.cpu_count() or 1))
"""Cases at once, unless told otherwise."""


class Ahead:
    """Runs the cases that will be asked for, before they are.

    Args:
        jobs: how many at once.
    """

    def __init__(self, bench: Bench, jobs: int) -> None:
        self._bench = bench
        self._executor = ThreadPoolExecutor(jobs, thread_name_prefix="weightwire-case")
        self._results: dict[tuple[str, str], Future[Result]] = {}

    def begin(self, backend: Prepared, cases: Sequence[Case]) -> None:
        """Run these in their order, but those that take long first."""
        # Before they begin: nothing is forked meanwhile.
        self._bench.preload(cases)
        for case in sorted(cases, key=lambda case: not case.long):
            self._begin(backend, case)

    def result(self, backend: Prepared, case: Case) -> Result:
        """Of one case, once it is there; begun now if it wasn't."""
        if (backend.name, case.name) not in self._results:
            self._begin(backend, case)
        return self._results[backend.name, case.name].result()

    def _begin(self, backend: Prepared, case: Case) -> None:
        future = self._executor.submit(self._bench.run, case, backend)
        self._results[backend.name, case.name] = future

    def stop(self) -> None:
        """Begin no more; what runs ends when its processes do."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def join(self) -> None:
        self._executor.shutdown()
