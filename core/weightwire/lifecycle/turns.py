"""Readers of stored versions take turns at being out of service.

There are as many slots as may be out of service at a time.  A turn is an atomically
created record; it is over when its holder says so, or is no longer in the session.
"""

from __future__ import annotations

from weightwire.session import keys
from weightwire.session.lease import LeaseObserver, Member
from weightwire.session.membership import newest
from weightwire.session.records import Turn, TurnOver
from weightwire.session.session import Session

__all__ = ["Turns"]


class Turns:
    """One receiver's turns.

    Args:
        member: whose turns they are.
    """

    def __init__(self, session: Session, member: Member, observer: LeaseObserver) -> None:
        self._session = session
        self._member = member
        self._observer = observer
        self._held: tuple[int, int] | None = None

    def take(self, most: int) -> tuple[str, ...]:
        """Take a turn, if one of ``most`` is free; returns who has them all, or nobody."""
        if self._held is not None:
            return ()
        holders = []
        for slot in range(most):
            numbers = self._session.numbers(keys.turn(slot))
            number = numbers[-1] if numbers else 0
            holder = self._holder(slot, number)
            if holder is not None:
                holders.append(holder.receiver_id)
                continue
            record = self._member.record
            place = keys.turn(slot, number + 1, "holder")
            if self._session.create(place, Turn(record.member_id, record.incarnation)):
                for older in numbers[:-1]:
                    self._session.delete_tree(keys.turn(slot, older))
                self._held = (slot, number + 1)
                return ()
            holders.append("another")
        return tuple(holders)

    def give_back(self) -> None:
        """End the turn, if there is one."""
        if self._held is not None:
            self._session.write(keys.turn(*self._held, "over"), TurnOver())
            self._held = None

    def _holder(self, slot: int, number: int) -> Turn | None:
        """Whose turn it is, unless it is over."""
        turn = self._session.read(keys.turn(slot, number, "holder"), Turn)
        if turn is None or self._session.read(keys.turn(slot, number, "over"), TurnOver):
            return None
        holder = newest(self._session, f"receivers/{turn.receiver_id}")
        if holder is None or holder.incarnation != turn.incarnation:
            return None
        return turn if self._observer.is_alive(holder) else None
