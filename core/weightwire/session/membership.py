"""Who is in a session: incarnations taken by compare-and-set, kept alive by leases.

A member (the sender, or one receiver) takes the next free incarnation of its
name.  While it lives, a thread raises the counter of its lease.  Others judge it
by change of that counter on their own monotonic clock; clocks of different
machines are never compared.  A process on the same host that is gone is seen at
once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from weightwire.errors import SessionError
from weightwire.session import keys, process
from weightwire.session.records import Closed, Lease, MemberRecord, RankReport
from weightwire.session.session import Session
from weightwire.waiting import Steps, Waiting

__all__ = ["LeaseKeeper", "LeaseObserver", "Member", "claim", "join", "live_members"]

log = logging.getLogger("weightwire.session")

RENEWALS_PER_TTL = 4


@dataclass(frozen=True)
class Member:
    """A claimed incarnation.

    Attributes:
        kind: ``senders``, or ``receivers/<id>``.
        record: what was written when it was claimed.
    """

    kind: str
    record: MemberRecord

    @property
    def incarnation(self) -> int:
        return self.record.incarnation

    def key(self, *rest: str) -> str:
        return keys.member(self.kind, self.incarnation, *rest)


class LeaseObserver:
    """Judges members by the change of their lease's counter."""

    def __init__(self, session: Session, clock: Callable[[], float] = time.monotonic) -> None:
        self._session = session
        self._clock = clock
        self._seen: dict[tuple[str, int], tuple[int, float]] = {}

    def is_alive(self, member: Member) -> bool:
        """False once it left, its process is gone, or its counter stood still for a lease."""
        place = (member.kind, member.incarnation)
        if self._session.read(member.key("closed"), Closed) is not None:
            return False
        if process.is_gone(member.record.process):
            return False
        lease = self._session.read(member.key("lease"), Lease)
        counter = lease.counter if lease is not None else -1
        now = self._clock()
        known = self._seen.get(place)
        if known is None or known[0] != counter:
            self._seen[place] = (counter, now)
            return True
        return now - known[1] <= member.record.lease_ttl

    def forget(self, kind: str) -> None:
        """Drop what is remembered of a name's incarnations."""
        self._seen = {place: seen for place, seen in self._seen.items() if place[0] != kind}


class LeaseKeeper:
    """Renews one member's lease, and runs ``watch`` at the same pace.

    Args:
        watch: looks for failures of others; what it raises ends in the log.
        renew: False on ranks other than 0, which only watch.
    """

    def __init__(
        self,
        session: Session,
        member: Member,
        watch: Callable[[], None] | None = None,
        *,
        renew: bool = True,
    ) -> None:
        self._session = session
        self._member = member
        self._renews = renew
        self._watch = watch
        self._counter = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"weightwire-lease-{member.kind.replace('/', '-')}", daemon=True
        )

    def start(self) -> None:
        self.renew()
        self._thread.start()

    def renew(self) -> None:
        """Raise the counter once."""
        if not self._renews:
            return
        self._counter += 1
        self._session.write(self._member.key("lease"), Lease(self._counter), durable=False)

    def stop(self) -> None:
        """Stop and join the thread.  Idempotent."""
        self._stop.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout=30)

    def _run(self) -> None:
        pause = self._member.record.lease_ttl / RENEWALS_PER_TTL
        while not self._stop.wait(pause):
            try:
                self.renew()
                if self._watch is not None:
                    self._watch()
            except Exception as error:
                # A store that is away for a moment must not end the lease for ever.
                log.warning("lease of %s: %s", self._member.kind, error)


def newest(session: Session, kind: str) -> Member | None:
    """The highest incarnation of a name that has its record."""
    for number in reversed(session.numbers(kind)):
        record = session.read(keys.member(kind, number, "record"), MemberRecord)
        if record is not None:
            return Member(kind, record)
    return None


