from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "conformance"))
sys.path.append(str(Path(__file__).parents[1] / "sessions"))

import culprits
from redis_server import RedisServer

from weightwire_conformance.chaos import ChaosOptions, ChaosReport, run
from weightwire_conformance.rig import Pool

RunChaos = Callable[..., ChaosReport]


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Workers that know the broken backends too."""
    site = culprits.install(tmp_path_factory.mktemp("broken"))
    pool = Pool(environment={"PYTHONPATH": site})
    yield pool
    pool.close()


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path / "redis", keep=True).start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def tcp_pool() -> Iterator[Pool]:
    """Workers whose data goes over TCP, whatever they could use."""
    pool = Pool(environment={"UCX_TLS": "tcp"})
    yield pool
    pool.close()


@pytest.fixture
def run_chaos_over_tcp(tcp_pool: Pool) -> RunChaos:
    def run_over(backend: str, seed: int, **options: object) -> ChaosReport:
        print(f"UCX_TLS=tcp weightwire chaos {backend} --seed {seed}")
        report = run(ChaosOptions(backend, seed, **options), tcp_pool)
        tcp_pool.end(backend)
        return report

    return run_over


@pytest.fixture
def run_chaos(pool: Pool) -> RunChaos:
    def run_over(backend: str, seed: int, **options: object) -> ChaosReport:
        print(f"weightwire chaos {backend} --seed {seed}")
        report = run(ChaosOptions(backend, seed, **options), pool)
        pool.end(backend)
        return report

    return run_over
