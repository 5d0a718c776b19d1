"""Tensors that are served where they lie: registered memory that nobody staged into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weightwire.errors import ConfigError, TransferError
from weightwire.layout import slot_layout
from weightwire.table import TensorTable
from weightwire_nixl.agent import Agent
from weightwire_nixl.memory import check_shareable
from weightwire_nixl.runs import Runs, extents
from weightwire_nixl.wire import Live

__all__ = ["LiveGroup", "LiveLayout", "LiveMemory", "located", "split_by_place"]

_MOST_PIECES = 1 << 12

Addresses = NDArray[np.uint64]


@dataclass(frozen=True)
class LiveGroup:
    """The tensors of a group where they lie, in the order of the slot's layout.

    Attributes:
        begins, nbytes: first byte and length in the slot that isn't filled.
        bases: address of each.
        device, device_id: of all of them.
    """

    begins: Addresses
    nbytes: Addresses
    bases: Addresses
    device: str
    device_id: int

    def told(self, news: Sequence[bytes]) -> Live:
        """What a reader is told of it, with metadata that it hasn't heard yet."""
        return Live(self.bases.astype("<u8").tobytes(), self.device, self.device_id, tuple(news))


@dataclass(frozen=True)
class LiveLayout:
    """A group of one owner that isn't staged.

    Attributes:
        tensors: those that aren't empty, in the order of the slot's layout.
        begins, nbytes: first byte and length of each in the slot that isn't filled.
    """

    tensors: list[int]
    begins: Addresses
    nbytes: Addresses

    @classmethod
    def of(cls, table: TensorTable, group: int, owner: int) -> LiveLayout:
        """How a trainer rank's part of a group lies.

        Raises:
            ConfigError: part of it must be staged in blocks of columns.
        """
        places = slot_layout(table, group, owner).places
        for i in places:
            entry = table.tensors[i]
            if entry.blocks > 1:
                raise ConfigError(
                    f"nixl option zero_copy: tensor {entry.name!r} must be staged in "
                    f"{entry.blocks} blocks of columns: use zero_copy=False on all trainer ranks"
                )
        chosen = [i for i, place in places.items() if place.nbytes]
        return cls(chosen, *extents(table, group, owner))

    def find(self, group: int, tensors: Mapping[int, Tensor]) -> tuple[LiveGroup, list[Tensor]]:
        """Where the tensors lie now, and those of them that aren't empty.

        Raises:
            ConfigError: they lie on several devices.
        """
        served = [tensors[i] for i in self.tensors]
        devices = {tensor.device for tensor in served}
        if len(devices) > 1:
            raise ConfigError(
                f"nixl option zero_copy: group {group} lies on {len(devices)} devices "
                f"({', '.join(sorted(map(str, devices)))}): use zero_copy=False"
            )
        device = next(iter(devices), torch.device("cpu"))
        found = LiveGroup(
            self.begins,
            self.nbytes,
            np.array([tensor.data_ptr() for tensor in served], dtype=np.uint64),
            device.type,
            0 if device.type == "cpu" else device.index,
        )
        return found, served


class LiveMemory:
    """The storages of a trainer's tensors, registered once and held from then on.

    What is registered stays allocated, so that an address never comes to mean other
    memory: therefore a trainer that gives its tensors new memory for each version is
    refused before long.

    Attributes:
        batches: metadata of what was registered, in order; peers load what they lack.
    """

    def __init__(self, agent: Agent, most_nbytes: int) -> None:
        self.batches: list[bytes] = []
        self._agent = agent
        self._most_nbytes = most_nbytes
        self._held: dict[tuple[int, int, int], object] = {}
        self._nbytes = 0

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Register the memory of these tensors where it isn't yet.

        Raises:
            ConfigError: there are too many pieces, or new ones again and again.
            TransferError: it can't be registered.
        """
        fresh: dict[tuple[int, int, int], Tensor] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = (storage.data_ptr(), storage.nbytes(), tensor.get_device())
            if storage.nbytes() and key not in self._held:
                fresh.setdefault(key, tensor)
        if not fresh:
            return
        self._nbytes += sum(nbytes for _, nbytes, _ in fresh)
        pieces = len(self._held) + len(fresh)
        if self._nbytes > self._most_nbytes or pieces > _MOST_PIECES:
            raise ConfigError(
                f"nixl option zero_copy: {pieces} pieces of memory ({self._nbytes} bytes) hold or "
                "held these tensors, because they get new memory again and again or lie "
                "scattered: use zero_copy=False"
            )
        for (address, _, _), tensor in fresh.items():
            check_shareable(address, tensor.device, "a tensor that zero_copy serves")
        self.batches.append(
            self._agent.register_pieces(list(fresh), next(iter(fresh.values())).device.type)
        )
        for key, tensor in fresh.items():
            self._held[key] = tensor.untyped_storage()


def split_by_place(runs: Runs, begins: Addresses, nbytes: Addresses) -> tuple[Runs, Addresses]:
    """Runs that were merged over tensors, cut where one ends and the next begins.

    Args:
        begins, nbytes: of the owner's places in its slot, in order; none is empty.

    Returns:
        The runs, and the place in which each lies.
    """
    one = np.uint64(1)
    first = np.searchsorted(begins, runs.source, side="right") - 1
    last = np.searchsorted(begins, runs.source + runs.nbytes - one, side="right") - 1
    counts = last - first + 1
    run = np.repeat(np.arange(len(runs)), counts)
    step = np.arange(len(run)) - np.repeat(np.cumsum(counts) - counts, counts)
    place = first[run] + step
    begin = np.maximum(runs.source[run], begins[place])
    end = np.minimum(runs.source[run] + runs.nbytes[run], begins[place] + nbytes[place])
    keep = end > begin  # a run may reach into padding
    begin, end, run, place = begin[keep], end[keep], run[keep], place[keep]
    target = runs.target[run] + (begin - runs.source[run])
    return Runs(begin, target, end - begin), place.astype(np.uint64)


def located(runs: Runs, places: Addresses, begins: Addresses, bases: Addresses) -> Addresses:
    """The address of each run, where place ``i`` lies at ``bases[i]``."""
    index = places.astype(np.intp)
    if len(bases) != len(begins):
        raise TransferError(
            f"{len(bases)} addresses came for {len(begins)} tensors: "
            "run one weightwire version on both sides"
        )
    found: Addresses = bases[index] + (runs.source - begins[index])
    return found
