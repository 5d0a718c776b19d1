"""A real redis-server for tests: started on a free port, and ended with them."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

__all__ = ["RedisServer", "redis_program"]

VENV = Path(sys.prefix) / "bin" / "redis-server"


def redis_program() -> str:
    """The server's program; a machine without it fails its tests rather than skip them."""
    found = shutil.which("redis-server") or (str(VENV) if VENV.exists() else None)
    if found is None:
        raise RuntimeError(
            "there is no redis-server: run scripts/install_redis.sh, or install it "
            "(Debian: apt-get install redis-server)"
        )
    return found


class RedisServer:
    """A server on loopback.

    Args:
        directory: its data; what it keeps there it has again after ``start``.
        keep: it writes every change down before it answers.  ``appendonly`` alone doesn't:
            while its disk is slow, what it has answered last is in its memory only.
        options: more of its configuration; the word ``PORT`` stands for its port.
    """

    def __init__(
        self, directory: Path, *, keep: bool = False, options: tuple[str, ...] = ()
    ) -> None:
        self.directory = directory
        self.options = options
        self.keep = keep
        self.port = _free_port()
        self.process: subprocess.Popen[bytes] | None = None
        directory.mkdir(parents=True, exist_ok=True)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def url(self, name: str = "run") -> str:
        return f"redis://{self.address}/{name}"

    def start(self, *, wait: bool = True) -> RedisServer:
        assert self.process is None
        plain = "0" if "--tls-port" in self.options else str(self.port)
        options = (str(self.port) if word == "PORT" else word for word in self.options)
        self.process = subprocess.Popen(
            [
                redis_program(),
                *("--bind", "127.0.0.1", "--port", plain, "--dir", str(self.directory)),
                *("--save", "", "--appendonly", "yes" if self.keep else "no"),
                *("--appendfsync", "always"),
                *("--daemonize", "no", "--logfile", str(self.directory / "log")),
                *options,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        if wait:
            self.wait()
        return self

    def wait(self, seconds: float = 30) -> None:
        """Until it takes connections."""
        end = time.monotonic() + seconds
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                if self.process.poll() is not None or time.monotonic() > end:
                    raise AssertionError((self.directory / "log").read_text()) from None
                time.sleep(0.01)

    def signal(self, number: int) -> None:
        """Send a signal; one that stops it has done so on return."""
        self.process.send_signal(number)
        while number == signal.SIGSTOP and self._runs():
            time.sleep(0.001)

    def _runs(self) -> bool:
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/stat")
        return any(task.read_text().rpartition(")")[2].split()[0] != "T" for task in tasks)

    def stop(self) -> None:
        """In good order: what it is to keep is kept."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """It dies, and comes back at the same port."""
        self.kill()
        self.start()

    def command(self, *words: str) -> object:
        """Ask it as an operator would, over a connection of its own."""
        import redis

        with redis.Redis(port=self.port, socket_timeout=10) as client:
            return client.execute_command(*words)

    def _end(self, number: int) -> None:
        if self.process is None:
            return
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.send_signal(number)
        self.process.wait(30)
        self.process = None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
