"""Runs cases over broken backends, several at once: most of what one does is waiting."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import culprits

from weightwire_conformance.execute import Bench, Prepared, prepare
from weightwire_conformance.outcomes import Result
from weightwire_conformance.rig import Pool
from weightwire_conformance.scenario import Case, cases

__all__ = ["Lab"]

PATIENCE = 16.0
SHORT_PATIENCE = 6.0


class Lab:
    """Runs single cases over single backends, broken ones included.

    Args:
        site: ``PYTHONPATH`` on which they are installed.
    """

    def __init__(self, site: str) -> None:
        self.cases: dict[str, Case] = {case.name: case for case in cases(large=True)}
        environment = {"PYTHONPATH": site}
        self._patient = Pool(PATIENCE, environment)
        self._short = Pool(SHORT_PATIENCE, environment)
        self._lock = threading.Lock()
        self._prepared: dict[str, Prepared] = {}
        self._ahead: dict[culprits.Proof, Future[Result]] = {}
        self._executor: ThreadPoolExecutor | None = None

    def pool(self, backend: str) -> Pool:
        return self._short if backend in culprits.SLOW else self._patient

    def prepare(self, backend: str) -> Prepared:
        with self._lock:
            if backend not in self._prepared:
                self._prepared[backend] = prepare(self.pool(backend), backend, {})
            return self._prepared[backend]

    def run(self, scenario: str | Case, backend: str, **bench) -> Result:
        """One case; its processes end with it."""
        try:
            return self.run_warm(scenario, backend, **bench)
        finally:
            self.end(backend)

    def run_warm(self, scenario: str | Case, backend: str, **bench) -> Result:
        """One case; its processes serve the next one over this backend."""
        case = scenario if isinstance(scenario, Case) else self.cases[scenario]
        return Bench(self.pool(backend), **bench).run(case, self.prepare(backend))

    def end(self, backend: str) -> None:
        """No more cases over this backend."""
        self.pool(backend).end(backend)

    def begin(self, proofs: Iterable[culprits.Proof], jobs: int) -> None:
        """Run these before they are asked for; those that take long first."""
        self._executor = ThreadPoolExecutor(jobs, thread_name_prefix="culprit")
        for proof in sorted(proofs, key=lambda proof: proof.culprit not in culprits.SLOW):
            self._ahead[proof] = self._executor.submit(self.run, proof.scenario, proof.culprit)

    def prove(self, proof: culprits.Proof) -> Result:
        return self._ahead[proof].result()

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
        self._patient.close()
        self._short.close()