def claim(
    session: Session,
    observer: LeaseObserver,
    kind: str,
    *,
    member_id: str,
    world_size: int,
    backend: str,
    lease_ttl: float,
    resume_from: int | None = None,
) -> Steps[Member]:
    """Take the next incarnation of a name; rank 0 of a side only.

    Raises:
        SessionError: another live process has the name.
    """
    while True:
        current = newest(session, kind)
        if current is not None:
            yield from _refuse_if_alive(session, observer, current, member_id)
        taken = max(session.numbers(kind), default=0)
        record = MemberRecord(
            member_id=member_id,
            incarnation=taken + 1,
            world_size=world_size,
            backend=backend,
            lease_ttl=lease_ttl,
            host=socket.gethostname()[:256],
            pid=os.getpid(),
            process=process.identity(),
            created=time.time(),
            nonce=secrets.token_hex(8),
            resume_from=resume_from,
        )
        if session.create(keys.member(kind, taken + 1, "record"), record):
            for older in session.numbers(kind)[:-2]:
                if older < taken:
                    _forget_incarnation(session, kind, older)
            return Member(kind, record)


def _refuse_if_alive(
    session: Session, observer: LeaseObserver, current: Member, member_id: str
) -> Steps[None]:
    """Watch a predecessor's lease for its whole length before taking it for dead."""
    record = current.record
    first = session.read(current.key("lease"), Lease)
    while observer.is_alive(current):
        lease = session.read(current.key("lease"), Lease)
        if lease != first:
            raise SessionError(
                f"session {session.url} has a live {member_id!r} already (process {record.pid} on "
                f"{record.host}, incarnation {record.incarnation}): end it, or use another "
                f"{'session' if current.kind == 'senders' else 'receiver id'}"
            )
        yield Waiting(f"end of the lease of {member_id!r}'s predecessor", ())


def _forget_incarnation(session: Session, kind: str, incarnation: int) -> None:
    """Receivers' old incarnations are dropped; a sender's record stays, its chain matters."""
    if kind.startswith("receivers/"):
        session.delete_tree(keys.member(kind, incarnation))


def join(
    session: Session, kind: str, *, rank: int, world_size: int, member_id: str
) -> Steps[Member]:
    """Join rank 0's incarnation; every other rank of a side.

    A rank joins an incarnation by creating its own record in it; one whose
    record is taken belongs to an earlier run.  Rank 0 confirms when all are in.
    """
    joined: Member | None = None
    while True:
        current = newest(session, kind)
        if current is not None and (joined is None or current.incarnation > joined.incarnation):
            if current.record.world_size != world_size:
                wrong = current.record.world_size
            elif session.create(current.key("ranks", str(rank)), RankReport()):
                joined = current
        if joined is not None and session.read(joined.key("joined"), RankReport) is not None:
            return joined
        if joined is None and current is not None and current.record.world_size != world_size:
            yield Waiting(
                f"rank 0 of {member_id!r} with world size {world_size} (found one of {wrong})",
                ("rank 0",),
            )
        else:
            yield Waiting(f"confirmation of {member_id!r} by its rank 0", ("rank 0",))


def confirm(session: Session, member: Member) -> Steps[None]:
    """Rank 0: wait until every rank has joined, then say so."""
    wanted = set(range(1, member.record.world_size))
    while missing := wanted - set(session.numbers(member.key("ranks"))):
        yield Waiting(
            f"ranks of {member.record.member_id!r}",
            tuple(f"rank {rank}" for rank in sorted(missing)),
        )
    session.write(member.key("joined"), RankReport())


def live_members(session: Session, observer: LeaseObserver) -> dict[str, Member]:
    """Receivers by id whose newest incarnation is alive and complete."""
    alive = {}
    for receiver_id in session.children("receivers"):
        member = newest(session, f"receivers/{receiver_id}")
        if member is None or not observer.is_alive(member):
            continue
        if member.record.world_size > 1 and session.read(member.key("joined"), RankReport) is None:
            continue
        alive[receiver_id] = member
    return alive


def leave(session: Session, member: Member) -> None:
    """Say good-bye; a session that is gone needs none."""
    with contextlib.suppress(SessionError):
        session.write(member.key("closed"), Closed())
