"""Where tensors lie in a slot: a pure function of the table, the same on both sides."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weightwire.errors import UnsupportedOperation
from weightwire.table import Shard, TensorTable

__all__ = ["ALIGNMENT", "Place", "SlotLayout", "cut_out", "lay_out", "slot_layout"]

ALIGNMENT = 64
"""Bytes to which each tensor's begin is aligned."""


@dataclass(frozen=True)
class Place:
    """One tensor's (or shard's) bytes in a slot.

    Attributes:
        begin: first byte.
        nbytes: length in bytes.
        shape: of the shard.
    """

    begin: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def view(self, slot: Tensor) -> Tensor:
        """The tensor in ``slot``, a contiguous uint8 tensor."""
        return slot[self.begin : self.begin + self.nbytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class SlotLayout:
    """One owner's part of a group.

    Attributes:
        places: by tensor index.
        shards: the box that lies there, by tensor index: the owner's shard, or
            of a tensor that is cut over several groups, what of it is in this one.
        nbytes: of the whole slot.
    """

    places: dict[int, Place]
    shards: dict[int, Shard]
    nbytes: int


def cut_out(
    tensor: Tensor, offsets: Sequence[int], sizes: Sequence[int], origin: Sequence[int]
) -> Tensor:
    """The view of a box of a tensor whose first element has the global index ``origin``."""
    if tuple(tensor.shape) == tuple(sizes):
        return tensor
    return tensor[
        tuple(
            slice(at - begin, at - begin + size)
            for at, size, begin in zip(offsets, sizes, origin, strict=True)
        )
    ]


def lay_out(parts: Iterable[tuple[torch.dtype, tuple[int, ...]]]) -> tuple[list[Place], int]:
    """Places one after another, each aligned; and the bytes of all."""
    places, at = [], 0
    for dtype, shape in parts:
        nbytes = math.prod(shape) * dtype.itemsize
        places.append(Place(at, nbytes, dtype, shape))
        at += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return places, at


def slot_layout(table: TensorTable, group: int, owner: int) -> SlotLayout:
    """How one trainer rank's shards of a group lie in its slot: in the group's order."""
    shards: dict[int, Shard] = {}
    for i in table.groups[group].tensors:
        mine = [shard for shard in table.tensors[i].shards if shard.owner == owner]
        if len(mine) > 1:
            raise UnsupportedOperation(
                f"tensor {table.tensors[i].name!r} has several shards on rank {owner}: "
                "merge them in the source"
            )
        part = table.groups[group].parts.get(i)
        if mine and part is not None:
            here = part.meet(mine[0].offsets, mine[0].sizes)
            mine = [Shard(owner, here.offsets, here.sizes)] if here is not None else []
        if mine:
            shards[i] = mine[0]
    places, nbytes = lay_out(
        (table.tensors[i].torch_dtype, shard.sizes) for i, shard in shards.items()
    )
    return SlotLayout(dict(zip(shards, places, strict=True)), shards, nbytes)
