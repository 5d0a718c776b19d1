"""A trainer rank as its reader sees it, with the reads that are prepared for it."""

from __future__ import annotations

import numpy as np

from weightwire_nixl.agent import Agent, Transfer
from weightwire_nixl.arena import Slots, Words, word_address
from weightwire_nixl.runs import GroupPlan, rebased
from weightwire_nixl.wire import SenderInfo

__all__ = ["Owner"]


class Owner:
    """A trainer rank.

    Reads are prepared when they are first needed, and posted again from then on.

    Attributes:
        broken: a transfer with it failed: NIXL has dropped its metadata.
    """

    def __init__(
        self,
        rank: int,
        who: str,
        info: SenderInfo,
        agent: Agent,
        slots: Slots,
        words: Words,
        plans: dict[int, GroupPlan],
    ) -> None:
        self.rank = rank
        self.who = who
        self.info = info
        self.agent = agent
        self.broken = False
        self._slots = slots
        self._words = words
        self._plans = plans
        self._reads: dict[tuple[int, int, int], Transfer] = {}
        self._word_reads: dict[tuple[int, int], Transfer] = {}

    def read(self, group: int, theirs: int, ours: int) -> Transfer:
        """The read of a group from one of its slots into one of ours."""
        key = (group, theirs, ours)
        found = self._reads.get(key)
        if found is None:
            runs = self._plans[group].owners[self.rank]
            arena = self.info.arena
            found = self._reads[key] = self.agent.prepare(
                "READ",
                self.info.agent,
                rebased(runs.target, runs.nbytes, self._slots.begin(ours), self._slots.device_id),
                rebased(
                    runs.source,
                    runs.nbytes,
                    arena.address + theirs * arena.slot_nbytes,
                    arena.device_id,
                ),
                devices=(self._slots.device.type, arena.device),
                who=self.who,
            )
        return found

    def read_word(self, theirs: int, ours: int) -> Transfer:
        """The read of a slot's generation word."""
        key = (theirs, ours)
        found = self._word_reads.get(key)
        if found is None:
            here = self._words.address_of(self._word(ours))
            there = word_address(self.info.words, theirs)
            found = self._word_reads[key] = self.agent.prepare(
                "READ",
                self.info.agent,
                np.array([[here, Words.nbytes, 0]], dtype=np.uint64),
                np.array([[there, Words.nbytes, 0]], dtype=np.uint64),
                devices=("cpu", "cpu"),
                who=self.who,
            )
        return found

    def word(self, ours: int) -> int:
        """What ``read_word`` brought."""
        return self._words[self._word(ours)]

    def clear_word(self, ours: int) -> None:
        self._words[self._word(ours)] = 0

    def _word(self, ours: int) -> int:
        return self.rank * self._slots.count + ours

    def release(self) -> None:
        """Give back what was prepared.  Only with nothing in flight."""
        for transfer in (*self._reads.values(), *self._word_reads.values()):
            transfer.release()
        self._reads.clear()
        self._word_reads.clear()
