"""Fixtures of the process rig, for the conftest of each folder that uses it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import process_rig
import pytest
from process_rig import Fleet, Pool

__all__ = ["backend", "fleet", "make_fleet", "pool", "scheme"]


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    with process_rig.shared_pool() as pool:
        yield pool
    process_rig.close_pool()


@pytest.fixture(params=["memory", "filesystem"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=["file", "tcp"])
def scheme(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def make_fleet(pool: Pool, tmp_path: Path) -> Iterator[Callable[..., Fleet]]:
    fleets: list[Fleet] = []

    def make(backend: str = "memory", scheme: str = "file", name: str = "") -> Fleet:
        directory = tmp_path / name if name else tmp_path
        directory.mkdir(exist_ok=True)
        fleets.append(Fleet(pool, backend, scheme, directory))
        return fleets[-1]

    yield make
    problems = []
    for fleet in fleets:
        try:
            fleet.close()
        except AssertionError as error:
            problems.append(str(error))
    assert not problems, "\n".join(problems)


@pytest.fixture
def fleet(make_fleet: Callable[..., Fleet], backend: str) -> Fleet:
    """Processes over one backend, in a session on files."""
    return make_fleet(backend)
