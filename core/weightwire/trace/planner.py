"""Which regions a rank reads for the sources of its replay, and where in them each source lies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from weightwire.table import Region, TensorTable
from weightwire.trace.cells import Cell, Cells
from weightwire.trace.cover import Box, Extent, as_box
from weightwire.trace.reads import contiguous, cover_boxes, enclosing_block, place, read_box
from weightwire.trace.tape import Instruction, Kind, Ref

__all__ = ["Joined", "Piece", "Read", "Reads", "plan_reads"]


class Joined(NamedTuple):
    """A box of a tensor that is put together from the regions of several cells."""

    tensor: int
    box: Box


class Piece(NamedTuple):
    """What a region has of a joined box: where in the region, and where in the box."""

    joined: Joined
    source: tuple[slice, ...]
    destination: tuple[slice, ...]


@dataclass(frozen=True)
class Read:
    """Where a source's extent lies: in a region's buffer or in a joined box.

    Attributes:
        group: in which the last of it arrives.
    """

    base: Region | Joined
    extent: Extent
    group: int


@dataclass
class Reads:
    """What a rank reads.

    Attributes:
        regions: in the table's order; disjoint.
        by_ref: where each source of the replay lies.
        pieces: by region, the joined boxes that need it.
    """

    regions: tuple[Region, ...] = ()
    by_ref: dict[Ref, Read] = field(default_factory=dict)
    pieces: dict[Region, list[Piece]] = field(default_factory=dict)


def plan_reads(
    instructions: Sequence[Instruction],
    table: TensorTable,
    carriers: Mapping[str, int],
    cells: Cells,
) -> Reads:
    """Plan what is read for every source that an instruction touches."""
    wanted: dict[int, dict[Ref, None]] = {}
    for instruction in instructions:
        for ref in instruction.operands():
            if ref.kind is Kind.SOURCE and 0 not in ref.extent.sizes:
                wanted.setdefault(carriers[str(ref.name)], {})[ref] = None
    reads = Reads()
    regions: list[Region] = []
    for tensor in sorted(wanted):
        regions.extend(_Planner(table, tensor, cells).plan(wanted[tensor], reads))
    reads.regions = tuple(regions)
    return reads


class _Planner:
    """Plans the reads of one tensor, cell by cell."""

    def __init__(self, table: TensorTable, tensor: int, cells: Cells) -> None:
        self._entry = table.tensors[tensor]
        self._tensor = tensor
        self._cells = cells
        self._itemsize = self._entry.torch_dtype.itemsize
        self._whole = Box((0,) * len(self._entry.shape), self._entry.shape)
        # By cell: boxes and strays, in the index space of a tensor with only its columns.
        self._boxes: dict[Cell, set[Box]] = {}
        self._strays: dict[Cell, set[Box]] = {}

    def plan(self, refs: Mapping[Ref, None], reads: Reads) -> list[Region]:
        within: dict[Ref, tuple[Cell, Box]] = {}
        joined: dict[Ref, Joined] = {}
        for ref in refs:
            cell = self._holder(ref)
            if cell is None:
                joined[ref] = Joined(self._tensor, self._joined_box(ref))
                for other in self._cells.of(self._tensor):
                    common = _common(other.box, joined[ref].box)
                    if common is not None:
                        self._want(other, self._moved(common, other, -1))
            else:
                within[ref] = (cell, self._read_box(cell, ref))
        found = {cell: self._cover(cell) for cell in self._cells.of(self._tensor)}
        for ref, (cell, box) in within.items():
            holder = next(outer for outer in found[cell] if _holds(outer, box))
            extent = ref.extent
            if ref.dtype == self._entry.torch_dtype:
                extent = place(
                    cell.shape(self._entry), holder, cell.narrowed(self._entry, ref.extent)
                )
            reads.by_ref[ref] = Read(self._region(cell, holder), extent, cell.group)
        for key in dict.fromkeys(joined.values()):
            self._join(key, found, reads)
        for ref, key in joined.items():
            group = max(cell.group for cell in found if _common(cell.box, key.box))
            extent = ref.extent
            if ref.dtype == self._entry.torch_dtype:
                extent = place(self._entry.shape, key.box, ref.extent)
            reads.by_ref[ref] = Read(key, extent, group)
        return [self._region(cell, box) for cell, boxes in found.items() for box in sorted(boxes)]

    def _holder(self, ref: Ref) -> Cell | None:
        cells = self._cells.of(self._tensor)
        if len(cells) == 1:
            return cells[0]
        if ref.dtype != self._entry.torch_dtype:
            return None  # its extents count other elements
        return self._cells.holder(self._tensor, ref.extent)

    def _read_box(self, cell: Cell, ref: Ref) -> Box:
        """The box to read for a source that lies in one cell."""
        if ref.dtype != self._entry.torch_dtype:
            self._want(cell, self._whole)
            return self._whole
        shape = cell.shape(self._entry)
        extent = cell.narrowed(self._entry, ref.extent)
        box = read_box(shape, extent, self._itemsize)
        self._want(cell, box)
        if as_box(contiguous(shape), extent) is None:
            self._strays.setdefault(cell, set()).add(box)
        return box

    def _joined_box(self, ref: Ref) -> Box:
        if ref.dtype != self._entry.torch_dtype:
            return self._whole
        shape = self._entry.shape
        return as_box(contiguous(shape), ref.extent) or enclosing_block(shape, ref.extent)

    def _want(self, cell: Cell, box: Box) -> None:
        self._boxes.setdefault(cell, set()).add(box)

    def _cover(self, cell: Cell) -> list[Box]:
        boxes = self._boxes.get(cell, ())
        strays = self._strays.get(cell, ())
        return cover_boxes(cell.shape(self._entry), boxes, strays, self._moved(cell.box, cell, -1))

    def _join(self, key: Joined, found: Mapping[Cell, Sequence[Box]], reads: Reads) -> None:
        for cell, boxes in found.items():
            for box in boxes:
                outer = self._moved(box, cell, 1)
                common = _common(outer, key.box)
                if common is not None:
                    piece = Piece(key, _slices(common, outer), _slices(common, key.box))
                    reads.pieces.setdefault(self._region(cell, box), []).append(piece)

    def _moved(self, box: Box, cell: Cell, sign: int) -> Box:
        """A box of the tensor as one of its cell's columns alone (-1), or back (1)."""
        if self._entry.blocks == 1:
            return box
        by = sign * cell.box.start[-1]
        return Box(
            (*box.start[:-1], box.start[-1] + by),
            (*box.stop[:-1], box.stop[-1] + by),
        )

    def _region(self, cell: Cell, box: Box) -> Region:
        moved = self._moved(box, cell, 1)
        sizes = tuple(b - a for a, b in zip(moved.start, moved.stop, strict=True))
        return Region(self._tensor, moved.start, sizes)


def _common(a: Box, b: Box) -> Box | None:
    start = tuple(map(max, a.start, b.start))
    stop = tuple(map(min, a.stop, b.stop))
    return Box(start, stop) if all(x < y for x, y in zip(start, stop, strict=True)) else None


def _holds(outer: Box, inner: Box) -> bool:
    return all(
        a0 <= b0 and b1 <= a1
        for a0, a1, b0, b1 in zip(outer.start, outer.stop, inner.start, inner.stop, strict=True)
    )


def _slices(box: Box, origin: Box) -> tuple[slice, ...]:
    return tuple(
        slice(a - o, b - o) for a, b, o in zip(box.start, box.stop, origin.start, strict=True)
    )
