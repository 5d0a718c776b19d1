"""One owner's part of a group, pushed, as its reader sees it: grant, then the bytes are there."""

from __future__ import annotations

from weightwire.contract import Policy
from weightwire.errors import PeerLost
from weightwire_nixl.backlog import Backlog
from weightwire_nixl.owner import Owner
from weightwire_nixl.wire import Granted, Written, encode

__all__ = ["Push"]


class Push:
    """Grants a slot at once, and then waits for the write's own notification.

    Attributes:
        landed: the bytes are in the slot.
        seal: of the owner, encoded; once it has landed.
        revoked: the owner has said that it won't write any more.
    """

    in_turn = False  # grants go ahead; the owner writes one group after the other

    def __init__(
        self, owner: Owner, group: int, slot: int, number: int, policy: Policy, backlog: Backlog
    ) -> None:
        self.owner = owner
        self.landed = False
        self.revoked = False
        self.seal = b""
        self._group = group
        self._grant = Granted(policy, group, slot, number)
        self._backlog = backlog
        self._granted = False

    def advance(self) -> None:
        """Take as many steps as are possible now.

        Raises:
            PeerLost: the owner is gone.
        """
        if self.landed:
            return
        if not self._granted:
            self._granted = True  # first: an interruption must not hide it
            try:
                self.owner.send_plan(self._grant.policy)
                self.owner.agent.notify(self.owner.info.agent, encode(self._grant), self.owner.who)
            except PeerLost:
                self.owner.broken = True
                raise
        written = self._backlog.take(self.owner.info.agent, Written, self._group)
        if written is None:
            return
        if written.number != self._grant.number:
            raise PeerLost(
                f"{self.owner.who} wrote group {self._group} by another grant "
                f"({written.number}) than this one ({self._grant.number}): restart it"
            )
        self.seal = written.seal
        self.landed = True

    def revoke(self) -> None:
        """The owner has nothing under way to this rank."""
        self.revoked = True

    @property
    def in_flight(self) -> bool:
        """Whether the owner may still write into this rank's memory."""
        waits = self._granted and not self.landed and not self.revoked
        return waits and not self.owner.is_gone
