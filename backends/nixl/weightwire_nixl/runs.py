"""What one rank reads from one owner, as runs of bytes: made once per table, in arrays."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weightwire.cuts import Cuts
from weightwire.layout import Place, SlotLayout, lay_out, slot_layout
from weightwire.table import Region, Shard, TensorTable

__all__ = ["GroupPlan", "Runs", "extents", "plan_groups", "rebased"]

_PADDING = 64
Offsets = NDArray[np.uint64]


@dataclass(frozen=True)
class Runs:
    """Contiguous pieces, sorted by their place at the owner, neighbours merged.

    Attributes:
        source: first byte in the owner's slot.
        target: first byte in the reader's slot.
        nbytes: length.
    """

    source: Offsets
    target: Offsets
    nbytes: Offsets

    def __len__(self) -> int:
        return len(self.source)


@dataclass(frozen=True)
class GroupPlan:
    """One group of one inference rank.

    Attributes:
        positions: of its regions in the plan, in the order in which they lie in the slot.
        places: of these regions in the slot.
        nbytes: of the slot.
        owners: what is read from whom.
        layouts: by owner, first byte and length of each tensor in its slot, in order; without
            empty ones.
    """

    positions: tuple[int, ...]
    places: tuple[Place, ...]
    nbytes: int
    owners: dict[int, Runs]
    layouts: dict[int, tuple[Offsets, Offsets]]


def rebased(offsets: Offsets, nbytes: Offsets, base: int, device: int) -> NDArray[np.uint64]:
    """Descriptors, N by 3: address, bytes, device."""
    found = np.empty((len(offsets), 3), dtype=np.uint64)
    np.add(offsets, np.uint64(base), out=found[:, 0])
    found[:, 1] = nbytes
    found[:, 2] = device
    return found


def plan_groups(table: TensorTable, regions: Sequence[Region]) -> dict[int, GroupPlan]:
    """What to read, by group.  The slot is laid out as core lays it out: region by region."""
    cuts = Cuts(table)
    by_group: dict[int, dict[int, list[int]]] = {}
    for position, region in enumerate(regions):
        in_group = by_group.setdefault(cuts.group_of(region), {})
        in_group.setdefault(region.tensor, []).append(position)
    plans = {}
    for group, by_tensor in sorted(by_group.items()):
        members = table.groups[group]
        positions = [p for i in members.tensors for p in by_tensor.get(i, ())]
        places, nbytes = lay_out(
            [(table.tensors[regions[p].tensor].torch_dtype, regions[p].sizes) for p in positions]
        )
        owners = {
            shard.owner
            for i in members.tensors
            if i in by_tensor
            for shard in table.tensors[i].shards
        }
        placed: dict[int, list[tuple[Region, Place]]] = {}
        for position, place in zip(positions, places, strict=True):
            placed.setdefault(regions[position].tensor, []).append((regions[position], place))
        runs, layouts = {}, {}
        for owner in sorted(owners):
            layout = slot_layout(table, group, owner)
            found = _runs_of(layout, placed)
            if found is not None:
                runs[owner], layouts[owner] = found, extents(layout)
        plans[group] = GroupPlan(tuple(positions), tuple(places), nbytes, runs, layouts)
    return plans


def extents(layout: SlotLayout) -> tuple[Offsets, Offsets]:
    """First byte and length of each tensor that isn't empty, in the slot's order."""
    found = [(place.begin, place.nbytes) for place in layout.places.values() if place.nbytes]
    both = np.array(found, dtype=np.uint64).reshape(-1, 2)
    return both[:, 0].copy(), both[:, 1].copy()


def _pieces(layout: SlotLayout) -> Iterator[tuple[int, Shard, Place]]:
    """Everything that an owner serves of a group: tensor, box, where it lies row by row."""
    for tensor, place in layout.places.items():
        shard = layout.shards[tensor]
        if not place.borders:
            yield tensor, shard, place
            continue
        for tile in place.tiles():
            nbytes = math.prod(tile.shape) * place.dtype.itemsize
            begin = (*shard.offsets[:-1], shard.offsets[-1] + tile.column)
            block = Place(tile.begin, nbytes, place.dtype, tile.shape)
            yield tensor, Shard(shard.owner, begin, tile.shape), block


def _runs_of(layout: SlotLayout, placed: dict[int, list[tuple[Region, Place]]]) -> Runs | None:
    whole: list[tuple[int, int, int]] = []  # of shards that are read as they lie
    cut: list[NDArray[np.int64]] = []  # N by 5: source, target, bytes, begins, ends a place
    for tensor, shard, place in _pieces(layout):
        for region, target in placed.get(tensor, ()):
            if region.offsets == shard.offsets and region.sizes == shard.sizes:
                if place.nbytes:
                    whole.append((place.begin, target.begin, place.nbytes))
                continue
            found = _cut(shard, place, region, target)
            if found is not None:
                cut.append(found)
    parts = list(cut)
    if whole:
        block = np.ones((len(whole), 5), dtype=np.int64)
        block[:, :3] = whole
        parts.append(block)
    if not parts:
        return None
    return _merged(np.concatenate(parts))


def _cut(shard: Shard, place: Place, region: Region, target: Place) -> NDArray[np.int64] | None:
    """The runs of what a shard and a region have in common."""
    item = place.dtype.itemsize
    begins = [max(a, b) for a, b in zip(shard.offsets, region.offsets, strict=True)]
    extents = [
        min(a + m, b + n) - begin
        for a, m, b, n, begin in zip(
            shard.offsets, shard.sizes, region.offsets, region.sizes, begins, strict=True
        )
    ]
    if any(extent <= 0 for extent in extents):
        return None
    # From the last dimension on, whatever is whole on both sides lies in one piece.
    inner = len(extents)
    run = item
    while inner > 0:
        inner -= 1
        run *= extents[inner]
        if not extents[inner] == shard.sizes[inner] == region.sizes[inner]:
            break
    sources = np.array([place.begin], dtype=np.int64)
    targets = np.array([target.begin], dtype=np.int64)
    for dim, (begin, extent) in enumerate(zip(begins, extents, strict=True)):
        steps = np.arange(extent if dim < inner else 1, dtype=np.int64)
        stride = item * math.prod(shard.sizes[dim + 1 :])
        sources = np.add.outer(sources, (steps + begin - shard.offsets[dim]) * stride).ravel()
        stride = item * math.prod(region.sizes[dim + 1 :])
        targets = np.add.outer(targets, (steps + begin - region.offsets[dim]) * stride).ravel()
    found = np.empty((len(sources), 5), dtype=np.int64)
    found[:, 0] = sources
    found[:, 1] = targets
    found[:, 2] = run
    found[:, 3] = targets == target.begin
    found[:, 4] = targets + run == target.begin + target.nbytes
    return found


def _merged(pieces: NDArray[np.int64]) -> Runs:
    """Sorted by source, neighbours joined: also over the padding that both slots have."""
    pieces = pieces[np.lexsort((pieces[:, 1], pieces[:, 0]))]
    source, target, nbytes = pieces[:, 0], pieces[:, 1], pieces[:, 2]
    gap = source[1:] - (source[:-1] + nbytes[:-1])
    same = gap == target[1:] - (target[:-1] + nbytes[:-1])
    # Between the end of a region and the begin of the next one lies nothing of anybody's.
    padding = (gap > 0) & (gap < _PADDING) & (pieces[:-1, 4] == 1) & (pieces[1:, 3] == 1)
    joins = same & ((gap == 0) | padding)
    first = np.flatnonzero(np.concatenate(([True], ~joins)))
    last = np.concatenate((first[1:] - 1, [len(pieces) - 1]))
    length = source[last] + nbytes[last] - source[first]
    return Runs(
        source[first].astype(np.uint64),
        target[first].astype(np.uint64),
        length.astype(np.uint64),
    )
