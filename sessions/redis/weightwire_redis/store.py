"""A session in Redis.

::

    weightwire:NAME                which records are its own: a random identity
    weightwire:NAME:ID/KEY         a record, see ``marks``; a lease expires (``LEASE_KEPT``)
    weightwire:NAME:ID:records     a sorted set: the keys of all records
    weightwire:NAME:ID:leases      likewise, of those that may be lost
    weightwire:NAME:ID:history     a stream: a mark for each write, leases apart

Every operation is one round trip, or two, and reads identity and history with it.  A server
that comes back without its data has another identity, or none; one that comes back
with older data lacks the newest write that this process has seen, however many others
have been made since: then records are lost, and whoever notices says so rather than go
on with half of a session.  A record that is listed and isn't there was evicted, or
deleted by hand.

The sets are what makes ``children`` a range of names rather than a scan of a server
that others use.  All scores are equal, so that members are ordered by their bytes.

Operations are repeated while the server is away: put and create because each write
bears a mark of its own, delete because it looks for the value that it came for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from weightwire.deadline import Deadline, patience
from weightwire.errors import SessionError
from weightwire.session import SessionStore
from weightwire.session.marks import MARK, MAX_VALUE, mark, seal_value
from weightwire_redis.address import Address
from weightwire_redis.connection import Command, Connections, Link, Unreachable
from weightwire_redis.values import Write, read_identity, read_record, read_write, read_writes

__all__ = ["RedisStore", "follows", "names_of"]

log = logging.getLogger("weightwire.session")

T = TypeVar("T")

LEASE_KEPT = 2 * 86400
"""Seconds that a lease stays after its last renewal: twice the longest that there is.

It only cleans up.  Whether a member is alive is judged by its renewals.
"""
MAX_NAMES = 1 << 18
HISTORY = 1 << 13
"""Writes that are remembered; who saw none of so many can't tell whether they follow on his."""
_OPERATION_SECONDS = 10.0
_PAUSE = 0.05
_HEADS = 4
"""Replies to what is asked with every operation."""


