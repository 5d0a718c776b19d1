"""One owner's part of a group, pulled: announcement, data, generation word."""

from __future__ import annotations

from collections.abc import Callable

from weightwire.contract import Policy
from weightwire.errors import PeerLost
from weightwire_nixl.agent import Transfer
from weightwire_nixl.backlog import Backlog
from weightwire_nixl.owner import Owner
from weightwire_nixl.wire import Announced, Credit, encode

__all__ = ["Pull"]


class Pull:
    """Goes from step to step as far as it can without waiting::

        announced?  ->  data read  ->  word read, whose notification is the credit

    The word is read when the data is there: the owner clears it before it fills the
    slot again, so a word that hasn't moved proves that the data is of one piece.

    UCX ends a READ only when every READ of that peer that was posted before has ended.  So
    one group at a time is read from an owner: the word of this one would wait for the
    data of the next, and the slots for both.

    Attributes:
        landed: the bytes are in the slot, and are what was announced.
        seal: of the owner, encoded; once it has landed.
    """

    in_turn = True

    def __init__(
        self, owner: Owner, group: int, slot: int, policy: Policy, backlog: Backlog
    ) -> None:
        self.owner = owner
        self.landed = False
        self.seal = b""
        self._group = group
        self._slot = slot
        self._policy = policy
        self._backlog = backlog
        self._announced: Announced | None = None
        self._data: Transfer | None = None
        self._word: Transfer | None = None
        self._step: Callable[[], bool] = self._look

    def advance(self) -> None:
        """Take as many steps as are possible now.

        Raises:
            PeerLost: the owner is gone, or filled the slot again meanwhile.
        """
        try:
            while not self.landed and self._step():
                pass
        except PeerLost:
            self.owner.broken = True
            raise

    @property
    def in_flight(self) -> bool:
        """Whether a read may still write into this rank's memory."""
        return any(map(self._may_write, (self._data, self._word)))

    def _may_write(self, transfer: Transfer | None) -> bool:
        if transfer is None or transfer.is_over():
            return False
        return not (transfer.lingers and self.owner.is_gone)

    def revoke(self) -> None:
        """The owner has nothing under way to this rank: a read is this rank's own."""

    def _look(self) -> bool:
        found = self._backlog.take(self.owner.info.agent, Announced, self._group)
        if found is None:
            return False
        if found.slot >= self.owner.info.arena.slots:
            raise PeerLost(
                f"{self.owner.who} announces slot {found.slot} of "
                f"{self.owner.info.arena.slots}: restart it"
            )
        self._announced = found
        if found.live is not None:
            self._data = self.owner.read_live(self._group, self._slot, found.live)
        else:
            self._data = self.owner.read(self._group, found.slot, self._slot)
        self._step = self._read_word if self._data.post() else self._await_data
        return True

    def _await_data(self) -> bool:
        assert self._data is not None  # noqa: S101 - posted
        if not self._data.done():
            return False
        self._step = self._read_word
        return True

    def _read_word(self) -> bool:
        assert self._announced is not None  # noqa: S101 - looked
        self.owner.clear_word(self._slot)
        self._word = self.owner.read_word(self._announced.slot, self._slot)
        credit = encode(Credit(self._policy, self._group, self._announced.generation))
        self._step = self._compare if self._word.post(credit) else self._await_word
        return True

    def _await_word(self) -> bool:
        assert self._word is not None  # noqa: S101 - posted
        if not self._word.done():
            return False
        self._step = self._compare
        return True

    def _compare(self) -> bool:
        assert self._announced is not None  # noqa: S101 - looked
        if self.owner.word(self._slot) != self._announced.generation:
            raise PeerLost(
                f"{self.owner.who} filled the slot of group {self._group} again while it was read: "
                "this receiver was stopped for longer than its lease; receive the next version"
            )
        self.seal = self._announced.seal
        self.landed = True
        return True
