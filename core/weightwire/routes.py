"""Who serves which bytes of what a rank reads: descriptors, as arrays.

Regions are intersected with the shards as these lie in their owners' slots, cut into
contiguous runs, sorted by address and merged where neighbours touch on both sides.
Everything is done on arrays of many: there is no loop over regions, shards or runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weightwire.cuts import Cuts
from weightwire.layout import ALIGNMENT
from weightwire.table import Region, TensorTable

__all__ = ["Routes", "Served", "joined", "route"]

Ints = NDArray[np.int64]

_PAIRS = 1 << 14
"""Regions times shards that are worked on at one time, which bounds the memory that it takes."""


@dataclass(frozen=True)
class Routes:
    """What one rank reads, one descriptor an index, sorted by group, owner and address.

    Attributes:
        group: transfer group.
        owner: trainer rank that serves it.
        source: first byte in the owner's slot.
        target: first byte in the reader's slot.
        nbytes: length of the run.
    """

    group: Ints
    owner: Ints
    source: Ints
    target: Ints
    nbytes: Ints

    def __len__(self) -> int:
        return len(self.nbytes)

    @property
    def arrays(self) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        return self.group, self.owner, self.source, self.target, self.nbytes


class Placed(NamedTuple):
    """Regions as arrays, one an index.

    Attributes:
        tensor: of the table.
        group: in which it travels.
        offsets: first index in each dimension.
        sizes: extent in each dimension, in elements.
        begin: first byte in the reader's slot.
    """

    tensor: Ints
    group: Ints
    offsets: Ints
    sizes: Ints
    begin: Ints

    def of(self, rows: Ints) -> Placed:
        """Some of them."""
        return Placed(*(array[rows] for array in self))


class Served:
    """Where every shard of a table lies in its owner's slot: made once for all ranks."""

    def __init__(self, table: TensorTable) -> None:
        self.table = table
        self.dims = max((len(entry.shape) for entry in table.tensors), default=0) or 1
        self._cuts = Cuts(table)
        tensors = [i for group in table.groups for i in group.tensors]
        groups = np.repeat(
            np.arange(len(table.groups)), [len(group.tensors) for group in table.groups]
        )
        items = np.array([entry.torch_dtype.itemsize for entry in table.tensors], np.int64)
        counts = np.array([len(entry.shards) for entry in table.tensors], np.int64)
        offsets = self.padded([s.offsets for entry in table.tensors for s in entry.shards], 0)
        sizes = self.padded([s.sizes for entry in table.tensors for s in entry.shards], 1)
        owners = np.array([s.owner for entry in table.tensors for s in entry.shards], np.int64)
        first = np.concatenate(([0], np.cumsum(counts)[:-1])) if len(counts) else counts
        # One row for each (group, tensor, shard), in the order of the slots.
        members = np.array(tensors, np.int64)
        turn, inner = _expanded(counts[members])
        shard = first[members][turn] + inner
        self.tensor = members[turn]
        self.group = groups[turn]
        self.owner = owners[shard]
        self.offsets, self.sizes = offsets[shard], sizes[shard]
        self._cut_parts(tensors, groups, turn)
        kept = self.sizes.prod(axis=1) > 0
        self._keep(kept)
        nbytes = self.sizes.prod(axis=1) * items[self.tensor]
        self.begin = _placed(self.group * table.world_size + self.owner, nbytes)
        self.items = items
        self._split_blocks()
        key = self.group * max(len(table.tensors), 1) + self.tensor
        order = np.argsort(key, kind="stable")
        self._keep(order)
        self.key = key[order]

    def padded(self, rows: Sequence[Sequence[int]], fill: int) -> Ints:
        """Rows of one length: dimensions in front are added."""
        if all(len(row) == self.dims for row in rows):
            return np.array(rows, np.int64).reshape(len(rows), self.dims)
        missing = {n: (fill,) * (self.dims - n) for n in range(self.dims + 1)}
        full = [(*missing[len(row)], *row) for row in rows]
        return np.array(full, np.int64).reshape(len(rows), self.dims)

    def placed(self, regions: Sequence[Region]) -> Placed:
        """Where regions lie in the reader's slots."""
        tensor = np.array([region.tensor for region in regions], np.int64)
        offsets = self.padded([region.offsets for region in regions], 0)
        sizes = self.padded([region.sizes for region in regions], 1)
        groups = np.array([self._cuts.group_of(region) for region in regions], np.int64)
        position = np.empty(len(self.table.tensors), np.int64)
        position[self._order_of_tensors()] = np.arange(len(position))
        order = np.lexsort((np.arange(len(tensor)), position[tensor], groups))
        nbytes = sizes.prod(axis=1) * self.items[tensor]
        begin = np.empty(len(tensor), np.int64)
        begin[order] = _placed(groups[order], nbytes[order])
        return Placed(tensor, groups, offsets, sizes, begin)

    def _order_of_tensors(self) -> Ints:
        members = np.array([i for group in self.table.groups for i in group.tensors], np.int64)
        _, first = np.unique(members, return_index=True)
        return members[np.sort(first)]

    def _keep(self, rows: NDArray[np.bool_] | Ints) -> None:
        for name in ("tensor", "group", "owner", "offsets", "sizes", "begin"):
            if hasattr(self, name):
                setattr(self, name, getattr(self, name)[rows])

    def _cut_parts(self, tensors: Sequence[int], groups: Ints, turn: Ints) -> None:
        """What travels of the tensors that are cut over several groups."""
        cut = [
            (n, part)
            for n, (i, g) in enumerate(zip(tensors, groups.tolist(), strict=True))
            if (part := self.table.groups[g].parts.get(i)) is not None
        ]
        if not cut:
            return
        begin = np.zeros((len(tensors), self.dims), np.int64)
        end = np.full((len(tensors), self.dims), np.iinfo(np.int64).max)
        rows = [n for n, _ in cut]
        begin[rows] = self.padded([part.offsets for _, part in cut], 0)
        end[rows] = begin[rows] + self.padded([part.sizes for _, part in cut], 1)
        start = np.maximum(self.offsets, begin[turn])
        stop = np.minimum(self.offsets + self.sizes, end[turn])
        self.offsets, self.sizes = start, np.maximum(stop - start, 0)

    def _split_blocks(self) -> None:
        """Rows of tensors that lie in blocks of columns: one for each block."""
        blocks = np.array([entry.blocks for entry in self.table.tensors], np.int64)[self.tensor]
        if (blocks == 1).all():
            return
        turn, block = _expanded(blocks)
        self._keep(turn)
        count = blocks[turn]
        widths = np.array([e.shape[-1] if e.shape else 1 for e in self.table.tensors], np.int64)
        width = np.where(count > 1, widths[self.tensor] // count, self.sizes[:, -1])
        rows = self.sizes[:, :-1].prod(axis=1)
        first = self.offsets[:, -1].copy()
        start = np.maximum(first, np.where(count > 1, block * width, first))
        stop = np.where(
            count > 1,
            np.minimum(first + self.sizes[:, -1], (block + 1) * width),
            first + self.sizes[:, -1],
        )
        before = np.where(count > 1, start - first, 0)
        self.begin = self.begin + rows * before * self.items[self.tensor]
        self.offsets[:, -1] = start
        self.sizes[:, -1] = np.maximum(stop - start, 0)
        self._keep(self.sizes[:, -1] > 0)


def route(served: Served, regions: Sequence[Region]) -> Routes:
    """The descriptors of one rank.

    Args:
        served: the table's shards.
        regions: what the rank reads, each in one transfer group.
    """
    if not regions or not len(served.key):
        empty = np.zeros(0, np.int64)
        return Routes(empty, empty, empty, empty, empty)
    placed = served.placed(regions)
    key = placed.group * max(len(served.table.tensors), 1) + placed.tensor
    low = np.searchsorted(served.key, key, "left")
    count = np.searchsorted(served.key, key, "right") - low
    found = [
        _routed(served, placed.of(rows), low[rows], count[rows])
        for rows in _together(placed.group, count)
    ]
    return Routes(
        *(np.concatenate(parts) for parts in zip(*(each.arrays for each in found), strict=True))
    )


def _together(group: Ints, pairs: Ints) -> list[Ints]:
    """Regions that are worked on at one time: of whole groups, in their order.

    Args:
        pairs: by region, the shards that it may meet.
    """
    order = np.argsort(group, kind="stable")
    begins = np.flatnonzero(np.diff(group[order], prepend=-1))
    batch = np.cumsum(np.add.reduceat(pairs[order], begins)) // _PAIRS
    firsts = begins[np.flatnonzero(np.diff(batch, prepend=-1))]
    return np.split(order, firsts[1:])


def _routed(served: Served, placed: Placed, low: Ints, count: Ints) -> Routes:
    """The descriptors of the regions of some groups.

    Args:
        low, count: by region, its first shard and their number.
    """
    tensor, group, offsets, sizes, begin = placed
    region, inner = _expanded(count)
    shard = low[region] + inner
    start = np.maximum(offsets[region], served.offsets[shard])
    stop = np.minimum(offsets[region] + sizes[region], served.offsets[shard] + served.sizes[shard])
    met = (stop > start).all(axis=1)
    region, shard, start, stop = region[met], shard[met], start[met], stop[met]
    extent = stop - start
    # From the last dimension on, whatever is whole on both sides lies in one run.
    whole = (extent == served.sizes[shard]) & (extent == sizes[region])
    is_run = np.ones_like(whole)
    is_run[:, :-1] = np.logical_and.accumulate(whole[:, :0:-1], axis=1)[:, ::-1]
    item = served.items[tensor[region]]
    nbytes = np.where(is_run, extent, 1).prod(axis=1) * item
    steps = np.where(is_run, 1, extent)
    source = served.begin[shard] + _flat(start - served.offsets[shard], served.sizes[shard]) * item
    target = begin[region] + _flat(start - offsets[region], sizes[region]) * item
    pair, turn = _expanded(steps.prod(axis=1))
    source, target, nbytes = source[pair], target[pair], nbytes[pair]
    from_strides = _strides(served.sizes[shard]) * item[:, None]
    to_strides = _strides(sizes[region]) * item[:, None]
    for dim in range(served.dims - 1, -1, -1):
        turn, at = np.divmod(turn, steps[pair, dim])
        source += at * from_strides[pair, dim]
        target += at * to_strides[pair, dim]
    return _merged(group[region][pair], served.owner[shard][pair], source, target, nbytes)


def joined(routes: Routes, served: Served, regions: Sequence[Region]) -> Routes:
    """Routes joined over the padding that both slots have between the same two tensors.

    Between the end of a region and the begin of the next one lies nothing of anybody's: a
    transport that moves it along needs fewer descriptors.

    Args:
        routes: of ``route``, for these regions.

    Returns:
        Routes whose lengths count that padding, too.
    """
    if len(routes) < 2:
        return routes
    tensor, group, _, sizes, begin = served.placed(regions)
    nbytes = sizes.prod(axis=1) * served.items[tensor]
    filled = nbytes > 0
    group, begin, end = group[filled], begin[filled], (begin + nbytes)[filled]
    span = int(end.max()) + 1
    order = np.argsort(group * span + begin)
    begin, end = begin[order], end[order]
    key = group[order] * span + begin
    region = np.searchsorted(key, routes.group * span + routes.target, side="right") - 1
    begins = routes.target == begin[region]
    ends = routes.target + routes.nbytes
    is_end = ends == end[np.searchsorted(key, routes.group * span + ends, side="left") - 1]
    gap = routes.source[1:] - (routes.source + routes.nbytes)[:-1]
    joins = (gap == routes.target[1:] - ends[:-1]) & (gap > 0) & (gap < ALIGNMENT)
    joins &= is_end[:-1] & begins[1:]
    joins &= (routes.group[1:] == routes.group[:-1]) & (routes.owner[1:] == routes.owner[:-1])
    first = np.flatnonzero(np.concatenate(([True], ~joins)))
    last = np.concatenate((first[1:] - 1, [len(routes) - 1]))
    return Routes(
        routes.group[first],
        routes.owner[first],
        routes.source[first],
        routes.target[first],
        routes.source[last] + routes.nbytes[last] - routes.source[first],
    )


def _merged(group: Ints, owner: Ints, source: Ints, target: Ints, nbytes: Ints) -> Routes:
    order = np.lexsort((source, owner, group))
    group, owner, source, target, nbytes = (
        array[order] for array in (group, owner, source, target, nbytes)
    )
    touches = (
        (group[1:] == group[:-1])
        & (owner[1:] == owner[:-1])
        & (source[1:] == source[:-1] + nbytes[:-1])
        & (target[1:] == target[:-1] + nbytes[:-1])
    )
    first = np.flatnonzero(np.concatenate(([True], ~touches)))
    return Routes(
        group[first], owner[first], source[first], target[first], np.add.reduceat(nbytes, first)
    )


def _placed(slot: Ints, nbytes: Ints) -> Ints:
    """Where rows begin in their slots: one behind the other, each aligned."""
    order = np.argsort(slot, kind="stable")
    aligned = -(-nbytes[order] // ALIGNMENT) * ALIGNMENT
    ends = np.cumsum(aligned)
    begins = ends - aligned
    starts = np.flatnonzero(np.concatenate(([True], np.diff(slot[order]) != 0)))
    base = np.repeat(begins[starts], np.diff(np.append(starts, len(slot)))) if len(slot) else begins
    result = np.empty_like(begins)
    result[order] = begins - base
    return result


def _expanded(counts: Ints) -> tuple[Ints, Ints]:
    """For rows that are repeated ``counts`` times: the row and the turn of each repetition."""
    row = np.repeat(np.arange(len(counts)), counts)
    begins = np.cumsum(counts) - counts
    return row, np.arange(len(row)) - begins[row]


def _strides(sizes: Ints) -> Ints:
    strides = np.ones_like(sizes)
    strides[:, :-1] = np.cumprod(sizes[:, :0:-1], axis=1)[:, ::-1]
    return strides


def _flat(index: Ints, sizes: Ints) -> Ints:
    return np.asarray((index * _strides(sizes)).sum(axis=1))