class RedisStore(SessionStore):
    """One session at ``address``; see the module for its keys.

    Args:
        deadline: for connecting.
        read_only: the session must exist.

    Raises:
        AuthenticationError: wrong user or password.
        SessionError: no server, one that may evict records, or no session to look at.
    """

    def __init__(self, address: Address, deadline: Deadline, *, read_only: bool = False) -> None:
        self.url = address.url
        self._connections = Connections(address)
        self._base = f"weightwire:{address.name}"
        self._lock = threading.Lock()
        self._seen: Write | None = None
        self._lost = ""
        self._closed = False
        try:
            self._identity = self._run(
                "open", "", lambda link: self._open(link, read_only), deadline
            )
        except BaseException:
            self.close()
            raise
        own = f"{self._base}:{self._identity}"
        self._prefix = f"{own}/"
        self._records = f"{own}:records"
        self._leases = f"{own}:leases"
        self._history = f"{own}:history"

    def get(self, key: str) -> bytes | None:
        wanted: list[Command] = [
            ("GETRANGE", self._prefix + key, 0, MAX_VALUE),
            ("ZSCORE", self._records, key),
        ]
        value, listed = self._run("read", key, lambda link: self._look(link, wanted))
        record = read_record(key, value)
        if record is None and listed is not None:
            # It may have been written, or deleted, between the two.
            value, listed = self._run("read", key, lambda link: self._transact(link, wanted))
            record = read_record(key, value)
        if record is None and listed is not None:
            raise SessionError(
                f"session {self.url} lost record {key!r}: Redis evicted it, or somebody deleted "
                "it; set its maxmemory-policy to noeviction, and start the members again"
            )
        return record

    def put(self, key: str, value: bytes, *, durable: bool = True) -> None:
        sealed = seal_value(mark(), value)
        commands = self._write(key, sealed) if durable else self._write_lease(key, sealed)
        self._run("write", key, lambda link: self._transact(link, commands, counts=durable))

    def create(self, key: str, value: bytes) -> bool:
        write = mark()
        commands = self._write(key, seal_value(write, value))
        look: Command = ("GETRANGE", self._prefix + key, 0, MARK - 1)

        def decide(found: list[Any]) -> list[Command]:
            return [] if found[0] else commands

        def operation(link: Link) -> bool:
            found = self._optimistic(link, [self._prefix + key], [look], decide)
            return found[0] in (b"", write)  # absent before; or ours, when it wasn't answered

        return self._run("create", key, operation)

    def delete(self, key: str) -> None:
        doomed: list[bytes] = []

        def decide(found: list[Any]) -> list[Command]:
            if not doomed:
                doomed.append(found[0])
            return self._removal([key]) if found[0] == doomed[0] else []

        look: Command = ("GETRANGE", self._prefix + key, 0, MARK - 1)
        self._run(
            "delete", key, lambda link: self._optimistic(link, [self._prefix + key], [look], decide)
        )

    def children(self, prefix: str) -> list[str]:
        names = self._run("list", prefix, lambda link: self._look(link, self._ranges(prefix)))
        start = len(prefix) + 1
        return sorted({key[start:].partition("/")[0] for key in names_of(self.url, names)})

    def delete_tree(self, prefix: str) -> None:
        def decide(found: list[Any]) -> list[Command]:
            return self._removal([prefix, *names_of(self.url, found)])

        watched = [self._records, self._leases, self._prefix + prefix]
        self._run(
            "delete",
            prefix,
            lambda link: self._optimistic(link, watched, self._ranges(prefix), decide),
        )

    def close(self) -> None:
        self._closed = True
        self._connections.close()

    # -------------------------------------------------------------- what is sent

    def _write(self, key: str, sealed: bytes) -> list[Command]:
        return [
            ("SET", self._prefix + key, sealed),
            ("ZADD", self._records, 0, key),
            ("ZREM", self._leases, key),
        ]

    def _write_lease(self, key: str, sealed: bytes) -> list[Command]:
        return [
            ("SET", self._prefix + key, sealed, "EX", LEASE_KEPT),
            ("ZADD", self._leases, 0, key),
            ("ZREM", self._records, key),
        ]

    def _removal(self, keys: Sequence[str]) -> list[Command]:
        return [
            ("DEL", *(self._prefix + key for key in keys)),
            ("ZREM", self._records, *keys),
            ("ZREM", self._leases, *keys),
        ]

    def _ranges(self, prefix: str) -> list[Command]:
        """What is listed below a prefix: names from ``/`` to what follows it."""
        return [
            ("ZRANGEBYLEX", names, f"[{prefix}/", f"({prefix}0", "LIMIT", 0, MAX_NAMES + 1)
            for names in (self._records, self._leases)
        ]

    # -------------------------------------------------------------- how it is sent

    def _run(
        self, verb: str, key: str, operation: Callable[[Link], T], deadline: Deadline | None = None
    ) -> T:
        """Carry out an operation, again while the server is away."""
        deadline = deadline or Deadline(patience(_OPERATION_SECONDS))
        first: Unreachable | None = None
        while True:
            if self._closed:
                raise SessionError(f"session {self.url} is closed: open it again")
            if self._lost:
                raise SessionError(self._lost)
            try:
                with self._connections.link(deadline) as link:
                    return operation(link)
            except Unreachable as error:
                log.debug("session %s: %s", self.url, error)
                first = first or error  # the last may be cut short by the deadline
                if deadline.passed():
                    what = f"{verb} {key!r}" if key else verb
                    raise SessionError(
                        f"session {self.url} can't be reached ({what}: no answer within "
                        f"{deadline.seconds:g} s; {first}): start Redis, or correct host and port"
                    ) from error
            time.sleep(min(_PAUSE, deadline.remaining()))

    def _look(self, link: Link, looks: Sequence[Command]) -> list[Any]:
        """Read; not as a transaction, which a server that is full would refuse."""
        known = self._seen
        replies = link.run([*looks, *self._heads(known)])
        self._check(replies[-_HEADS:], known)
        return replies[:-_HEADS]

    def _transact(
        self, link: Link, commands: Sequence[Command], *, counts: bool = False
    ) -> list[Any]:
        known, write = self._seen, mark() if counts else None
        replies = link.transact([*self._heads(known, write), *commands])
        if replies is None:
            raise AssertionError("nothing was watched")
        self._check(replies, known, write)
        return replies[_HEADS:]

    def _optimistic(
        self,
        link: Link,
        watched: Sequence[str],
        looks: Sequence[Command],
        decide: Callable[[list[Any]], list[Command]],
    ) -> list[Any]:
        """Look, and change what was looked at unless others did; what the last look found."""
        while True:
            known = self._seen
            replies = link.run([("WATCH", *watched), *self._heads(known), *looks])[1:]
            self._check(replies, known)
            commands = decide(replies[_HEADS:])
            if not commands:
                link.run([("UNWATCH",)])
                return replies[_HEADS:]
            known, write = self._seen, mark()
            done = link.transact([*self._heads(known, write), *commands])
            if done is not None:
                self._check(done, known, write)
                return replies[_HEADS:]

    def _heads(self, known: Write | None, write: bytes | None = None) -> list[Command]:
        """What is read with every operation, or written with one that counts.

        The oldest write comes after the one that is known: where that was dropped
        meanwhile, the oldest is newer.
        """
        oldest = "-" if known is None else known.entry
        newest: Command = (
            ("XREVRANGE", self._history, "+", "-", "COUNT", 1)
            if write is None
            else ("XADD", self._history, "MAXLEN", "~", HISTORY, "*", "w", write)
        )
        return [
            ("GETRANGE", self._base, 0, MARK),
            ("XRANGE", self._history, oldest, "+", "COUNT", 1),
            ("XRANGE", self._history, "-", "+", "COUNT", 1),
            newest,
        ]

    def _check(
        self, replies: Sequence[Any], known: Write | None, write: bytes | None = None
    ) -> None:
        """Refuse what a server says that has lost records.

        Args:
            known: the newest write that was known before it was asked: other threads' answers
                may be newer than this one.
            write: the mark of the one that was made with it.
        """
        identity = read_identity(replies[0])
        newest = read_writes(replies[3]) if write is None else read_write(replies[3], write)
        if identity == self._identity and follows(known, replies[1], replies[2]):
            with self._lock:
                if newest is not None and (self._seen is None or newest > self._seen):
                    self._seen = newest
            return
        how = (
            "another session has its name now"
            if identity not in (None, self._identity)
            else "Redis came back without its data, or with older data"
        )
        self._lost = (
            f"session {self.url} lost its records ({how}): start all members again, and let Redis "
            "keep its data (appendonly yes, appendfsync always)"
        )
        raise SessionError(self._lost)

    # -------------------------------------------------------------- opening

    def _open(self, link: Link, read_only: bool) -> str:
        self._refuse_eviction(link)
        if not read_only:
            link.run([("SET", self._base, mark(), "NX")])
        identity = read_identity(link.run([("GETRANGE", self._base, 0, MARK)])[0])
        if identity is None and not read_only:
            raise SessionError(
                f"session {self.url} has an empty identity: is something else writing to this "
                "session's keys? choose another name"
            )
        if identity is None:
            raise SessionError(
                f"session {self.url} doesn't exist: correct the URL, or start a sender"
            )
        return identity

    def _refuse_eviction(self, link: Link) -> None:
        """Raise where Redis would drop records when its memory is full."""
        try:
            text = link.run([("INFO", "memory")])[0]
        except SessionError as error:
            if "permit" not in str(error):
                raise
            log.warning("whether Redis evicts records can't be seen: %s", error)
            return
        lines = (text if isinstance(text, bytes) else b"").decode("utf-8", "replace").splitlines()
        info = dict(line.split(":", 1) for line in lines if ":" in line)
        policy = info.get("maxmemory_policy", "")
        if policy.startswith("allkeys-"):
            raise SessionError(
                f"session {self.url}: Redis drops records when its memory is full "
                f"(maxmemory-policy {policy[:64]}): CONFIG SET maxmemory-policy noeviction"
            )


def follows(known: Write | None, found: object, oldest: object) -> bool:
    """Whether what a server has comes after a write that is known.

    Args:
        found: its reply to what it has from there on.
        oldest: its reply, later, to the first that it has.
    """
    if known is None:
        return True
    if read_writes(found) == known:
        return True
    first = read_writes(oldest)
    return first is not None and first > known  # so many since that it was dropped


def names_of(url: str, ranges: Sequence[Any]) -> list[str]:
    """The names in replies to ``_ranges``."""
    names: list[str] = []
    for found in ranges:
        if not isinstance(found, list) or not all(isinstance(name, bytes) for name in found):
            raise SessionError(f"session {url}: the server doesn't answer as Redis does")
        names.extend(name.decode("utf-8", "replace") for name in found)
    if len(names) > MAX_NAMES:
        raise SessionError(
            f"session {url} has more than {MAX_NAMES} records in one place: is something else "
            "writing to it?"
        )
    return names
