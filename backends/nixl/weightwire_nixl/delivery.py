"""One group on its way to one reader, pushed: grant, write.  And the plan it follows."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from weightwire.contract import Policy
from weightwire.errors import TransferError
from weightwire_nixl.agent import Agent, Transfer
from weightwire_nixl.arena import Slots
from weightwire_nixl.backlog import Backlog
from weightwire_nixl.live import LiveGroup, located, split_by_place
from weightwire_nixl.runs import Runs, rebased
from weightwire_nixl.wire import Granted, PlanPart, ReaderInfo, Written, encode

__all__ = ["Delivery", "Writes", "plan_parts"]

_ROW = 4
_PART_ROWS = (1 << 18) // (8 * _ROW)
_MOST_ROWS = 1 << 24

Rows = NDArray[np.uint64]


def plan_parts(groups: Mapping[int, Runs], policy: Policy) -> list[PlanPart]:
    """What an owner must know to write a reader's groups, in messages of bounded size."""
    blocks = []
    for group, runs in groups.items():
        block = np.empty((len(runs), _ROW), dtype="<u8")
        block[:, 0] = group
        block[:, 1], block[:, 2], block[:, 3] = runs.source, runs.target, runs.nbytes
        blocks.append(block)
    rows = np.concatenate(blocks) if blocks else np.empty((0, _ROW), dtype="<u8")
    count = max(1, -(-len(rows) // _PART_ROWS))
    return [
        PlanPart(policy, part, count, rows[part * _PART_ROWS : (part + 1) * _PART_ROWS].tobytes())
        for part in range(count)
    ]


class Writes:
    """What one reader wants of this rank, and the writes that are prepared for it.

    Args:
        nbytes: of each group of this rank, to check the plan by.
    """

    def __init__(
        self, who: str, info: ReaderInfo, agent: Agent, slots: Slots, nbytes: Mapping[int, int]
    ) -> None:
        self._who = who
        self._info = info
        self._agent = agent
        self._slots = slots
        self._nbytes = nbytes
        self._parts: dict[int, bytes] = {}
        self._groups: dict[int, Rows] | None = None
        self._prepared: dict[tuple[int, int, int], tuple[bytes, Transfer]] = {}

    @property
    def who(self) -> str:
        return self._who

    @property
    def slots(self) -> int:
        """How many slots the reader has."""
        return self._info.arena.slots

    @property
    def is_planned(self) -> bool:
        return self._groups is not None

    def add(self, part: PlanPart, groups: frozenset[int]) -> None:
        """Take a part of the plan; when it is the last one, check and keep the whole.

        Raises:
            TransferError: the plan leaves the slots, or isn't for these groups.
        """
        if self.is_planned or part.parts * _PART_ROWS > _MOST_ROWS + _PART_ROWS:
            return
        self._parts[part.part] = part.rows
        if len(self._parts) < part.parts:
            return
        raw = b"".join(self._parts[i] for i in sorted(self._parts))
        self._parts = {}
        if len(raw) % (8 * _ROW):
            raise TransferError(f"{self._who} sent a plan that is cut off: restart it")
        rows = np.frombuffer(raw, dtype="<u8").reshape(-1, _ROW).astype(np.uint64)
        found: dict[int, Rows] = {}
        bounds = np.flatnonzero(np.diff(rows[:, 0])) + 1
        for block in np.split(rows, bounds) if len(rows) else []:
            found[int(block[0, 0])] = block
        if set(found) != set(groups) or any(
            not self._fits(group, block) for group, block in found.items()
        ):
            raise TransferError(
                f"{self._who} sent a plan that doesn't fit the table: "
                "run one weightwire version on both sides"
            )
        self._groups = found

    def _fits(self, group: int, block: Rows) -> bool:
        limits = np.array([self._nbytes.get(group, 0), self._info.arena.slot_nbytes], np.uint64)
        begins, lengths = block[:, 1:3], block[:, 3:4]
        # Each by itself first: a sum of large numbers could wrap around.
        return bool(
            (lengths > 0).all()
            and (begins <= limits).all()
            and (lengths <= limits).all()
            and (begins + lengths <= limits).all()
        )

    def write(self, group: int, ours: int, theirs: int, live: LiveGroup | None) -> Transfer:
        """The write of a group into one of their slots: from one of ours, or from the tensors.

        Prepared when it is first needed, and again when the tensors moved.
        """
        key = (group, ours, theirs)
        where = b"" if live is None else live.bases.tobytes()
        known = self._prepared.get(key)
        if known is not None and known[0] == where:
            return known[1]
        if known is not None:
            known[1].release()
        assert self._groups is not None  # noqa: S101 - planned
        rows = self._groups[group]
        runs = Runs(rows[:, 1], rows[:, 2], rows[:, 3])
        arena = self._info.arena
        if live is None:
            device, number = self._slots.device.type, self._slots.device_id
            here = rebased(runs.source, runs.nbytes, self._slots.begin(ours), number)
        else:
            device, number = live.device, live.device_id
            runs, places = split_by_place(runs, live.begins, live.nbytes)
            here = rebased(located(runs, places, live.begins, live.bases), runs.nbytes, 0, number)
        there = arena.address + theirs * arena.slot_nbytes
        transfer = self._agent.prepare(
            "WRITE",
            self._info.agent,
            here,
            rebased(runs.target, runs.nbytes, there, arena.device_id),
            devices=(device, arena.device),
            who=self._who,
        )
        self._prepared[key] = (where, transfer)
        return transfer

    @property
    def in_flight(self) -> bool:
        return any(not transfer.is_over() for _, transfer in self._prepared.values())

    def release(self) -> None:
        """Give back what was prepared.  Only with nothing in flight."""
        for _, transfer in self._prepared.values():
            transfer.release()
        self._prepared.clear()


class Delivery:
    """Goes from step to step as far as it can without waiting::

        plan and grant?  ->  write, whose notification is the announcement

    Attributes:
        done: the group is in the reader's slot, and this rank's slot is free of it.
    """

    def __init__(
        self,
        writes: Writes,
        agent: str,
        group: int,
        slot: int,
        policy: Policy,
        seal: bytes,
        live: LiveGroup | None,
        backlog: Backlog,
    ) -> None:
        self._live = live
        self.agent = agent
        self.group = group
        self.slot = slot
        self.done = False
        self._writes = writes
        self._policy = policy
        self._seal = seal
        self._backlog = backlog
        self._write: Transfer | None = None
        self._step: Callable[[], bool] = self._look

    def advance(self) -> None:
        """Take as many steps as are possible now.

        Raises:
            PeerLost: the reader is gone.
        """
        while not self.done and self._step():
            pass

    @property
    def started(self) -> bool:
        return self._write is not None

    @property
    def in_flight(self) -> bool:
        """Whether the write may still touch either slot."""
        return self._write is not None and not self._write.is_over()

    def _look(self) -> bool:
        if not self._writes.is_planned:
            return False
        grant = self._backlog.take(self.agent, Granted, self.group)
        if grant is None:
            return False
        if grant.slot >= self._writes.slots:
            raise TransferError(
                f"{self._writes.who} grants slot {grant.slot} of {self._writes.slots}: restart it"
            )
        self._write = self._writes.write(self.group, self.slot, grant.slot, self._live)
        written = encode(Written(self._policy, self.group, grant.number, self._seal))
        self._step = self._finish if self._write.post(written) else self._await
        return True

    def _await(self) -> bool:
        assert self._write is not None  # noqa: S101 - posted
        if not self._write.done():
            return False
        self._step = self._finish
        return True

    def _finish(self) -> bool:
        self.done = True
        return True
