"""Where tensors lie in a slot: a pure function of the table, the same on both sides.

A tensor lies row by row, or where the table says so in *blocks of columns*, one after
another, each of them row by row.  An engine's rank that needs a slice of columns (a
row-parallel layer's weight) then finds it in a few contiguous runs instead of one a
row; one that needs a slice of rows finds it in one run a block.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weightwire.blocks import borders_within
from weightwire.cuts import Cuts
from weightwire.errors import UnsupportedOperation
from weightwire.table import Part, Region, Shard, TensorTable

__all__ = [
    "ALIGNMENT",
    "Owners",
    "Place",
    "ReadCount",
    "Runs",
    "SlotLayout",
    "Tile",
    "count_reads",
    "cut_out",
    "intersection",
    "lay_out",
    "owners_of",
    "places_in",
    "runs",
    "slot_layout",
    "views",
]

ALIGNMENT = 64
"""Bytes to which each tensor's begin is aligned."""

Offsets = NDArray[np.int64]


class Box(Protocol):
    """What has a first index and an extent in each dimension: shards, parts, regions."""

    @property
    def offsets(self) -> tuple[int, ...]: ...

    @property
    def sizes(self) -> tuple[int, ...]: ...


def intersection(a: Box, b: Box) -> Part | None:
    """The elements that two boxes of one tensor have in common, or None.

    Raises:
        ValueError: they haven't equally many dimensions: check a box that came from outside.
    """
    return Part(a.offsets, a.sizes).meet(b.offsets, b.sizes)


class Tile(NamedTuple):
    """A block of columns of a place, contiguous in the slot.

    Attributes:
        begin: first byte in the slot.
        column: first column in the place's tensor.
        shape: of the tensor that has only these columns.
    """

    begin: int
    column: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Place:
    """One tensor's (or shard's) bytes in a slot.

    Attributes:
        begin: first byte.
        nbytes: length in bytes.
        shape: of the shard.
        borders: columns at which one block of columns ends and the next begins; empty
            where it lies row by row.
    """

    begin: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    borders: tuple[int, ...] = ()

    @functools.cached_property
    def strides(self) -> tuple[int, ...]:
        """In elements, where it lies row by row."""
        return tuple(_strides(self.shape, 1))

    def view(self, slot: Tensor) -> Tensor:
        """The tensor in ``slot``, a contiguous uint8 tensor.

        Raises:
            UnsupportedOperation: it lies in blocks of columns: use ``tiles``.
        """
        if self.borders:
            raise UnsupportedOperation(
                f"a tensor of shape {self.shape} lies in {len(self.borders) + 1} blocks of "
                "columns: take its tiles, or weightwire.layout.views"
            )
        return self.flat(slot).view(self.shape)

    def flat(self, slot: Tensor) -> Tensor:
        """Its elements as they lie in ``slot``: one dimension, of its dtype."""
        return slot[self.begin : self.begin + self.nbytes].view(self.dtype)

    def tiles(self, first: int = 0, last: int | None = None) -> list[Tile]:
        """Its blocks of columns in the order in which they lie; one where it lies row by row.

        Args:
            first, last: columns (from the place's first, the last one included) of which
                the blocks are wanted; by default all.
        """
        if not self.borders:
            return [Tile(self.begin, 0, self.shape)]
        rows = math.prod(self.shape[:-1]) * self.dtype.itemsize
        begin = bisect.bisect_right(self.borders, first)
        end = len(self.borders) if last is None else bisect.bisect_right(self.borders, last)
        edges = (0, *self.borders, self.shape[-1])[begin : end + 2]
        return [
            Tile(self.begin + rows * a, a, (*self.shape[:-1], b - a))
            for a, b in itertools.pairwise(edges)
        ]

    @property
    def folded(self) -> tuple[int, ...] | None:
        """Its shape with the columns as (block, column), where all blocks are equally wide."""
        edges = (0, *self.borders, self.shape[-1]) if self.borders else (0,)
        widths = {b - a for a, b in itertools.pairwise(edges)}
        if len(widths) != 1:
            return None
        return (*self.shape[:-1], len(edges) - 1, widths.pop())

    def tile_views(self, slot: Tensor) -> list[tuple[int, Tensor]]:
        """The tiles in ``slot``, each with its first column."""
        item = self.dtype.itemsize
        return [
            (
                tile.column,
                slot[tile.begin : tile.begin + math.prod(tile.shape) * item]
                .view(self.dtype)
                .view(tile.shape),
            )
            for tile in self.tiles()
        ]


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
    """The view of a box of a tensor whose first element has the global index ``origin``.

    Raises:
        ValueError: the box and ``origin`` haven't equally many dimensions: check a box that
            came from outside.
    """
    if tuple(tensor.shape) == tuple(sizes):
        return tensor
    return tensor[
        tuple(
            slice(at - begin, at - begin + size)
            for at, size, begin in zip(offsets, sizes, origin, strict=True)
        )
    ]


