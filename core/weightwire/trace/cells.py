"""The cells of a tensor: boxes across which no read reaches.

A tensor that is larger than a transfer group is cut into parts, and one that lies
in slots in blocks of columns is cut at their borders; a cell is one part of one
block.  Copies out of such a tensor are cut likewise, so that each can run as soon
as its part has arrived and reads one range of it.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from weightwire.cuts import Cuts
from weightwire.table import TensorEntry, TensorTable
from weightwire.trace.cover import Box, Extent
from weightwire.trace.tape import Instruction, Kind, Ref

__all__ = ["Cell", "Cells", "cut_copies"]


class Cell(NamedTuple):
    """A box of a tensor.

    Attributes:
        group: transfer group in which it travels.
        box: in the tensor's index space.
    """

    group: int
    box: Box

    def shape(self, entry: TensorEntry) -> tuple[int, ...]:
        """Of the tensor that has only this cell's columns."""
        if entry.blocks == 1:
            return entry.shape
        return (*entry.shape[:-1], self.box.stop[-1] - self.box.start[-1])

    def narrowed(self, entry: TensorEntry, extent: Extent) -> Extent:
        """An extent within the cell, counted in the tensor that has only its columns."""
        if entry.blocks == 1:
            return extent
        columns, width = entry.shape[-1], self.shape(entry)[-1]
        row, column = divmod(extent.offset, columns)
        return Extent(
            row * width + column - self.box.start[-1],
            extent.sizes,
            tuple(
                stride // columns * width if size > 1 and stride % columns == 0 else stride
                for size, stride in zip(extent.sizes, extent.strides, strict=True)
            ),
        )


