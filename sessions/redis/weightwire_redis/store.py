"""A session in Redis.

::

    weightwire:NAME                which records are its own: a random identity
    weightwire:NAME:ID/KEY         a record, see ``marks``; a lease expires (``LEASE_KEPT``)
    weightwire:NAME:ID:records     a sorted set: the keys of all records
    weightwire:NAME:ID:leases      likewise, of those that may be lost
    weightwire:NAME:ID:writes      how many writes there were, leases apart

Every operation is one round trip, or two, and reads identity and count with it.  A server
that comes back without its data has another identity, or none; one that comes back
with older data has counted fewer writes than this process has seen: then records
are lost, and whoever notices says so rather than go on with half of a session.  A
record that is listed and isn't there was evicted, or deleted by hand.

The sets are what makes ``children`` a range of names rather than a scan of a server
that others use.  All scores are equal, so that members are ordered by their bytes.

Operations are repeated while the server is away: put and create because each write
bears a mark of its own, delete because it looks for the value that it came for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from weightwire.deadline import Deadline, patience
from weightwire.errors import SessionError
from weightwire.session import SessionStore
from weightwire.session.marks import MARK, MAX_VALUE, mark, seal_value
from weightwire_redis.address import Address
from weightwire_redis.connection import Command, Connections, Link, Unreachable
from weightwire_redis.values import read_identity, read_number, read_record

__all__ = ["RedisStore", "names_of"]

log = logging.getLogger("weightwire.session")

T = TypeVar("T")

LEASE_KEPT = 2 * 86400
"""Seconds that a lease stays after its last renewal: twice the longest that there is.

It only cleans up.  Whether a member is alive is judged by its renewals.
"""
MAX_NAMES = 1 << 18
_OPERATION_SECONDS = 10.0
_PAUSE = 0.05


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
        self._seen = 0
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
        self._writes = f"{own}:writes"

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
        self._run("write", key, lambda link: self._transact(link, commands, writes=durable))

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
        before = self._seen
        replies = link.run([*looks, *self._heads(False)])
        self._check(replies[-2:], before)
        return replies[:-2]

    def _transact(
        self, link: Link, commands: Sequence[Command], *, writes: bool = False
    ) -> list[Any]:
        before = self._seen
        replies = link.transact([*self._heads(writes), *commands])
        if replies is None:
            raise AssertionError("nothing was watched")
        self._check(replies, before)
        return replies[2:]

    def _optimistic(
        self,
        link: Link,
        watched: Sequence[str],
        looks: Sequence[Command],
        decide: Callable[[list[Any]], list[Command]],
    ) -> list[Any]:
        """Look, and change what was looked at unless others did; what the last look found."""
        while True:
            before = self._seen
            replies = link.run([("WATCH", *watched), *self._heads(False), *looks])[1:]
            self._check(replies, before)
            commands = decide(replies[2:])
            if not commands:
                link.run([("UNWATCH",)])
                return replies[2:]
            before = self._seen
            done = link.transact([*self._heads(True), *commands])
            if done is not None:
                self._check(done, before)
                return replies[2:]

    def _heads(self, writes: bool) -> list[Command]:
        return [("GET", self._base), ("INCR" if writes else "GET", self._writes)]

    def _check(self, replies: Sequence[Any], before: int) -> None:
        """Refuse what a server says that has lost records.

        Args:
            before: writes that were counted before it was asked: other threads' answers
                may be newer than this one.
        """
        identity, count = read_identity(replies[0]), read_number(replies[1])
        if identity == self._identity and count >= before:
            self._seen = max(self._seen, count)
            return
        how = (
            "another session has its name now"
            if identity not in (None, self._identity)
            else "Redis came back without its data, or with older data"
        )
        self._lost = (
            f"session {self.url} lost its records ({how}): start all members again, and let Redis "
            "keep its data (appendonly yes)"
        )
        raise SessionError(self._lost)

    # -------------------------------------------------------------- opening

    def _open(self, link: Link, read_only: bool) -> str:
        self._refuse_eviction(link)
        if not read_only:
            link.run([("SET", self._base, mark(), "NX")])
        identity = read_identity(link.run([("GET", self._base)])[0])
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
