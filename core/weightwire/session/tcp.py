"""``tcp://trainer0:29400/run42``: a session in torch's TCPStore, served by the sender.

TCPStore has no access control of its own: whoever reaches the port can read and
delete records, but can't forge them where there is a token.  So without a token
it listens on loopback only, and a deleted record is noticed, not prevented.  It
would listen on all interfaces unless handed a socket that is already bound,
which also keeps the port from being taken before it is used.

The keys of a session are kept in one value, a log of names added and removed.

Its operations have no deadline of their own when the server is stopped.  Each
connection therefore has one thread that runs them; an operation that isn't
answered in time is an error, and the connection is replaced.  The thread is left
behind in the call that hangs; it is a daemon, so that the process can end.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TYPE_CHECKING, TypeVar

from weightwire.deadline import Deadline, patience
from weightwire.errors import ConfigError, SessionError
from weightwire.session import tcpstore
from weightwire.session.marks import mark, open_value, seal_value
from weightwire.session.records import MAX_RECORD
from weightwire.session.store import OpenRequest, SessionScheme, SessionStore
from weightwire.session.urls import is_loopback, without_credentials

if TYPE_CHECKING:  # a scheme is described without torch
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in torch's __all__

__all__ = ["TcpScheme", "TcpStore", "keys_of"]

log = logging.getLogger("weightwire.session")

T = TypeVar("T")

_ABSENT = "\x00absent"
_INDEX = ".index"
_BELLS = ".bells/"
_SLACK_LINES = 256
_OPERATION_SECONDS = 7.0  # more than a lost answer of the name server costs: see tcpstore
_RETRY_PAUSE = 0.1
_PROBE_SECONDS = 2.0
_FIRST_TRY_SECONDS = 2.0
"""Of a connection: a second try is faster than a lost answer.  Each may take twice as long as the
one before, where names take long every time."""
_MOST_BYTES = 8 << 20
"""TCPStore's server ends the connection of whoever sends it more at once."""


