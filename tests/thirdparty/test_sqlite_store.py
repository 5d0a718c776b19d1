"""The session store of a third party: errors that say what to do; the kit proves the rest."""

from __future__ import annotations

import sqlite3
import stat
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import ModuleType
from urllib.parse import urlsplit

import pytest
from thirdparty_rig import HERE, Pool, World, answers, load

from weightwire import ConfigError, SessionError
from weightwire.deadline import Deadline, calling
from weightwire.session import OpenRequest, SessionStore


@pytest.fixture(scope="module")
def plugin() -> ModuleType:
    return load(HERE / "weightwire-sqlite" / "weightwire_sqlite.py")


def opened(plugin: ModuleType, url: str, seconds: float = 5) -> SessionStore:
    scheme = plugin.weightwire_describe_session_scheme()
    return scheme.open(OpenRequest(urlsplit(url), False, False, Deadline(seconds)))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run 42.db"


@pytest.fixture
def stores(plugin: ModuleType, path: Path) -> Iterator[list[SessionStore]]:
    """Connections to one file, as several processes have them."""
    url = f"sqlite://{path}".replace(" ", "%20")
    stores = [opened(plugin, url) for _ in range(4)]
    yield stores
    for store in stores:
        store.close()
        store.close()


def test_many_processes_open_a_new_file_at_once(pool: Pool, tmp_path: Path) -> None:
    """Each switches it to the log and makes the table; one of them gets the key."""
    with World(pool, tmp_path) as world:
        peers = world.processes(16)
        for turn in range(8):
            at = time.monotonic() + 0.02
            for peer in peers:
                session = f"sqlite://{tmp_path / f'{turn}.db'}"
                peer.start("claim", session=session, key="claim", at=at)
            assert sorted(answers(peers)) == [False] * 15 + [True]


@pytest.fixture
def held(path: Path) -> Iterator[sqlite3.Connection]:
    """Another process's connection that holds the file; SQLite never waits for this one."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("CREATE TABLE others (key TEXT)")
        connection.execute("BEGIN IMMEDIATE")
        yield connection


def test_a_file_that_another_process_holds_is_waited_for(
    plugin: ModuleType, path: Path, held: sqlite3.Connection
) -> None:
    url = f"sqlite://{path}".replace(" ", "%20")
    with ThreadPoolExecutor(1) as background:
        opening = background.submit(opened, plugin, url)
        time.sleep(0.2)
        assert not opening.done()
        held.rollback()
        store = opening.result()
        held.execute("BEGIN IMMEDIATE")
        putting = background.submit(store.put, "a", b"b")
        time.sleep(0.2)
        assert not putting.done()
        held.rollback()
        putting.result()
    assert store.get("a") == b"b"
    store.close()


def test_a_file_that_is_held_beyond_the_deadline_is_named(
    plugin: ModuleType, path: Path, held: sqlite3.Connection
) -> None:
    url = f"sqlite://{path}".replace(" ", "%20")
    with pytest.raises(SessionError, match=r"run 42.db is locked, and was for 0.3 s"):
        opened(plugin, url, seconds=0.3)
    held.rollback()
    store = opened(plugin, url)
    held.execute("BEGIN IMMEDIATE")
    with calling(Deadline(0.3)), pytest.raises(SessionError, match="end the process that holds"):
        store.put("a", b"b")
    store.close()


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX file modes")
def test_the_file_and_its_logs_are_private(stores: list[SessionStore], path: Path) -> None:
    stores[0].put("a", b"b")
    files = [file for file in path.parent.iterdir() if file.name.startswith(path.name)]
    assert len(files) == 3
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}


def test_a_deleted_file_is_noticed(stores: list[SessionStore], path: Path) -> None:
    path.unlink()
    with pytest.raises(SessionError, match="was its file deleted"):
        stores[0].get("a")
    path.touch()
    with pytest.raises(SessionError, match="was its file deleted"):
        stores[0].put("a", b"b", durable=False)


def test_a_closed_store_says_so(stores: list[SessionStore]) -> None:
    stores[0].close()
    with pytest.raises(SessionError, match="is closed"):
        stores[0].get("a")


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("sqlite://host/run.db", ConfigError),
        ("sqlite:///", ConfigError),
        ("sqlite:run.db", ConfigError),
        ("sqlite:///nowhere/at/all/run.db", SessionError),
        ("sqlite:///dev/null", SessionError),
    ],
)
def test_what_cannot_be_opened_is_named(
    plugin: ModuleType, url: str, error: type[Exception]
) -> None:
    with pytest.raises(error, match="sqlite:"):
        opened(plugin, url)


def test_a_file_of_another_kind_is_left_alone(plugin: ModuleType, path: Path) -> None:
    path.write_text("my diary, " * 1000)
    with pytest.raises(SessionError, match="not a database"):
        opened(plugin, f"sqlite://{path}".replace(" ", "%20"))
    assert path.read_text() == "my diary, " * 1000
