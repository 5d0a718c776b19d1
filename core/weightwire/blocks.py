"""Which matrices lie in slots in blocks of columns, and in how many.

A trainer doesn't know which engines will read its weights, nor how they cut them.  A
slice of rows is one run of a row-major matrix and one of each block; a slice of columns
is one run a row of a row-major matrix, and of blocks one each, or none where tensor
parallelism divides them.  So blocks cost a reader of rows a few runs and save a reader
of columns thousands, as long as a run is worth its bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from weightwire.table import Part, Shard, TensorEntry

__all__ = ["BLOCKS", "LEAST_BLOCK_NBYTES", "LEAST_SAVING", "borders_within", "column_blocks"]

BLOCKS = (16, 8, 4, 2)
"""Numbers of blocks that are tried, best first: tensor parallelism divides by powers of two."""

LEAST_BLOCK_NBYTES = 64 << 10
"""A shorter run's own cost (``weightwire.trace.reads.RUN_COST``) would be felt."""

LEAST_SAVING = 4
"""Blocks have to save a reader of columns this factor in runs."""


def column_blocks(entry: TensorEntry, parts: Iterable[Part]) -> int:
    """Blocks of columns in which a tensor's shards lie in slots; 1 for row by row.

    Args:
        parts: what of it travels in each group.
    """
    if len(entry.shape) < 2 or not entry.numel:
        return 1
    parts = list(parts)
    if any(part.sizes[-1] != entry.shape[-1] for part in parts):
        return 1
    boxes = [box for part in parts for s in entry.shards if (box := _meet(part, s)) is not None]
    largest = max(boxes, key=lambda box: math.prod(box.sizes))
    rows = math.prod(largest.sizes[:-1])
    for blocks in BLOCKS:
        width = entry.shape[-1] // blocks
        nbytes = rows * min(width, largest.sizes[-1]) * entry.torch_dtype.itemsize
        if (
            entry.shape[-1] % blocks == 0
            and nbytes >= LEAST_BLOCK_NBYTES
            and rows >= LEAST_SAVING * blocks
        ):
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
