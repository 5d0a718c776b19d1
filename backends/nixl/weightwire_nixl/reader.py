"""An inference rank as a trainer rank sees it."""

from __future__ import annotations

from weightwire.contract import Policy
from weightwire.session import process
from weightwire_nixl.delivery import Writes
from weightwire_nixl.route import Route
from weightwire_nixl.wire import ReaderInfo

__all__ = ["Reader"]


class Reader:
    """One incarnation of an inference rank that wants something of this rank.

    Attributes:
        groups: that it wants.
        route: how they get there.
        writes: what is prepared for it, where this rank pushes.
        heard: how many batches of the trainer's registered memory it has heard of.
        gave_up: the last version that it gave up.
        told_over: the last version of which it knows that nothing is under way any more.
        broken: a signal or a write to it failed: NIXL has dropped its metadata.
    """

    def __init__(self, who: str, receiver_id: str, rank: int, info: ReaderInfo) -> None:
        self.who = who
        self.receiver_id = receiver_id
        self.rank = rank
        self.info = info
        self.groups: frozenset[int] = frozenset()
        self.route: Route | None = None
        self.writes: Writes | None = None
        self.heard = 0
        self.gave_up = Policy(0, 0, 0)
        self.told_over = Policy(0, 0, 0)
        self.said_bye = False
        self.broken = False

    @property
    def agent(self) -> str:
        return self.info.agent

    @property
    def is_gone(self) -> bool:
        return self.said_bye or process.is_gone(self.info.process)
