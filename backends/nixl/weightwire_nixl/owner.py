"""A trainer rank as its reader sees it, with the reads that are prepared for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weightwire.contract import Policy
from weightwire.errors import TransferError
from weightwire.session import process
from weightwire_nixl.agent import Agent, Descriptors, Transfer
from weightwire_nixl.arena import Slots, Words, word_address
from weightwire_nixl.delivery import plan_parts
from weightwire_nixl.fabric import SHARED_FROM
from weightwire_nixl.live import located, split_by_place
from weightwire_nixl.route import Route
from weightwire_nixl.runs import GroupPlan, extents, in_pieces, rebased
from weightwire_nixl.wire import Live, SenderInfo, encode

__all__ = ["LARGE", "PIECES", "Owner"]

LARGE = 8 << 20
"""Bytes from which on threads share a read."""

PIECES = SHARED_FROM
"""Of a shared read, for each thread."""


class Owner:
    """A trainer rank.

    Reads are prepared when they are first needed, and posted again from then on.

    Attributes:
        route: how its bytes get here.
        pieces: into how many a large read is cut, for NIXL's threads; 0: not at all.
        broken: a transfer with it failed: NIXL has dropped its metadata.
        heard: metadata of the memory that it registered since it described itself.
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
        route: Route,
        pieces: int = 0,
    ) -> None:
        self.rank = rank
        self.who = who
        self.info = info
        self.agent = agent
        self.route = route
        self.pieces = pieces
        self.broken = False
        self.said_bye = False
        self.heard: list[bytes] = []
        self._knows_plan = False
        self._slots = slots
        self._words = words
        self._plans = plans
        self._reads: dict[tuple[int, int, int], Transfer] = {}
        self._live_reads: dict[tuple[int, int], tuple[tuple[bytes, str, int], Transfer]] = {}
        self._word_reads: dict[tuple[int, int], Transfer] = {}

    @property
    def is_gone(self) -> bool:
        """Whether it has closed, or its process is known to have ended."""
        return self.said_bye or process.is_gone(self.info.process)

    def send_plan(self, policy: Policy) -> None:
        """Tell an owner that pushes what to write; it keeps it for the life of both agents.

        Raises:
            PeerLost: the owner is gone.
        """
        if self._knows_plan:
            return
        mine = {
            group: plan.owners[self.rank]
            for group, plan in self._plans.items()
            if self.rank in plan.owners
        }
        for part in plan_parts(mine, policy):
            self.agent.notify(self.info.agent, encode(part), self.who)
        self._knows_plan = True

    def read(self, group: int, theirs: int, ours: int) -> Transfer:
        """The read of a group from one of its slots into one of ours."""
        key = (group, theirs, ours)
        found = self._reads.get(key)
        if found is None:
            runs = self._plans[group].owners[self.rank]
            arena = self.info.arena
            there = arena.address + theirs * arena.slot_nbytes
            found = self._reads[key] = self._prepare(
                rebased(runs.target, runs.nbytes, self._slots.begin(ours), self._slots.device_id),
                rebased(runs.source, runs.nbytes, there, arena.device_id),
                arena.device,
            )
        return found

    def _prepare(self, here: Descriptors, there: Descriptors, device: str) -> Transfer:
        cut = bool(self.pieces) and int(here[:, 1].sum()) >= LARGE
        if cut:
            here, there = in_pieces(here, there, self.pieces)
        return self.agent.prepare(
            "READ",
            self.info.agent,
            here,
            there,
            devices=(self._slots.device.type, device),
            who=self.who,
            cut=cut,
        )

    def read_live(self, group: int, ours: int, live: Live) -> Transfer:
        """The read of a group that isn't staged; prepared again when its tensors moved.

        Raises:
            TransferError: the addresses don't fit the table.
        """
        self.learn(live.metadata)
        key = (group, ours)
        where = (live.bases, live.device, live.device_id)
        known = self._live_reads.get(key)
        if known is not None and known[0] == where:
            return known[1]
        if known is not None:
            known[1].release()
        plan = self._plans[group]
        begins, nbytes = extents(plan.table, group, self.rank)
        runs, places = split_by_place(plan.owners[self.rank], begins, nbytes)
        if len(live.bases) != 8 * len(begins):
            raise TransferError(
                f"{self.who} names {len(live.bases) // 8} addresses for {len(begins)} tensors: "
                "run one weightwire version on both sides"
            )
        bases = np.frombuffer(live.bases, dtype="<u8").astype(np.uint64)
        there = located(runs, places, begins, bases)
        transfer = self._prepare(
            rebased(runs.target, runs.nbytes, self._slots.begin(ours), self._slots.device_id),
            rebased(there, runs.nbytes, 0, live.device_id),
            live.device,
        )
        self._live_reads[key] = (where, transfer)
        return transfer

    def learn(self, batches: Sequence[bytes]) -> None:
        """Hear of more memory; what was heard before is passed over.

        Raises:
            PeerLost: it can't be reached.
        """
        for metadata in batches:
            if metadata not in self.heard:
                self.agent.extend(self.info.agent, metadata, self.who)
                self.heard.append(metadata)

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
        live = (transfer for _, transfer in self._live_reads.values())
        for transfer in (*self._reads.values(), *live, *self._word_reads.values()):
            transfer.release()
        self._live_reads.clear()
        self._reads.clear()
        self._word_reads.clear()
