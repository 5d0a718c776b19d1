from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MEMORY = Path("/dev/shm")
sys.path.insert(0, str(HERE))  # helper modules beside the tests


@pytest.fixture
def session_directory() -> Iterator[Path]:
    """A place for session directories where syncing a file costs nothing."""
    where = MEMORY if MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="weightwire-session-", dir=where) as directory:
        yield Path(directory)


class Child:
    """A process that runs one action of ``session_worker.py``."""

    def __init__(self, action: str, **arguments: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "session_worker.py"), action, json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._read = b""

    @property
    def pid(self) -> int:
        return self.process.pid

    def hear(self, seconds: float = 60) -> dict:
        """The next line that it prints."""
        end = time.monotonic() + seconds
        out = self.process.stdout
        while b"\n" not in self._read:
            if not select.select([out], [], [], max(0.0, end - time.monotonic()))[0]:
                raise AssertionError(f"{self.process.args[2]} said nothing in {seconds} s")
            piece = os.read(out.fileno(), 1 << 16)
            if not piece:
                raise AssertionError(self.process.stderr.read().decode())
            self._read += piece
        line, _, self._read = self._read.partition(b"\n")
        return json.loads(line)

    def has_spoken(self) -> bool:
        """Whether there is something to hear."""
        return bool(select.select([self.process.stdout], [], [], 0)[0])

    def tell(self, text: str = "go") -> None:
        self.process.stdin.write(f"{text}\n".encode())
        self.process.stdin.flush()

    def signal(self, number: int) -> None:
        """Send a signal; one that stops it has done so on return."""
        self.process.send_signal(number)
        while number == signal.SIGSTOP and self._runs():
            time.sleep(0.001)

    def _runs(self) -> bool:
        tasks = Path(f"/proc/{self.pid}/task").glob("*/stat")
        return any(task.read_text().rpartition(")")[2].split()[0] != "T" for task in tasks)

    def end(self, seconds: float = 30) -> int:
        """Close its input and wait for it."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        return self.process.wait(seconds)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait(30)
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
        self.process.stderr.close()


@pytest.fixture
def child() -> Iterator[Callable[..., Child]]:
    started: list[Child] = []

    def start(action: str, **arguments: object) -> Child:
        started.append(Child(action, **arguments))
        return started[-1]

    yield start
    for process in started:
        process.kill()


@pytest.fixture
def free_port() -> int:
    """A port that nobody listens on; bound at once by whoever is given it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="session")
def tcp_server() -> Iterator[str]:
    """Address of a store that another process serves; each test takes a name of its own."""
    server = Child("serve", url="tcp://127.0.0.1:0/server")
    try:
        yield server.hear()["url"].removesuffix("/server")
    finally:
        server.kill()


@pytest.fixture(params=["file", "tcp"])
def session_url(request, tmp_path: Path) -> str:
    """A new session of each scheme."""
    if request.param == "file":
        return f"file://{tmp_path}/session"
    return f"{request.getfixturevalue('tcp_server')}/{secrets.token_hex(6)}"


@pytest.fixture(autouse=True)
def _no_token(monkeypatch) -> None:
    monkeypatch.delenv("WEIGHTWIRE_TOKEN", raising=False)