def places_in(slot: Tensor, places: Sequence[Place]) -> list[Tensor]:
    """``place.view(slot)`` of each, by one operation.

    Args:
        places: none in blocks of columns.
    """
    found = []
    typed: dict[torch.dtype, tuple[Tensor, int]] = {}
    room = slot.numel()
    for place in places:
        if place.begin + place.nbytes > room:
            raise UnsupportedOperation(
                f"a slot of {room} bytes is too small for a tensor that ends at byte "
                f"{place.begin + place.nbytes}: a transport gives what it is asked for"
            )
        if place.dtype not in typed:
            size = place.dtype.itemsize
            whole = slot[: room // size * size].view(place.dtype)
            typed[place.dtype] = whole, int(whole.storage_offset())
        whole, first = typed[place.dtype]
        at = first + place.begin // place.dtype.itemsize
        found.append(whole.as_strided(place.shape, place.strides, at))
    return found


def lay_out(parts: Iterable[tuple[torch.dtype, tuple[int, ...]]]) -> tuple[list[Place], int]:
    """Places one after another, each aligned; and the bytes of all."""
    return _lay_out((dtype, shape, ()) for dtype, shape in parts)


def _lay_out(
    parts: Iterable[tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]],
) -> tuple[list[Place], int]:
    places, at = [], 0
    for dtype, shape, borders in parts:
        nbytes = math.prod(shape) * dtype.itemsize
        places.append(Place(at, nbytes, dtype, shape, borders))
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
            here = intersection(part, mine[0])
            mine = [Shard(owner, here.offsets, here.sizes)] if here is not None else []
        if mine:
            shards[i] = mine[0]
    places, nbytes = _lay_out(
        (table.tensors[i].torch_dtype, shard.sizes, _borders(table, i, shard))
        for i, shard in shards.items()
    )
    return SlotLayout(dict(zip(shards, places, strict=True)), shards, nbytes)


def _borders(table: TensorTable, tensor: int, shard: Shard) -> tuple[int, ...]:
    """Where the tensor's blocks of columns end within a shard."""
    entry = table.tensors[tensor]
    if entry.blocks == 1 or not math.prod(shard.sizes):
        return ()
    begin, size = shard.offsets[-1], shard.sizes[-1]
    return tuple(border - begin for border in borders_within(entry, begin, size))


