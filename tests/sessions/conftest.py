from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # helper modules beside the tests

from redis_server import RedisServer  # noqa: E402 - found there

from weightwire.deadline import Deadline  # noqa: E402
from weightwire.session import Session  # noqa: E402


@pytest.fixture
def run_redis(tmp_path: Path) -> Iterator[Callable[..., RedisServer]]:
    """Starts servers that end with the test."""
    servers: list[RedisServer] = []

    def run(**options: object) -> RedisServer:
        servers.append(RedisServer(tmp_path / f"redis-{len(servers)}", **options))
        return servers[-1].start()

    yield run
    for server in servers:
        server.kill()


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One server for tests that leave it as it is; each takes a name of its own."""
    server = RedisServer(tmp_path_factory.mktemp("redis")).start()
    yield server
    server.kill()


@pytest.fixture
def open_session() -> Iterator[Callable[..., Session]]:
    with contextlib.ExitStack() as stack:

        def opener(url: str, *, seconds: float = 20, **options: object) -> Session:
            session = Session.open(url, deadline=Deadline(seconds), **options)
            stack.callback(session.close)
            return session

        yield opener


@pytest.fixture(autouse=True)
def _no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEIGHTWIRE_TOKEN", raising=False)