class TcpStore(SessionStore):
    """A client of the store at ``host:port``, and its server where ``serve`` is set."""

    outlives_members = False
    counts_rings = True

    def __init__(self, host: str, port: int, path: str, *, serve: bool, deadline: Deadline) -> None:
        self._host, self._port, self._path = host, port, path
        self._prefix = f"{path}/"
        self._index = self._prefix + _INDEX
        self._listed: set[str] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._server = self._serve() if serve else None
        self._connection = self._connect(deadline)

    @property
    def url(self) -> str:  # type: ignore[override]  # the port may be known only once it is bound
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"tcp://{host}:{self._port}/{self._path}"

    def get(self, key: str) -> bytes | None:
        value = self._run("read", key, lambda store: _peek(store, self._prefix + key))
        return None if value == _ABSENT.encode() else open_value(key, value)

    def put(self, key: str, value: bytes, *, durable: bool = True) -> None:
        was_listed = key in self._listed
        sealed = self._sealed(key, value)
        entry = self._entry(key)

        def write(store: TCPStore) -> None:
            # Renewing a lease isn't worth an entry, unless others have deleted it.
            if durable or not was_listed or not store.check([self._prefix + key]):
                store.append(self._index, entry)  # type: ignore[attr-defined]  # missing in the stub
            store.set(self._prefix + key, sealed)  # type: ignore[arg-type]  # the stub says str
            if durable:
                # set() isn't answered: ask for something that is, so that others see it by now.
                store.check([self._prefix + key])

        self._written(key, lambda: self._run("write", key, write))

    def create(self, key: str, value: bytes) -> bool:
        sealed = self._sealed(key, value)
        text = sealed.decode("utf-8")  # compare_set takes str; every record is JSON
        entry = self._entry(key)

        def write(store: TCPStore) -> bytes:
            store.append(self._index, entry)  # type: ignore[attr-defined]  # missing in the stub
            return bytes(store.compare_set(self._prefix + key, "", text))

        return self._written(key, lambda: self._run("create", key, write)) == sealed

    def delete(self, key: str) -> None:
        self._remove(key, [key])

    def children(self, prefix: str) -> list[str]:
        start = f"{prefix}/"
        keys = self._keys(prefix)
        return sorted({key[len(start) :].split("/", 1)[0] for key in keys if key.startswith(start)})

    def delete_tree(self, prefix: str) -> None:
        doomed = [key for key in self._keys(prefix) if key.startswith(f"{prefix}/")]
        self._remove(prefix, [*doomed, prefix])

    def _remove(self, prefix: str, keys: list[str]) -> None:
        def remove(store: TCPStore) -> None:
            for key in keys:
                store.delete_key(self._prefix + key)
            store.append(self._index, "".join(f"-{key}\n" for key in keys))  # type: ignore[attr-defined]  # missing in the stub

        self._run("delete", prefix, remove)
        self._listed.difference_update(keys)

    def ring(self, bell: str) -> None:
        key = f"{self._prefix}{_BELLS}{bell}"
        self._run("ring", bell, lambda store: store.add(key, 1))

    def rings(self, bell: str) -> int:
        key = f"{self._prefix}{_BELLS}{bell}"
        return self._run("read", bell, lambda store: store.add(key, 0))

    def close(self) -> None:
        self._closed = True  # an operation that hangs on another thread isn't waited for
        self._connection.close()
        self._server = None

    def _sealed(self, key: str, value: bytes) -> bytes:
        sealed = seal_value(mark(), value)
        if len(sealed) > _MOST_BYTES:
            raise SessionError(
                f"record {key!r} has {len(value)} bytes, TCPStore takes {_MOST_BYTES} at once: "
                "use a session of file:// or redis://"
            )
        return sealed

    def _entry(self, key: str) -> str:
        """What to append to the index before ``key`` is written.

        Before: a writer that dies in between leaves a name without a value, which
        reads as absent; the other way round nobody would ever find the value.
        """
        self._listed.add(key)
        return f"+{key}\n"

    def _written(self, key: str, write: Callable[[], T]) -> T:
        try:
            return write()
        except BaseException:
            self._listed.discard(key)  # it may not have got as far as the index
            raise

    def _keys(self, prefix: str) -> list[str]:
        """Every key of the session, from an index that is a value of the store itself.

        TCPStore's own ``list_keys`` waits for its answer with the interpreter locked:
        a server that stands still would stop every thread of every client.
        """
        index = self._run("list", prefix, lambda store: _peek(store, self._index))
        if index == _ABSENT.encode():
            return []
        keys, lines = keys_of(index)
        if lines > 2 * len(keys) + _SLACK_LINES:
            # Whoever comes first shortens it; an entry appended meanwhile makes this a no-op.
            text = index.decode()
            short = "".join(f"+{key}\n" for key in keys)
            self._run("list", prefix, lambda store: store.compare_set(self._index, text, short))
        return keys

    def _run(self, verb: str, key: str, operation: Callable[[TCPStore], T]) -> T:
        """Run one operation, reconnecting once if the server was replaced meanwhile."""
        deadline = Deadline(patience(_OPERATION_SECONDS))
        if not self._lock.acquire(timeout=deadline.seconds):
            raise SessionError(self._unreachable(f"{verb} {key!r}: it doesn't answer"))
        try:
            for last in (False, True):
                if self._closed:
                    raise SessionError(f"session {self.url} is closed: open it again")
                try:
                    return self._connection.run(operation, deadline)
                except FutureTimeout as error:
                    self._connection.close()
                    raise SessionError(
                        self._unreachable(f"{verb} {key!r}: it doesn't answer")
                    ) from error
                except RuntimeError as error:
                    log.debug("session %s: lost (%s)", self.url, error)
                    self._connection.close()
                    if last:
                        raise SessionError(
                            self._unreachable(f"{verb} {key!r}: it is gone")
                        ) from error
                    self._connection = self._connect(deadline)
        finally:
            self._lock.release()
        raise AssertionError("unreachable")

    def _serve(self) -> TCPStore:
        try:
            listener = tcpstore.listen(self._host, self._port)
        except OSError as error:
            raise SessionError(
                f"session {self.url} can't be served: port {self._port} on {self._host}: "
                f"{error.strerror}; choose a free port, or end the process that holds it"
            ) from error
        self._port = listener.getsockname()[1]
        try:
            return tcpstore.serve(self._host, listener, _OPERATION_SECONDS)
        except RuntimeError as error:
            raise SessionError(
                f"session {self.url} can't be served ({str(error).splitlines()[0]}): "
                f"does this host's name server answer for {self._host}?"
            ) from error

    def _connect(self, deadline: Deadline) -> _Connection:
        """Connect, retrying until the server is there."""
        error: Exception | None = None
        most = _FIRST_TRY_SECONDS
        while not (self._closed or deadline.passed()):
            try:
                reach = min(_PROBE_SECONDS, deadline.remaining() + 0.01)
                tcpstore.probe(self._host, self._port, reach)
                seconds = max(0.01, min(most, deadline.remaining()))
                return _Connection(self._host, self._port, Deadline(seconds))
            except (OSError, RuntimeError, FutureTimeout) as caught:
                error = caught
                most *= 2
                time.sleep(min(_RETRY_PAUSE, deadline.remaining()))
        raise SessionError(self._unreachable(f"no answer within {deadline.seconds:g} s")) from error

    def _unreachable(self, what: str) -> str:
        return (
            f"session {self.url} can't be reached ({what}): "
            "start the sender that serves it, or correct host and port"
        )