def views(
    layout: SlotLayout, tensor: int, slot: Tensor, region: Box, memory: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """What to copy for a region out of an owner's slot: pairs of equally shaped views.

    Args:
        slot: the owner's slot, contiguous, uint8.
        memory: the region's own, of its shape and of the wire dtype; of any strides.

    Returns:
        Where to, in ``memory``, and where from, in ``slot``.
    """
    place, shard = layout.places.get(tensor), layout.shards.get(tensor)
    if place is None or shard is None:
        return
    for column, tile in place.tile_views(slot):
        box = _tile_box(shard, column, tuple(tile.shape))
        common = intersection(box, region)
        if common is not None:
            yield (
                cut_out(memory, common.offsets, common.sizes, region.offsets),
                cut_out(tile, common.offsets, common.sizes, box.offsets),
            )


def _columns(shard: Shard, region: Box) -> tuple[int, int]:
    """The first and last column of a region, counted from a shard's first."""
    if not shard.sizes:
        return 0, 0
    first = region.offsets[-1] - shard.offsets[-1]
    return max(first, 0), first + region.sizes[-1] - 1


def _tile_box(shard: Shard, column: int, shape: tuple[int, ...]) -> Part:
    if not shape:
        return Part((), ())
    return Part((*shard.offsets[:-1], shard.offsets[-1] + column), shape)


class Runs(NamedTuple):
    """Contiguous runs of bytes, sorted by ``source``; neighbours are merged.

    Attributes:
        source: first byte of each run in the owner's slot, int64.
        destination: first byte in the region's own memory (contiguous, of its shape), int64.
        nbytes: length of each run, int64.
    """

    source: Offsets
    destination: Offsets
    nbytes: Offsets


def runs(layout: SlotLayout, tensor: int, region: Box) -> Runs:
    """The runs of an owner's slot that hold what it has of a region.

    Vectorised: no loop over runs.  Empty where it has nothing of it.
    """
    place, shard = layout.places.get(tensor), layout.shards.get(tensor)
    found: list[Runs] = []
    if place is not None and shard is not None:
        first, last = _columns(shard, region)
        for tile in place.tiles(first, last):
            box = _tile_box(shard, tile.column, tile.shape)
            common = intersection(box, region)
            if common is not None:
                found.append(_box_runs(tile.begin, box, common, region, place.dtype.itemsize))
    if len(found) == 1:
        return found[0]
    if not found:
        nothing = np.zeros(0, np.int64)
        return Runs(nothing, nothing, nothing)
    source, destination, nbytes = (np.concatenate(parts) for parts in zip(*found, strict=True))
    joins = (source[1:] == source[:-1] + nbytes[:-1]) & (
        destination[1:] == destination[:-1] + nbytes[:-1]
    )
    begins = np.flatnonzero(np.concatenate(([True], ~joins)))
    return Runs(source[begins], destination[begins], np.add.reduceat(nbytes, begins))


def _box_runs(begin: int, tile: Part, common: Part, region: Box, itemsize: int) -> Runs:
    """The runs of a box that lies in one tile: both row by row, the tile's and the region's."""
    run, dim = itemsize, len(common.sizes)
    while dim > 0:
        dim -= 1
        run *= common.sizes[dim]
        if not common.sizes[dim] == tile.sizes[dim] == region.sizes[dim]:
            break
    source: Offsets = np.full(1, begin, np.int64)
    destination: Offsets = np.zeros(1, np.int64)
    strides = zip(_strides(tile.sizes, itemsize), _strides(region.sizes, itemsize), strict=True)
    for d, (of_tile, of_region) in enumerate(strides):
        index = np.arange(common.sizes[d] if d < dim else 1, dtype=np.int64)
        source = np.add.outer(source, (index + common.offsets[d] - tile.offsets[d]) * of_tile)
        destination = np.add.outer(
            destination, (index + common.offsets[d] - region.offsets[d]) * of_region
        )
    source, destination = source.reshape(-1), destination.reshape(-1)
    return Runs(source, destination, np.full(source.shape, run, np.int64))


def _strides(sizes: Sequence[int], itemsize: int) -> list[int]:
    return [math.prod(sizes[d + 1 :]) * itemsize for d in range(len(sizes))]


class ReadCount(NamedTuple):
    """What reading a plan's regions out of the owners' slots costs.

    Attributes:
        nbytes: pulled.
        descriptors: contiguous runs.
    """

    nbytes: int
    descriptors: int


def owners_of(table: TensorTable, tensor: int) -> Owners:
    """The trainer ranks that serve a tensor, to be asked which of them hold a region."""
    shards = [shard for shard in table.tensors[tensor].shards if 0 not in shard.sizes]
    begins = np.array([shard.offsets for shard in shards], np.int64)
    sizes = np.array([shard.sizes for shard in shards], np.int64)
    return Owners(np.array([shard.owner for shard in shards], np.int64), begins, begins + sizes)


class Owners(NamedTuple):
    """Who serves which box of a tensor, as arrays; made by ``owners_of``."""

    ranks: Offsets
    begins: Offsets
    ends: Offsets

    def holding(self, region: Box) -> list[int]:
        """Those that hold an element of a region."""
        if not len(self.ranks) or 0 in region.sizes:
            return []
        begin = np.array(region.offsets, np.int64)
        end = begin + np.array(region.sizes, np.int64)
        meets = (np.maximum(self.begins, begin) < np.minimum(self.ends, end)).all(axis=1)
        return [int(rank) for rank in self.ranks[meets]]


def count_reads(table: TensorTable, regions: Iterable[Region]) -> dict[tuple[int, int], ReadCount]:
    """By (owner, group): bytes and descriptors of these regions, each in one group."""
    cuts = Cuts(table)
    owners: dict[int, Owners] = {}
    layouts: dict[tuple[int, int], SlotLayout] = {}
    counts: dict[tuple[int, int], ReadCount] = {}
    for region in regions:
        if region.tensor not in owners:
            owners[region.tensor] = owners_of(table, region.tensor)
        group = cuts.group_of(region)
        for owner in owners[region.tensor].holding(region):
            key = (owner, group)
            if key not in layouts:
                layouts[key] = slot_layout(table, group, owner)
            found = runs(layouts[key], region.tensor, region)
            nbytes, descriptors = counts.get(key, (0, 0))
            counts[key] = ReadCount(
                nbytes + int(found.nbytes.sum()), descriptors + len(found.nbytes)
            )
    return counts
