"""Which matrices lie in slots in blocks of columns, and in how many.

A slice of rows is one run of a row-major matrix and one of each block; a slice of columns
is one run a row of a row-major matrix, and of blocks one each, or none where tensor
parallelism divides them.  So blocks cost a reader of rows a few runs and save a reader
of columns thousands, as long as a run is worth its bytes.  Receivers say in how many
slices of columns their ranks read (``WeightTarget.column_slices``): there are as many
blocks as that takes, and none where everybody reads whole rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from weightwire.table import Part, Shard, TensorEntry

__all__ = [
    "ANY",
    "BLOCKS",
    "LEAST_BLOCK_NBYTES",
    "LEAST_SAVING",
    "LEAST_SLICE_NBYTES",
    "borders_within",
    "column_blocks",
    "common_slices",
]

ANY = 0
"""Slices of columns of a receiver that doesn't say in how many it reads."""

BLOCKS = (16, 8, 4, 2)
"""Numbers of blocks for whoever doesn't say, best first: tensor parallelism divides by powers
of two."""

LEAST_BLOCK_NBYTES = 64 << 10
"""A shorter run's own cost (``weightwire.trace.reads.RUN_COST``) would be felt."""

LEAST_SLICE_NBYTES = 4 << 10
"""The same where a block is what somebody reads: row by row it would take shorter runs."""

LEAST_SAVING = 4
"""Blocks have to save a reader of columns this factor in runs."""


def common_slices(slices: Iterable[int]) -> int:
    """In how many slices of columns matrices are cut for all of several receivers.

    Args:
        slices: what each of them says, or ``ANY``.

    Returns:
        ``ANY`` if one of them doesn't say, or if they'd take more blocks than that.
    """
    found = 1
    for each in slices:
        if each == ANY or (found := math.lcm(found, each)) > max(BLOCKS):
            return ANY
    return found


def column_blocks(entry: TensorEntry, parts: Iterable[Part], slices: int = ANY) -> int:
    """Blocks of columns in which a tensor's shards lie in slots; 1 for row by row.

    Args:
        parts: what of it travels in each group.
        slices: of columns, in which it is read, or ``ANY``.
    """
    tried = BLOCKS if slices == ANY else (slices,)
    least = LEAST_BLOCK_NBYTES if slices == ANY else LEAST_SLICE_NBYTES
    if slices == 1 or len(entry.shape) < 2 or not entry.numel:
        return 1
    parts = list(parts)
    if any(part.sizes[-1] != entry.shape[-1] for part in parts):
        return 1
    boxes = [box for part in parts for s in entry.shards if (box := _meet(part, s)) is not None]
    largest = max(boxes, key=lambda box: math.prod(box.sizes))
    rows = math.prod(largest.sizes[:-1])
    for blocks in tried:
        width = entry.shape[-1] // blocks
        nbytes = rows * min(width, largest.sizes[-1]) * entry.torch_dtype.itemsize
        if entry.shape[-1] % blocks == 0 and nbytes >= least and rows >= LEAST_SAVING * blocks:
            return blocks
    return 1


def borders_within(entry: TensorEntry, begin: int, size: int) -> range:
    """Columns at which one of a tensor's blocks ends and the next begins, within some columns.

    Args:
        begin, size: the columns' first, and how many they are.
    """
    width = entry.shape[-1] // entry.blocks
    return range(begin // width * width + width, begin + size, width)


def _meet(part: Part, shard: Shard) -> Part | None:
    return part.meet(shard.offsets, shard.sizes)
