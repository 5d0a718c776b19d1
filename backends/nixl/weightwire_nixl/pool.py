"""A trainer rank's slots: which is filled next, and who may still touch which."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch

from weightwire_nixl.agent import Agent
from weightwire_nixl.arena import Slots, Words
from weightwire_nixl.reader import Reader

__all__ = ["Slot", "SlotPool"]


class Slot:
    """One slot.

    Attributes:
        group, generation: what it was filled with last.
        outstanding: by agent, who may still read it, or is still written from it.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.group = -1
        self.generation = 0
        self.outstanding: dict[str, Reader] = {}

    def is_touched(self) -> bool:
        """Whether somebody may still touch it; those who are gone are forgotten."""
        for name, reader in list(self.outstanding.items()):
            if reader.is_gone:
                del self.outstanding[name]
        return bool(self.outstanding)


class SlotPool:
    """Slots for each turn, and some to take the place of those that are retired.

    Beside each slot lies its generation word: what the slot holds, or 0 while that changes.

    Args:
        spare: how many may be retired.
        nbytes: of one slot.

    Raises:
        ConfigError: there isn't that much memory.
        TransferError: it can't be registered.
    """

    def __init__(
        self, agent: Agent, turns: int, spare: int, nbytes: int, device: torch.device
    ) -> None:
        count = turns + spare
        self.slots = Slots(agent, count, nbytes, device)
        self.words = Words(agent, count)
        self._all = [Slot(index) for index in range(count)]
        self._turns = list(range(turns))

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._all)

    def of_turn(self, sequence: int) -> Slot:
        """The slot of the ``sequence``-th group of a version."""
        return self._all[self._turns[sequence % len(self._turns)]]

    @property
    def in_turn(self) -> list[Slot]:
        """Those of all turns."""
        return [self._all[index] for index in self._turns]

    def open(self, slot: Slot) -> None:
        """It is going to be filled: whoever still reads it sees that it moved."""
        self.words[slot.index] = 0

    def open_all(self) -> None:
        """What is served from anywhere is going to change."""
        for slot in self._all:
            self.open(slot)

    def seal(self, slot: Slot, group: int, generation: int) -> None:
        """It holds a group."""
        slot.group, slot.generation = group, generation
        self.words[slot.index] = generation

    def untouched(self, slot: Slot) -> Slot | None:
        """This slot, or a spare one, that nobody may touch any more; None while there is none."""
        used = {index for index in self._turns if index != slot.index}
        for other in (slot, *self._all):
            if other.index not in used and not other.is_touched():
                return other
        return None

    def use(self, sequence: int, slot: Slot) -> None:
        """From now on, for this turn."""
        self._turns[sequence % len(self._turns)] = slot.index

    def credit(self, agent: str, generation: int) -> None:
        """A reader has read what was announced under this generation."""
        for slot in self._all:
            if slot.generation == generation:
                slot.outstanding.pop(agent, None)

    def release(self, agent: str, but: Collection[int] = ()) -> None:
        """A reader touches none of them any more, but those that are still written to it."""
        for slot in self._all:
            if slot.index not in but:
                slot.outstanding.pop(agent, None)

    def written(self, index: int, agent: str) -> None:
        """Nothing is written to a reader from this slot any more."""
        self._all[index].outstanding.pop(agent, None)

    def may_touch(self, agent: str) -> bool:
        return any(agent in slot.outstanding for slot in self._all)

    @property
    def late(self) -> dict[tuple[str, int], Reader]:
        """By agent and generation, who may still touch what."""
        return {
            (name, slot.generation): reader
            for slot in self._all
            for name, reader in slot.outstanding.items()
        }
