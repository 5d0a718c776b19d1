"""Where members meet: a TCPStore that the sender's rank 0 serves.

Its port is bound here and handed over as an open socket, so that it is held from
the moment its number is known, on one interface and no other.  TCPStore's clients
block without a deadline of their own when the server stands still: whoever gives
up hangs up on its own connection.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from weightwire.errors import ConfigError, PeerLost, TransferError
from weightwire.session import tcpstore

__all__ = ["Client", "Server", "machine", "own_address"]

_LOOPBACK = "127.0.0.1"
_DISCARD = 9
_CONNECT_SECONDS = 5.0


def machine() -> str:
    """An id of this host's boot; empty where there is none."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def own_address(host: str | None, session_url: str) -> str:
    """The address of this process that the others reach.

    Raises:
        ConfigError: the name can't be resolved.
    """
    if host is not None:
        return _resolve(host)[0]
    try:
        peer = urlsplit(session_url).hostname or ""
    except ValueError:
        peer = ""
    if not peer or urlsplit(session_url).scheme == "file":
        return _LOOPBACK
    address, family = _resolve(peer)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, _DISCARD))  # sends nothing: only the route is looked up
        except OSError as error:
            raise ConfigError(
                f"no route to the session's host {peer!r} ({error.strerror}): set the nccl "
                "backend's option 'host'"
            ) from error
        return str(probe.getsockname()[0])


def _resolve(host: str) -> tuple[str, socket.AddressFamily]:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(
            f"host {host!r} can't be resolved ({error.strerror}): set the nccl backend's option "
            "'host' to an address of this machine"
        ) from error
    return str(address[0]), family


class Server:
    """The store, on a port of its own."""

    def __init__(self, host: str) -> None:
        try:
            listener = tcpstore.listen(host, 0)
        except OSError as error:
            raise ConfigError(
                f"{host!r} can't be listened on ({error.strerror}): set the nccl backend's option "
                "'host' to an address of this machine"
            ) from error
        self.host, self.port = host, int(listener.getsockname()[1])
        try:
            self._store: Any = tcpstore.serve(host, listener, _CONNECT_SECONDS)
        except RuntimeError as error:
            raise TransferError(
                f"nccl's members can't meet at {host} ({str(error).splitlines()[0]}): does this "
                f"host's name server answer for {host}?"
            ) from error

    def close(self) -> None:
        self._store = None


class Client:
    """A connection to the store, which takes one operation at a time; hung up on from any thread.

    Args:
        who: whose server it is, for messages.
    """

    def __init__(self, host: str, port: int, who: str) -> None:
        self._host, self._port, self._who = host, port, who
        self._ports: set[int] = set()
        self._others: set[int] = set()
        self.store: Any = None

    def connect(self, seconds: float) -> None:
        """Connect; the server must be there already.

        Raises:
            PeerLost: nobody listens.
            TransferError: this process has no file descriptor left.
        """
        seconds = min(_CONNECT_SECONDS, max(0.1, seconds))
        try:
            self._others = self._own_ports()
            tcpstore.probe(self._host, self._port, seconds)
            within = seconds + tcpstore.RESOLVE_SECONDS
            self.store = tcpstore.connect(self._host, self._port, within=within, seconds=seconds)
            self._ports = self._own_ports() - self._others
        except (OSError, RuntimeError) as error:
            raise self.gone(error) from error

    def gone(self, error: BaseException) -> TransferError:
        """What a failed operation means."""
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            return TransferError(
                f"no more files can be opened here ({error.strerror}): raise `ulimit -n`"
            )
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        return PeerLost(
            f"{self._who} is gone, or can't be reached at {self._host}:{self._port}: restart it, "
            f"or correct the nccl backend's option 'host'\n{text}"
        )

    def peek(self, key: str) -> bytes | None:
        """What lies at ``key``, or None; doesn't wait for it."""
        try:
            return bytes(self.store.get(key)) if self.store.check([key]) else None
        except RuntimeError as error:
            raise self.gone(error) from error

    def put(self, key: str, value: bytes) -> None:
        try:
            self.store.set(key, value)
        except RuntimeError as error:
            raise self.gone(error) from error

    def forget(self, key: str) -> None:
        try:
            self.store.delete_key(key)
        except RuntimeError as error:
            raise self.gone(error) from error

    def forget_all(self, prefix: str) -> None:
        """Delete every key that begins with ``prefix``; for the server's own process."""
        try:
            for key in self.store.list_keys():
                if key.startswith(prefix):
                    self.store.delete_key(key)
        except RuntimeError as error:
            raise self.gone(error) from error

    def first(self, key: str, text: str) -> str:
        """Write a text at ``key`` unless somebody has; returns what is there."""
        text = text.encode("utf-8", "replace").decode()  # what isn't Unicode can't be sent
        try:
            return bytes(self.store.compare_set(key, "", text)).decode("utf-8", "replace")
        except RuntimeError as error:
            raise self.gone(error) from error

    def hang_up(self) -> None:
        """End whatever waits on this connection.  From any thread."""
        for connection in self._connections():
            with connection, contextlib.suppress(OSError):
                port = connection.getsockname()[1]
                if port in self._ports or not (self._ports or port in self._others):
                    connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.store = None

    def _own_ports(self) -> set[int]:
        ports = set()
        for connection in self._connections():
            with connection, contextlib.suppress(OSError):
                ports.add(int(connection.getsockname()[1]))
        return ports

    def _connections(self) -> list[socket.socket]:
        """Duplicates of this process's sockets that are connected to the server."""
        directory = next((d for d in ("/proc/self/fd", "/dev/fd") if Path(d).is_dir()), None)
        found = []
        for name in os.listdir(directory) if directory else ():
            try:
                fd = os.dup(int(name))
            except (OSError, ValueError):
                continue
            try:
                connection = socket.socket(fileno=fd)
            except OSError:
                os.close(fd)
                continue
            try:
                host, port = connection.getpeername()[:2]
                ours = port == self._port and host.removeprefix("::ffff:") == self._host
            except (OSError, ValueError, AttributeError):
                ours = False
            if ours:
                found.append(connection)
            else:
                connection.close()
        return found
