"""Connections to a Redis server: one thread at a time on each, every wait within a deadline.

redis-py speaks the protocol.  Its own retries, pool and time-outs aren't used: an
operation here has one deadline for all it does, however slowly its bytes arrive,
and only its caller knows whether it may be repeated.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import struct
import threading
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias, cast

import redis
from redis.backoff import NoBackoff
from redis.connection import Connection, SSLConnection
from redis.retry import Retry

from weightwire.deadline import Deadline
from weightwire.errors import AuthenticationError, SessionError
from weightwire_redis.address import Address

__all__ = ["Command", "Connections", "Link", "Unreachable"]

Command: TypeAlias = tuple[str | bytes | int, ...]

MAX_ANSWER = 192 << 20
"""Bytes that the server may answer to one operation."""
_IDLE = 4
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Unreachable(Exception):
    """The server isn't there, or not yet: another try may find it."""


class _Bounded:
    """A socket that waits for no byte past a deadline, and takes no more than a bound."""

    def __init__(self, sock: socket.socket, limits: _Limits) -> None:
        self._sock = sock
        self._limits = limits
        # What a lost connection still holds must never arrive after what was sent on the next:
        # closing it drops that.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)

    def recv(self, size: int) -> bytes:
        self._sock.settimeout(self._limits.seconds())
        data = self._sock.recv(size)
        self._limits.take(len(data))
        return data

    def sendall(self, data: bytes) -> None:
        self._sock.settimeout(self._limits.seconds())
        self._sock.sendall(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


class _Limits:
    """What the operation that uses a connection may still take."""

    def __init__(self) -> None:
        self._deadline: Deadline | None = None
        self._bytes = 0

    def start(self, deadline: Deadline) -> None:
        self._deadline = deadline
        self._bytes = MAX_ANSWER

    def seconds(self) -> float:
        if self._deadline is None or self._deadline.passed():
            raise TimeoutError("the deadline passed")
        return max(self._deadline.remaining(), 1e-3)  # zero would not wait at all

    def take(self, count: int) -> None:
        self._bytes -= count
        if self._bytes < 0:
            raise SessionError(f"the server answers more than {MAX_ANSWER} bytes")


def _connection(address: Address, limits: _Limits) -> Connection:
    kind: type[Connection] = SSLConnection if address.tls else Connection

    class Limited(kind):  # type: ignore[misc, valid-type]  # with TLS or without
        def _connect(self) -> Any:
            self.socket_connect_timeout = limits.seconds()
            return _Bounded(super()._connect(), limits)

    made = Limited(
        host=address.host,
        port=address.port,
        db=address.database,
        username=address.user,
        password=address.password,
        protocol=2,
        retry=Retry(NoBackoff(), 0),
        client_name="weightwire",
    )
    return cast(Connection, made)


class Link:
    """One connection, while one operation has it."""

    def __init__(self, address: Address) -> None:
        self._limits = _Limits()
        self._url = address.url
        self._connection = _connection(address, self._limits)
        self._pid = os.getpid()

    def start(self, deadline: Deadline) -> None:
        """Begin an operation, which ends by the deadline."""
        self._limits.start(deadline)

    @property
    def is_ours(self) -> bool:
        """False in a forked child, whose parent goes on using the connection."""
        return self._pid == os.getpid()

    def run(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands at once; their replies, in order.

        Raises:
            Unreachable: no answer; commands that were sent may have been carried out.
            AuthenticationError: wrong user or password.
            SessionError: the server refuses, or isn't Redis.
        """
        with self._translated():
            self._send(commands)
            return self._replies(len(commands))

    def transact(self, commands: Sequence[Command]) -> list[Any] | None:
        """Carry out commands as one; None if something that was watched has changed.

        Raises:
            Unreachable, AuthenticationError, SessionError: as for ``run``.
        """
        with self._translated():
            self._send([("MULTI",), *commands, ("EXEC",)])
            replies = self._replies(len(commands) + 2)[-1]
        if replies is None:
            return None
        if not isinstance(replies, list) or len(replies) != len(commands):
            raise SessionError(f"session {self._url}: the server doesn't answer as Redis does")
        for reply in replies:
            if isinstance(reply, Exception):
                with self._translated():
                    raise reply
        return replies

    def close(self) -> None:
        self._connection.disconnect()  # type: ignore[no-untyped-call]

    def _send(self, commands: Sequence[Command]) -> None:
        self._connection.connect()  # type: ignore[no-untyped-call]
        packed = self._connection.pack_commands(commands)  # type: ignore[no-untyped-call]
        self._connection.send_packed_command(packed)  # type: ignore[no-untyped-call]

    def _replies(self, count: int) -> list[Any]:
        replies: list[Any] = []
        refusal: redis.ResponseError | None = None
        for _ in range(count):
            try:
                replies.append(self._connection.read_response(disable_decoding=True))
            except redis.ResponseError as error:
                refusal = refusal or error  # the first says why; the last only that
        if refusal is not None:
            raise refusal
        return replies

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except SessionError as error:
            raise SessionError(f"session {self._url}: {error}") from error
        except redis.BusyLoadingError as error:
            raise Unreachable("it is loading its data") from error
        except redis.AuthenticationError as error:
            raise AuthenticationError(
                f"session {self._url}: Redis refuses user or password ({error}): "
                "correct them in the URL"
            ) from error
        except (redis.ConnectionError, redis.TimeoutError, OSError) as error:
            if _is_certificate(error):
                raise SessionError(
                    f"session {self._url}: the server's certificate isn't trusted ({error}): "
                    "correct the host, or name the authority that signed it in SSL_CERT_FILE"
                ) from error
            raise Unreachable(str(error) or type(error).__name__) from error
        except redis.RedisError as error:
            raise SessionError(f"session {self._url}: {_remedy(error)}") from error
        except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise SessionError(
                f"session {self._url}: the server doesn't speak Redis's protocol ({error}): "
                "correct host and port"
            ) from error


class Connections:
    """As many connections to one server as threads use at once."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._idle: list[Link] = []
        self._closed = False

    @contextlib.contextmanager
    def link(self, deadline: Deadline) -> Iterator[Link]:
        """A connection of one's own, for one operation.  One that fails isn't used again."""
        link = self._take()
        link.start(deadline)
        try:
            yield link
        except BaseException:
            link.close()
            raise
        with self._lock:
            keep = not self._closed and len(self._idle) < _IDLE
            if keep:
                self._idle.append(link)
        if not keep:
            link.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for link in idle:
            link.close()

    def _take(self) -> Link:
        with self._lock:
            while self._idle:
                link = self._idle.pop()
                if link.is_ours:
                    return link
        return Link(self._address)


def _is_certificate(error: BaseException) -> bool:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _remedy(error: redis.RedisError) -> str:
    text = str(error)
    if isinstance(error, redis.OutOfMemoryError):
        return (
            f"Redis is full ({text}): raise its maxmemory, or delete sessions that are over "
            "(redis-cli --scan --pattern 'weightwire:NAME:*')"
        )
    if isinstance(error, redis.ReadOnlyError):
        return f"Redis is a replica ({text}): give the address of its primary"
    if isinstance(error, redis.exceptions.NoPermissionError):
        return f"Redis doesn't permit this user all that a session needs ({text}): extend its ACL"
    if text.startswith("MISCONF"):
        return f"Redis can't save its data ({text}): make room on its disk"
    if text.startswith("WRONGTYPE"):
        return f"something else writes to its keys ({text}): choose another name"
    return f"Redis refuses ({text}): see that it is a single server of version 6 or later"
