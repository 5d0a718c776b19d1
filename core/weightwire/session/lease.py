"""Leases: a counter that its owner raises, judged on the observer's own monotonic clock."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from weightwire.session import keys, process
from weightwire.session.records import Closed, Lease, MemberRecord
from weightwire.session.session import Session

__all__ = ["LeaseKeeper", "LeaseObserver", "Member"]

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
        lease = self._session.read(member.key("lease"), Lease)
        counter = lease.counter if lease is not None else -1
        now = self._clock()
        known = self._seen.get(place)
        if known is None or known[0] != counter:
            self._seen[place] = (counter, now)
            if known is not None or process.is_here(member.record.process):
                self._confirmed.add(place)
            return True
        return now - known[1] <= member.record.lease_ttl

    def is_confirmed(self, member: Member) -> bool:
        """True once ``is_alive`` has seen the counter rise, or sees the process on this host.

        Until then a member that it takes for alive may have died before anybody looked.
        """
        return (member.kind, member.incarnation) in self._confirmed


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
