"""What lies between processes and a server: a proxy that delays, and cuts."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from urllib.parse import urlsplit, urlunsplit

__all__ = ["Proxy"]

_CHUNK = 64 << 10


class Proxy:
    """Listens on loopback and passes everything on.

    Args:
        url: of a session whose server it stands before.

    Attributes:
        url: the session's through it.
        delay: seconds that every piece of data takes longer, in each direction.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.hostname is None or parts.port is None:
            raise ValueError(f"session URL {url!r} has no host and port: write both")
        self._target = (parts.hostname, parts.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        user, at, _ = parts.netloc.rpartition("@")
        here = f"{user}{at}127.0.0.1:{self._listener.getsockname()[1]}"
        self.url = urlunsplit(parts._replace(netloc=here))
        self.delay = 0.0
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def cut(self) -> int:
        """End every connection; says how many there were."""
        with self._lock:
            ends, self._open = self._open, set()
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        return len(ends) // 2

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()  # nothing comes in any more
        self.cut()
        for thread in self._threads:
            thread.join()

    def _start(self, work: object, *arguments: object) -> None:
        thread = threading.Thread(
            target=work,  # type: ignore[arg-type]  # one of ours
            args=arguments,
            name="weightwire-chaos-proxy",
            daemon=True,
        )
        self._threads = [each for each in self._threads if each.is_alive()]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._target, 5)
            except OSError:
                near.close()  # the server is away: so are we
                continue
            far.settimeout(None)
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._open |= {near, far}
            left = [2]
            self._start(self._pass_on, near, far, left)
            self._start(self._pass_on, far, near, left)

    def _pass_on(self, here: socket.socket, there: socket.socket, left: list[int]) -> None:
        with contextlib.suppress(OSError):
            while data := here.recv(_CHUNK):
                if self.delay:
                    time.sleep(self.delay)
                there.sendall(data)
        for end in (here, there):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._open -= {here, there}
            left[0] -= 1
            last = left[0] == 0
        if last:
            here.close()
            there.close()
