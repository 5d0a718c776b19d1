from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scenarios"))
sys.path.insert(0, str(Path(__file__).parent))

from nixl_rig import WAYS, NixlFleet, Way, open_pool
from nixl_transports import Transports
from process_rig import Pool

MakeFleet = Callable[..., NixlFleet]


@pytest.fixture(scope="session")
def pools() -> Iterator[Callable[[str | None], Pool]]:
    """One pool for each environment that UCX reads."""
    found: dict[str | None, Pool] = {}

    def pool(tls: str | None) -> Pool:
        if tls not in found:
            found[tls] = open_pool(tls)
        return found[tls]

    yield pool
    for each in found.values():
        each.close()


@pytest.fixture(params=WAYS, ids=str)
def way(request: pytest.FixtureRequest) -> Way:
    return request.param


@pytest.fixture
def make_fleet(pools: Callable[[str | None], Pool], tmp_path: Path) -> Iterator[MakeFleet]:
    fleets: list[NixlFleet] = []

    def make(way: Way = WAYS[0], scheme: str = "file") -> NixlFleet:
        directory = tmp_path / str(len(fleets))
        directory.mkdir()
        fleets.append(NixlFleet(pools(way.tls), way, directory, scheme))
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
def transports() -> Iterator[Transports]:
    opened = Transports()
    yield opened
    opened.close()
