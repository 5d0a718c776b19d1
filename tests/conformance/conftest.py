from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("weightwire_conformance.scenarios")

import culprits  # noqa: E402

from weightwire_conformance.execute import Bench, Prepared, prepare  # noqa: E402
from weightwire_conformance.outcomes import Result  # noqa: E402
from weightwire_conformance.rig import Pool  # noqa: E402
from weightwire_conformance.scenario import Case, cases  # noqa: E402

PATIENCE = 16.0
SHORT_PATIENCE = 5.0


class Lab:
    """Runs single cases over single backends, broken ones included."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.cases: dict[str, Case] = {case.name: case for case in cases(large=True)}
        self._prepared: dict[str, Prepared] = {}

    def prepare(self, backend: str) -> Prepared:
        if backend not in self._prepared:
            self._prepared[backend] = prepare(self.pool, backend, {})
        return self._prepared[backend]

    def run(self, scenario: str | Case, backend: str, **bench) -> Result:
        case = scenario if isinstance(scenario, Case) else self.cases[scenario]
        self.pool.patience = SHORT_PATIENCE if backend in culprits.SLOW else PATIENCE
        result = Bench(self.pool, **bench).run(case, self.prepare(backend))
        self.pool.end(backend)
        return result


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> str:
    return culprits.install(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="session")
def lab(site: str) -> Iterator[Lab]:
    pool = Pool(PATIENCE, environment={"PYTHONPATH": site})
    yield Lab(pool)
    pool.close()
