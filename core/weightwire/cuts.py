"""Which transfer group each element of a tensor travels in.

A tensor is in one group, unless it is larger than the budget of a group: then it
is cut into parts, and each region of it that is read lies in one of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from weightwire.blocks import borders_within
from weightwire.errors import TableMismatch
from weightwire.table import Part, Region, TensorTable

__all__ = ["Cuts"]


class Cuts:
    """The parts of a table's tensors, looked up by tensor.

    Args:
        table: validated.
    """

    def __init__(self, table: TensorTable) -> None:
        self._table = table
        self._groups: dict[int, int] = {}
        self._parts: dict[int, list[tuple[int, Part]]] = {}
        for group, members in enumerate(table.groups):
            for tensor in members.tensors:
                self._groups.setdefault(tensor, group)
                if tensor in members.parts:
                    self._parts.setdefault(tensor, []).append((group, members.parts[tensor]))
        for found in self._parts.values():
            found.sort(key=lambda pair: pair[1].offsets)
        # Most regions of a tensor that is cut are just its parts: found without a search.
        self._exact = {
            (tensor, part.offsets, part.sizes): group
            for tensor, found in self._parts.items()
            for group, part in found
        }

    def is_cut(self, tensor: int) -> bool:
        """Whether a tensor travels in more than one group."""
        return tensor in self._parts

    def parts(self, tensor: int) -> Sequence[tuple[int, Part]]:
        """A tensor's groups and its box in each, in the order of its elements."""
        if tensor in self._parts:
            return self._parts[tensor]
        group = self._groups[tensor]
        return [(group, self._table.part(group, tensor))]

    def cut(self, region: Region) -> list[tuple[int, Region]]:
        """A region's pieces in the order of the tensor's elements, each with its group."""
        if region.tensor not in self._parts:
            return [(self._groups[region.tensor], region)]
        if 0 in region.sizes:
            return [(self._parts[region.tensor][0][0], region)]
        pieces = []
        for group, part in self._parts[region.tensor]:
            common = part.meet(region.offsets, region.sizes)
            if common is not None:
                pieces.append((group, Region(region.tensor, common.offsets, common.sizes)))
        return pieces

    def cut_blocks(self, region: Region) -> list[Region]:
        """A region's pieces by blocks of columns; the region itself where there are none."""
        entry = self._table.tensors[region.tensor]
        if entry.blocks == 1 or 0 in region.sizes:
            return [region]
        begin, size = region.offsets[-1], region.sizes[-1]
        edges = [begin, *borders_within(entry, begin, size), begin + size]
        return [
            Region(region.tensor, (*region.offsets[:-1], a), (*region.sizes[:-1], b - a))
            for a, b in itertools.pairwise(edges)
        ]

    def group_of(self, region: Region) -> int:
        """The group in which a region travels.

        Raises:
            TableMismatch: it travels in more than one.
        """
        exact = self._exact.get((region.tensor, region.offsets, region.sizes))
        if exact is not None:
            return exact
        pieces = self.cut(region)
        if len(pieces) != 1:
            raise TableMismatch(
                f"a region of tensor {self._table.tensors[region.tensor].name!r} lies in "
                f"{len(pieces)} transfer groups: plan the pieces that Cuts.cut() gives"
            )
        return pieces[0][0]
