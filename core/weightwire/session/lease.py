"""Leases: a counter that its owner raises, judged on the observer's own monotonic clock."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from weightwire.errors import PeerLost
from weightwire.session import keys, process
from weightwire.session.records import Closed, Lease, MemberRecord, RankReport
from weightwire.session.session import Session

__all__ = ["Leader", "LeaseKeeper", "LeaseObserver", "Member", "Siblings"]

log = logging.getLogger("weightwire.session")

RENEWALS_PER_TTL = 4

_LOOK_PAUSE = 0.25
"""Seconds between two looks around, or a quarter of a lease that is shorter than that."""
_LOOK_REST = 10.0
"""A slow session is looked at less often: this many times the last look's own time apart."""


_MOST_SILENCE = 60.0
"""Seconds of a session's silence that don't count: one that is always slow must not hide a loss."""

_LAST_WORDS = 1.0
"""Seconds for reading what a rank 0 that has gone has said last."""


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

    def lease_key(self, rank: int = 0) -> str:
        """Where a rank renews its lease: that of rank 0 is the side's."""
        return self.key("leases", str(rank)) if rank else self.key("lease")


class LeaseObserver:
    """Judges members by the rise of their lease's counter.

    Only a rise is a sign of life: a lease that is gone, or was put back, is none.  Time in
    which the session didn't answer counts against nobody, since nobody could renew then.
    """

    def __init__(self, session: Session, clock: Callable[[], float] = time.monotonic) -> None:
        self._session = session
        self._clock = clock
        self._seen: dict[tuple[str, int], tuple[int, float, float]] = {}
        self._confirmed: set[tuple[str, int]] = set()

    def is_alive(self, member: Member) -> bool:
        """False once it left, its process is gone, or its counter stood still for a lease."""
        place = (member.kind, member.incarnation)
        if self._session.read(member.key("closed"), Closed) is not None or process.is_gone(
            member.record.process
        ):
            self._seen.pop(place, None)
            self._confirmed.discard(place)
            return False
        lease = self._session.read(member.lease_key(), Lease, ordered=False)
        counter = lease.counter if lease is not None else -1
        now, silence = self._clock(), self._session.silence.seconds
        known = self._seen.get(place)
        if known is None or counter > known[0]:
            self._seen[place] = (counter, now, silence)
            if known is not None or process.is_here(member.record.process):
                self._confirmed.add(place)
            return True
        silent = min(silence - known[2], _MOST_SILENCE)
        return now - known[1] - silent <= member.record.lease_ttl

    def why_gone(self, member: Member) -> str:
        """How it was noticed that a member isn't alive: for a message, in brackets."""
        record = member.record
        if self._session.read(member.key("closed"), Closed) is not None:
            return "it left the session"
        if process.is_gone(record.process):
            return "its process ended"
        return f"its lease of {record.lease_ttl:g} s ran out"

    def is_confirmed(self, member: Member) -> bool:
        """True once ``is_alive`` has seen the counter rise, or sees the process on this host.

        Until then a member that it takes for alive may have died before anybody looked.
        """
        return (member.kind, member.incarnation) in self._confirmed


class Leader:
    """Rank 0 of a side, as its other ranks see it: its lease is the side's."""

    def __init__(self, observer: LeaseObserver, member: Member) -> None:
        self._observer = observer
        self._member = member
        self._missing_since: float | None = None

    def failure(self) -> PeerLost | None:
        """Why it answers no more, or None.

        One that failed says why before it leaves: whoever waits for it reads that first.
        """
        if self._observer.is_alive(self._member):
            self._missing_since = None
            return None
        now = time.monotonic()
        if self._missing_since is None:
            self._missing_since = now
        if now - self._missing_since < _LAST_WORDS:
            return None
        record = self._member.record
        return PeerLost(
            f"{record.member_id} rank 0 (process {record.pid} on {record.host}) is gone, or "
            "stands still: restart all ranks"
        )


