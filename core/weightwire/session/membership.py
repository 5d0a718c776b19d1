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
import time
from collections.abc import Callable

from weightwire.deadline import Watch
from weightwire.errors import SessionError
from weightwire.session import keys, process
from weightwire.session.lease import LeaseKeeper, LeaseObserver, Member
from weightwire.session.records import Closed, Lease, MemberRecord, RankReport
from weightwire.session.session import Session
from weightwire.waiting import Steps, Waiting, drive

__all__ = ["claim", "confirm", "enter", "join", "leave", "live_members", "newest"]

log = logging.getLogger("weightwire.session")


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
    column_slices: int = 0,
) -> Steps[Member]:
    """Take the next incarnation of a name; rank 0 of a side only.

    Raises:
        SessionError: another live process has the name.
    """
    while True:
        current = newest(session, kind)
        if current is not None:
            yield from _refuse_if_alive(session, observer, current, member_id)
        taken = _last_taken(session, kind)
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
            column_slices=column_slices,
        )
        if session.create(keys.member(kind, taken + 1, "record"), record):
            for older in session.numbers(kind)[:-2]:
                if older < taken:
                    _forget_incarnation(session, kind, older)
            return Member(kind, record)
        yield Waiting(f"free incarnation of {member_id!r}", ("whoever took it",))


def _last_taken(session: Session, kind: str) -> int:
    """The highest incarnation that anything was written for.

    A store may list a record that another process is about to create: its number
    counts as free, and creating the record decides who has it.  One whose record
    was deleted still has its lease, and isn't free.
    """
    for number in reversed(session.numbers(kind)):
        record = session.read(keys.member(kind, number, "record"), MemberRecord)
        if record is not None or set(session.children(keys.member(kind, number))) - {"record"}:
            return number
    return 0


def _refuse_if_alive(
    session: Session, observer: LeaseObserver, current: Member, member_id: str
) -> Steps[None]:
    """Watch a predecessor's lease for its whole length before taking it for dead."""
    record = current.record
    first = session.read(current.lease_key(), Lease)
    while observer.is_alive(current):
        lease = session.read(current.lease_key(), Lease)
        if lease != first:
            raise SessionError(
                f"session {session.url} has a live {member_id!r} already (process {record.pid} on "
                f"{record.host}, incarnation {record.incarnation}): end it, or use another "
                f"{'session' if current.kind == 'senders' else 'receiver id'}"
            )
        yield Waiting(f"end of the lease of the previous {member_id!r}", ())


def _forget_incarnation(session: Session, kind: str, incarnation: int) -> None:
    """Old incarnations are dropped; of a sender the record stays, its chain matters."""
    session.delete_tree(keys.agree(kind, incarnation))
    if kind.startswith("receivers/"):
        session.delete_tree(keys.member(kind, incarnation))
        return
    for part in ("lease", "leases", "ranks", "joined", "exchange"):
        session.delete_tree(keys.member(kind, incarnation, part))


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
            elif session.create(
                current.key("ranks", str(rank)), RankReport(process.identity().encode())
            ):
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


def enter(
    session: Session,
    observer: LeaseObserver,
    watch: Watch,
    kind: str,
    *,
    member_id: str,
    rank: int,
    world_size: int,
    backend: str,
    lease_ttl: float,
    look_around: Callable[[], None],
    resume_from: int | None = None,
    column_slices: int = 0,
) -> tuple[Member, LeaseKeeper]:
    """Claim (rank 0) or join (other ranks) an incarnation, with its lease running.

    Args:
        look_around: called several times a second on a thread of its own, on every rank.
    """
    if rank == 0:
        member = drive(
            claim(
                session,
                observer,
                kind,
                member_id=member_id,
                world_size=world_size,
                backend=backend,
                lease_ttl=lease_ttl,
                resume_from=resume_from,
                column_slices=column_slices,
            ),
            watch,
        )
    else:
        steps = join(session, kind, rank=rank, world_size=world_size, member_id=member_id)
        member = drive(steps, watch)
    keeper = LeaseKeeper(session, member, look_around, rank=rank)
    try:
        keeper.start()
        if rank == 0 and world_size > 1:
            drive(confirm(session, member), watch)
    except BaseException:
        keeper.stop()
        leave(session, member)
        raise
    return member, keeper
