"""Random faults: nobody claims what it doesn't hold, nothing hangs, and there is progress."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from redis_server import RedisServer

from weightwire_conformance.chaos import FAULTS, ChaosReport

RunChaos = Callable[..., ChaosReport]

RESULTS = Path(__file__).parents[2] / "results"
BACKENDS = ("memory", "filesystem", "nccl", "nixl")
NOT_EVERYWHERE = {"truncated-file", "full-disk"}
NETWORK = ("cut-connections", "slow-connections", "restart-session-server")


LOCAL = tuple(fault.name for fault in FAULTS if fault.name not in NETWORK)


def behind_a_proxy(server: RedisServer) -> dict[str, object]:
    return {"session": server.url("chaos"), "restart_server": server.restart}


def seed() -> int:
    return int(os.environ.get("WEIGHTWIRE_SEED", random.SystemRandom().randrange(1 << 31)))


@pytest.mark.parametrize("backend", ["memory", "filesystem"])
def test_each_fault_once(run_chaos: RunChaos, backend: str) -> None:
    report = run_chaos(backend, seed(), versions=8, each=1, kinds=LOCAL)
    assert report.ok, report.to_dict()
    assert report.versions >= 8
    kinds = set(LOCAL) - report.impossible.keys()
    assert set(report.faults) == kinds
    assert report.impossible.keys() <= NOT_EVERYWHERE
    assert report.checks > report.versions


@pytest.mark.parametrize("backend", ["nccl", "nixl"])
def test_a_few_faults(run_chaos: RunChaos, backend: str) -> None:
    """All of them in the soak."""
    report = run_chaos(backend, seed(), versions=4, each=0)
    assert report.ok, report.to_dict()
    assert report.versions == 4


def test_a_session_server_restarts_and_its_connections_are_slow_and_cut(
    run_chaos: RunChaos, redis_server: RedisServer
) -> None:
    report = run_chaos(
        "memory", seed(), versions=3, each=1, kinds=NETWORK, **behind_a_proxy(redis_server)
    )
    assert report.ok, report.to_dict()
    assert set(report.faults) == set(NETWORK)


@pytest.mark.parametrize("backend", ["nccl", "nixl"])
def test_connections_that_bytes_take_are_cut(run_chaos_over_tcp: RunChaos, backend: str) -> None:
    report = run_chaos_over_tcp(backend, seed(), versions=3, each=2, kinds=("cut-connections",))
    assert report.ok, report.to_dict()
    assert report.faults["cut-connections"] >= 2


@pytest.mark.parametrize(
    ("culprit", "finds"),
    [
        ("mutates-after-commit", "names version"),
        ("acknowledges-early", "names version|didn't reach everybody|no progress"),
        ("unfit-after-abort", "didn't reach everybody|no progress"),
    ],
)
def test_a_planted_bug_is_found(run_chaos: RunChaos, culprit: str, finds: str) -> None:
    kinds = ("kill-receiver-rank", "interrupt-sender", "join")
    # Faults come at any time: as many versions as it takes.
    report = run_chaos(culprit, 1, versions=200, each=2, kinds=kinds, recovery=10.0)
    assert not report.ok
    assert any(
        part in text for text in report.wrong + report.problems for part in finds.split("|")
    ), report.to_dict()


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("backend", BACKENDS)
def test_three_hundred_versions_with_thirty_of_each_fault(
    run_chaos: RunChaos, backend: str
) -> None:
    report = run_chaos(backend, seed(), versions=300, each=30)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"chaos_{backend}.json").write_text(json.dumps(report.to_dict(), indent=1))
    assert report.ok, report.to_dict()


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("backend", ["memory", "filesystem"])
def test_a_session_server_behind_a_bad_network(
    run_chaos: RunChaos, redis_server: RedisServer, backend: str
) -> None:
    """All faults, and its connections slow and cut."""
    report = run_chaos(backend, seed(), versions=300, each=30, **behind_a_proxy(redis_server))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"chaos_{backend}_redis.json").write_text(json.dumps(report.to_dict(), indent=1))
    assert report.ok, report.to_dict()


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("backend", ["nccl", "nixl"])
def test_thirty_cuts_of_what_carries_the_bytes(run_chaos_over_tcp: RunChaos, backend: str) -> None:
    kinds = ("cut-connections", "kill-receiver-rank", "join")
    report = run_chaos_over_tcp(backend, seed(), versions=90, each=30, kinds=kinds)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"chaos_{backend}_tcp.json").write_text(json.dumps(report.to_dict(), indent=1))
    assert report.ok, report.to_dict()