class _Connection:
    """One TCPStore client and the one thread that uses it."""

    def __init__(self, host: str, port: int, deadline: Deadline) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._store: TCPStore | None = None
        threading.Thread(target=self._serve, name="weightwire-tcpstore", daemon=True).start()
        try:
            seconds = max(_OPERATION_SECONDS, deadline.remaining())
            self._store = self._submit(
                lambda: tcpstore.connect(host, port, within=seconds, seconds=seconds), deadline
            )
        except BaseException:
            self.close()
            raise

    def run(self, operation: Callable[[TCPStore], T], deadline: Deadline) -> T:
        """Run one operation on the connection's thread.

        Raises:
            RuntimeError: the connection is closed or broken.
            TimeoutError: no answer before the deadline; the connection is of no more use.
        """
        store = self._store
        if store is None:
            raise RuntimeError("the connection is closed")
        return self._submit(lambda: operation(store), deadline)

    def close(self) -> None:
        self._store = None
        self._work.put(None)

    def _submit(self, operation: Callable[[], T], deadline: Deadline) -> T:
        future: Future[T] = Future()

        def work() -> None:
            try:
                future.set_result(operation())
            except BaseException as error:
                future.set_exception(error)

        self._work.put(work)
        return future.result(deadline.remaining())

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            del work  # it holds the client, which closes its socket with its last reference


def keys_of(index: bytes) -> tuple[list[str], int]:
    """The keys that an index lists, and how many entries it has.

    Raises:
        SessionError: nobody of ours wrote it.
    """
    if len(index) > MAX_RECORD:
        raise SessionError(f"the session's index has {len(index)} bytes: more than {MAX_RECORD}")
    try:
        lines = index.decode().split("\n")
    except UnicodeDecodeError as error:
        raise SessionError(
            f"the session's index can't be read ({error}): is something else writing to it? "
            "choose another name"
        ) from error
    if lines.pop() or any(line[:1] not in ("+", "-") for line in lines):
        raise SessionError(
            "the session's index isn't one: is something else writing to it? choose another name"
        )
    keys: dict[str, None] = {}
    for line in lines:
        if line.startswith("+"):
            keys[line[1:]] = None
        else:
            keys.pop(line[1:], None)
    return list(keys), len(lines)


def _peek(store: TCPStore, key: str) -> bytes:
    # Asked to replace a value that nobody writes, compare_set returns what is
    # there, or that value when nothing is: a read that never blocks.
    return bytes(store.compare_set(key, _ABSENT, _ABSENT))


class TcpScheme(SessionScheme):
    """``tcp://host:port/name``."""

    scheme = "tcp"
    summary = "torch's TCPStore, served by the sender's rank 0 and gone with it"

    def open(self, request: OpenRequest) -> TcpStore:
        url = request.url
        text = url.geturl()
        if "@" in url.netloc:
            raise ConfigError(
                f"session URL {without_credentials(url)} has a user or password: "
                "leave it out, and set WEIGHTWIRE_TOKEN"
            )
        try:
            port = url.port
        except ValueError as error:
            raise ConfigError(
                f"session URL {text!r} has no valid port ({error}): write tcp://host:port/name"
            ) from None
        host, name = url.hostname, url.path.strip("/")
        if not host or port is None or not name or "/" in name:
            raise ConfigError(f"session URL {text!r} is incomplete: write tcp://host:port/name")
        if port == 0 and not request.serve:
            raise ConfigError(
                f"session URL {text!r} has port 0, which only the sender that serves it may "
                "choose: write the port that it got (sender.session_url)"
            )
        if not request.authenticated and not is_loopback(host):
            raise ConfigError(
                f"session URL {text!r} is open to the network: set WEIGHTWIRE_TOKEN on all "
                "members, or use a loopback address"
            )
        return TcpStore(host, port, name, serve=request.serve, deadline=request.deadline)