class Siblings:
    """The other ranks of a side, as its rank 0 sees them: each holds a lease of its own.

    One whose process on this host ended is missed at once, or nearly: it may have said why,
    and whoever waits for it reads that first.

    Attributes:
        lost: those that were missed when ``failure`` looked last.
    """

    def __init__(
        self, session: Session, member: Member, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._session = session
        self._member = member
        self._clock = clock
        self._looked = clock()
        self._silence = session.silence.seconds
        self._still: dict[int, tuple[int, float]] = {}
        self._processes: dict[int, str] = {}
        self._ended: dict[int, float] = {}
        self.lost: frozenset[int] = frozenset()

    def failure(self) -> PeerLost | None:
        """Which of them stood still for a lease while rank 0 looked, or are gone; or None."""
        ended = self._look_at_processes()
        self._look_at_leases()
        ttl = self._member.record.lease_ttl
        still = {rank for rank, (_, seconds) in self._still.items() if seconds > ttl}
        self.lost = frozenset(ended | still)
        return self.describe(self.lost) if self.lost else None

    def missing(self, ranks: Iterable[int]) -> frozenset[int]:
        """Those of ``ranks`` that were missed when ``failure`` looked last, and still are.

        Nobody looks between two calls: who was missed in one may be awake in the next.
        """
        return frozenset(
            rank
            for rank in self.lost.intersection(ranks)
            if rank in self._ended or self._counter(rank) <= self._still[rank][0]
        )

    def _look_at_processes(self) -> set[int]:
        """Ranks that ended a while ago."""
        now = self._clock()
        for rank in range(1, self._member.record.world_size):
            if self.has_ended(rank):
                self._ended.setdefault(rank, now)
        return {rank for rank, when in self._ended.items() if now - when >= _LAST_WORDS}

    def has_ended(self, rank: int) -> bool:
        """Whether a rank's process was on this host, and is gone."""
        if rank not in self._processes:
            joined = self._session.read(self._member.key("ranks", str(rank)), RankReport)
            if joined is None:
                return False  # it is about to join
            self._processes[rank] = joined.payload.decode("utf-8", "replace")
        return process.is_gone(self._processes[rank])

    def _look_at_leases(self) -> None:
        ttl = self._member.record.lease_ttl
        now, silence = self._clock(), self._session.silence.seconds
        watched = now - self._looked - (silence - self._silence)
        if watched < ttl / RENEWALS_PER_TTL / 2:
            return
        self._looked, self._silence = now, silence
        # In a longer time between two looks this process may have stood still with the others.
        watched = min(watched, ttl / 2)
        for rank in range(1, self._member.record.world_size):
            counter = self._counter(rank)
            highest, still = self._still.get(rank, (-2, 0.0))
            self._still[rank] = (counter, 0.0) if counter > highest else (highest, still + watched)

    def _counter(self, rank: int) -> int:
        lease = self._session.read(self._member.lease_key(rank), Lease, ordered=False)
        return lease.counter if lease is not None else -1

    def describe(self, lost: Iterable[int]) -> PeerLost:
        ttl = self._member.record.lease_ttl
        ranks = ", ".join(f"{self._member.record.member_id} rank {rank}" for rank in sorted(lost))
        return PeerLost(
            f"{ranks} is gone, or stands still (its process ended, or its lease of {ttl:g} s ran "
            "out): restart all ranks"
        )


class LeaseKeeper:
    """Renews one rank's lease on a thread, and looks around on another.

    A look reads the session, which may be slow; the lease doesn't wait for it.

    Args:
        look_around: looks for failures of others; what it raises ends in the log.
        rank: rank 0 renews its side's lease, each other rank its own, by which rank 0 judges it.
    """

    def __init__(
        self,
        session: Session,
        member: Member,
        look_around: Callable[[], None] | None = None,
        *,
        rank: int = 0,
    ) -> None:
        self._session = session
        self._key = member.lease_key(rank)
        self._member = member
        self._counter = 0
        self._stop = threading.Event()
        self._pace = member.record.lease_ttl / RENEWALS_PER_TTL
        name = member.kind.replace("/", "-")
        self._threads = [
            threading.Thread(
                target=self._run,
                args=(self.renew, self._pace, 0.0),
                name=f"weightwire-lease-{name}",
                daemon=True,
            )
        ]
        if look_around is not None:
            self._threads.append(
                threading.Thread(
                    target=self._run,
                    args=(look_around, min(self._pace, _LOOK_PAUSE), _LOOK_REST),
                    name=f"weightwire-watch-{name}",
                    daemon=True,
                )
            )

    def start(self) -> None:
        self.renew()
        for thread in self._threads:
            thread.start()

    def renew(self) -> None:
        """Raise the counter once."""
        self._counter += 1
        self._session.write(self._key, Lease(self._counter), durable=False)

    def stop(self) -> None:
        """Stop and join the threads.  Idempotent."""
        self._stop.set()
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(timeout=30)

    def _run(self, work: Callable[[], None], pause: float, rest: float) -> None:
        """Do ``work`` every ``pause`` seconds, or ``rest`` times as long after as it took."""
        took = 0.0
        while not self._stop.wait(max(pause, min(self._pace, rest * took))):
            began = time.monotonic()
            try:
                work()
            except Exception as error:
                # A store that is away for a moment must not end the lease for ever.
                log.warning("lease of %s: %s", self._member.kind, error)
            took = time.monotonic() - began
