from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("weightwire_conformance.scenarios")

import culprits  # noqa: E402
from culprit_lab import Lab  # noqa: E402


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> str:
    return culprits.install(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="session")
def lab(site: str) -> Iterator[Lab]:
    lab = Lab(site)
    yield lab
    lab.close()