class Cells:
    """The cells of every tensor of a table."""

    def __init__(self, table: TensorTable) -> None:
        self._table = table
        self._cuts = Cuts(table)
        self._cells: dict[int, list[Cell]] = {}

    def of(self, tensor: int) -> Sequence[Cell]:
        """In the order of the parts, then of the columns."""
        if tensor not in self._cells:
            self._cells[tensor] = list(self._make(tensor))
        return self._cells[tensor]

    def last_group(self, tensor: int) -> int:
        """The group in which the last of a tensor arrives."""
        return max(group for group, _ in self._cuts.parts(tensor))

    def is_one(self, tensor: int) -> bool:
        """Whether nothing divides the tensor."""
        return self._table.tensors[tensor].blocks == 1 and not self._cuts.is_cut(tensor)

    def holder(self, tensor: int, extent: Extent) -> Cell | None:
        """The cell that wholly holds a non-empty extent, if there is one."""
        cells = self.of(tensor)
        if len(cells) == 1:
            return cells[0]
        entry = self._table.tensors[tensor]
        borders = self._part_borders(tensor)
        if len(_windows(extent, extent.strides, extent.offset, borders)) > 1:
            return None
        part = bisect.bisect_right(borders, extent.offset) - 1
        if entry.blocks == 1:
            return cells[part]
        strides = _column_strides(entry, extent)
        column = extent.offset % entry.shape[-1]
        if strides is None or len(_windows(extent, strides, column, _column_borders(entry))) > 1:
            return None
        return cells[part * entry.blocks + column // (entry.shape[-1] // entry.blocks)]

    def windows(self, tensor: int, extent: Extent) -> list[_Window]:
        """Boxes of a view, each of which lies in one cell, if such can be found."""
        entry = self._table.tensors[tensor]
        found = _windows(extent, extent.strides, extent.offset, self._part_borders(tensor))
        if entry.blocks == 1:
            return found
        result = []
        for window in found:
            part = window.of(extent)
            strides = _column_strides(entry, part)
            if strides is None:
                result.append(window)
                continue
            column = part.offset % entry.shape[-1]
            result.extend(
                window.inner(inner)
                for inner in _windows(part, strides, column, _column_borders(entry))
            )
        return result

    def _make(self, tensor: int) -> Iterator[Cell]:
        entry = self._table.tensors[tensor]
        for group, part in self._cuts.parts(tensor):
            start = part.offsets
            stop = tuple(map(sum, zip(part.offsets, part.sizes, strict=True)))
            if entry.blocks == 1:
                yield Cell(group, Box(start, stop))
                continue
            width = entry.shape[-1] // entry.blocks
            for column in range(0, entry.shape[-1], width):
                yield Cell(group, Box((*start[:-1], column), (*stop[:-1], column + width)))

    def _part_borders(self, tensor: int) -> list[int]:
        borders = [0]
        for _, part in self._cuts.parts(tensor):
            borders.append(borders[-1] + math.prod(part.sizes))
        return borders


class _Window(NamedTuple):
    """A box of a view: first index and extent in each of its dimensions."""

    start: tuple[int, ...]
    sizes: tuple[int, ...]

    def of(self, extent: Extent) -> Extent:
        moved = sum(a * s for a, s in zip(self.start, extent.strides, strict=True))
        return Extent(extent.offset + moved, self.sizes, extent.strides)

    def inner(self, other: _Window) -> _Window:
        """A window of this window, as one of the view."""
        return _Window(
            tuple(a + b for a, b in zip(self.start, other.start, strict=True)), other.sizes
        )


def _windows(
    extent: Extent, strides: Sequence[int], offset: int, borders: Sequence[int]
) -> list[_Window]:
    """Cut a view where a coordinate of its elements, ``offset + index . strides``, passes a border.

    Each window lies between two neighbouring borders.
    """
    found: list[_Window] = []

    def cut(start: tuple[int, ...], sizes: tuple[int, ...], begin: int) -> None:
        reach = sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
        end = borders[bisect.bisect_right(borders, begin)]
        if begin + reach < end:
            found.append(_Window(start, sizes))
            return
        dim = max((d for d, n in enumerate(sizes) if n > 1), key=lambda d: strides[d])
        stride = strides[dim]
        inner = reach - (sizes[dim] - 1) * stride
        at = 0
        while at < sizes[dim]:
            first = begin + at * stride
            end = borders[bisect.bisect_right(borders, first)]
            fit = max(0, (end - 1 - inner - first) // stride + 1) if first + inner < end else 0
            count = min(fit, sizes[dim] - at) or 1
            cut(
                (*start[:dim], start[dim] + at, *start[dim + 1 :]),
                (*sizes[:dim], count, *sizes[dim + 1 :]),
                first,
            )
            at += count

    cut((0,) * len(extent.sizes), extent.sizes, offset)
    return found


def _column_strides(entry: TensorEntry, extent: Extent) -> list[int] | None:
    """How the column changes with each index of a view; None if that isn't linear."""
    columns = entry.shape[-1]
    strides = [
        0 if size == 1 or stride % columns == 0 else stride
        for size, stride in zip(extent.sizes, extent.strides, strict=True)
    ]
    if columns == 1:
        return strides
    reach = sum((n - 1) * s for n, s in zip(extent.sizes, strides, strict=True))
    return strides if extent.offset % columns + reach < columns else None


def _column_borders(entry: TensorEntry) -> list[int]:
    width = entry.shape[-1] // entry.blocks
    return list(range(0, entry.shape[-1] + 1, width))


def cut_copies(
    instructions: Sequence[Instruction], carriers: dict[str, int], table: TensorTable, cells: Cells
) -> list[Instruction]:
    """Instructions with the copies out of divided tensors cut at the borders of cells."""
    result: list[Instruction] = []
    for instruction in instructions:
        result.extend(_cut(instruction, carriers, table, cells))
    return result


def _cut(
    instruction: Instruction, carriers: dict[str, int], table: TensorTable, cells: Cells
) -> list[Instruction]:
    if not instruction.is_copy:
        return [instruction]
    into, source = instruction.args
    tensor = carriers.get(str(source.name)) if source.kind is Kind.SOURCE else None
    if (
        tensor is None
        or cells.is_one(tensor)
        or source.dtype != table.tensors[tensor].torch_dtype
        or 0 in source.extent.sizes
        or into.extent.sizes != source.extent.sizes
    ):
        return [instruction]
    windows = cells.windows(tensor, source.extent)
    if len(windows) == 1:
        return [instruction]
    pieces = []
    for window in windows:
        to: Ref = into._replace(extent=window.of(into.extent))
        part: Ref = source._replace(extent=window.of(source.extent))
        pieces.append(replace(instruction, args=(to, part), reads=(part,), writes=(to,)))
    return pieces
