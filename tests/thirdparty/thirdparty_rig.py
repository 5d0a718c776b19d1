"""Installs the third-party projects, and starts real processes that use them.

A process is forked from one that has imported everything.  It takes commands as
JSON lines on a socket, one at a time, and answers each with one line.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Self

HERE = Path(__file__).parent
PROJECTS = tuple(
    HERE / name for name in ("weightwire-acme", "weightwire-sqlite", "weightwire-jsonlog")
)
PATIENCE = 60.0


def install(target: Path, *projects: Path) -> Path:
    """Build and install without an index: the build backend is in the environment already."""
    command = [
        *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
        *("--no-deps", "--no-build-isolation", "--no-index", "--target", str(target)),
        *map(str, projects),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return target


def load(path: Path) -> ModuleType:
    """Import a module from its file, without installing it."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def environment(*sites: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("WEIGHTWIRE_")}
    return {**kept, "PYTHONPATH": os.pathsep.join(map(str, sites)), "OMP_NUM_THREADS": "1"}


def weightwire(*arguments: str, sites: tuple[Path, ...]) -> subprocess.CompletedProcess[str]:
    """The command line, with the distributions of these directories installed."""
    command = [str(Path(sys.executable).parent / "weightwire"), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False, env=environment(*sites)
    )


class Failed(Exception):
    """A command failed in its process."""

    def __init__(self, answer: dict[str, Any]) -> None:
        super().__init__(f"{answer['error'][0]}: {answer['message']}")
        self.kinds: list[str] = answer["error"]
        self.message: str = answer["message"]
        self.seconds: float = answer["seconds"]


class Peer:
    """One rank's process."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(PATIENCE)
        self._socket.connect(address)
        self._lines = self._socket.makefile("r")
        self.pid: int = self.answer()

    def start(self, do: str, **arguments: Any) -> Peer:
        self._socket.sendall(json.dumps({"do": do, **arguments}).encode() + b"\n")
        return self

    def answer(self) -> Any:
        answer = json.loads(self._lines.readline())
        if "error" in answer:
            raise Failed(answer)
        return answer["result"]

    def call(self, do: str, **arguments: Any) -> Any:
        return self.start(do, **arguments).answer()

    def failure(self) -> Failed:
        try:
            result = self.answer()
        except Failed as failure:
            return failure
        raise AssertionError(f"expected a failure, got {result}")

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def fileno(self) -> int:
        return self._socket.fileno()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.close()

    def close(self) -> None:
        self._lines.close()
        self._socket.close()


def answers(peers: Sequence[Peer]) -> list[Any]:
    """What they all answer; the first failure is raised at once, whoever waits for that peer."""
    results: dict[Peer, Any] = {}
    with selectors.DefaultSelector() as ready:
        for peer in peers:
            ready.register(peer, selectors.EVENT_READ)
        until = time.monotonic() + PATIENCE
        while ready.get_map():
            found = ready.select(max(0.0, until - time.monotonic()))
            if not found:
                silent = [peer.pid for peer in peers if peer not in results]
                raise AssertionError(f"no answer within {PATIENCE:g} s from processes {silent}")
            for key, _ in found:
                results[key.fileobj] = key.fileobj.answer()
                ready.unregister(key.fileobj)
    return [results[peer] for peer in peers]


class Pool:
    """The process that others are forked from."""

    def __init__(self, site: Path) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="weightwire-thirdparty-")
        self._address = str(Path(self._directory.name) / "peers")
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "thirdparty_peer.py"), self._address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(site),
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"

    def peer(self) -> Peer:
        return Peer(self._address)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._directory.cleanup()


class World:
    """The processes of one test."""

    def __init__(self, pool: Pool, directory: Path) -> None:
        self._pool = pool
        self.session = f"sqlite://{directory / 'run.db'}"
        self.log = directory / "log.jsonl"
        self._peers: list[Peer] = []

    def processes(self, count: int) -> list[Peer]:
        peers = [self._pool.peer() for _ in range(count)]
        self._peers += peers
        return peers

    def peers(self, count: int, do: str, **arguments: Any) -> list[Peer]:
        """The ranks of one side, opened."""
        peers = self.processes(count)
        for rank, peer in enumerate(peers):
            where = {"session": self.session, "log": str(self.log)}
            ranks = {"rank": rank, "world_size": count}
            peer.start(do, **where, **ranks, **arguments)
        answers(peers)
        return peers

    def sender(self, ranks: int = 1, **options: Any) -> list[Peer]:
        return self.peers(ranks, "open_sender", **options)

    def receiver(self, name: str, ranks: int = 1, **options: Any) -> list[Peer]:
        return self.peers(ranks, "open_receiver", receiver_id=name, **options)

    def events(self, count: int) -> list[dict[str, Any]]:
        """The log's lines, once there are that many."""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            lines = self.log.read_text().splitlines() if self.log.exists() else []
            if len(lines) >= count:
                return [json.loads(line) for line in lines]
            time.sleep(0.01)
        raise AssertionError(f"{len(lines)} lines in the log, not {count}: {lines}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for peer in self._peers:
            peer.kill()
