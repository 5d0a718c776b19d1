"""Which elements of one tensor were touched, exactly and without a mask per element."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Box", "Cover", "Extent", "as_box"]


class Extent(NamedTuple):
    """A strided view of a storage, in elements."""

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Extent:
        return cls(int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())


class Box(NamedTuple):
    """A half-open box in a tensor's index space."""

    start: tuple[int, ...]
    stop: tuple[int, ...]


@dataclass
class Cover:
    """The set of elements touched through views of one tensor.

    Loaders narrow, chunk and unbind, so views are boxes of the tensor's own
    dimensions; they are compared on a grid of their boundaries.  A view that is
    no box (a reshape that splits a dimension) falls back to a mask.

    Attributes:
        whole: the tensor itself.
    """

    whole: Extent
    _boxes: set[Box] = field(default_factory=set)
    _strays: set[Extent] = field(default_factory=set)

    @classmethod
    def full(cls, whole: Extent) -> Cover:
        """A cover of every element."""
        cover = cls(whole)
        cover.add(whole)
        return cover

    def add(self, extent: Extent) -> None:
        """Touch the elements of a view of the tensor's storage."""
        if 0 in extent.sizes:
            return
        box = as_box(self.whole, extent)
        if box is None:
            self._strays.add(extent)
        else:
            self._boxes.add(box)

    def __bool__(self) -> bool:
        return bool(self._boxes or self._strays)

    def lacks(self, other: Cover) -> bool:
        """True when ``other`` touched an element that this cover didn't."""
        if other._boxes <= self._boxes and other._strays <= self._strays:
            return False
        if self._strays or other._strays:
            return bool((other._mask() & ~self._mask()).any())
        grids = _grids([*self._boxes, *other._boxes], len(self.whole.sizes))
        return bool((_mark(other._boxes, grids) & ~_mark(self._boxes, grids)).any())

    @property
    def complete(self) -> bool:
        """True when every element was touched."""
        return not self.lacks(Cover.full(self.whole))

    def _mask(self) -> Tensor:
        sizes, strides = self.whole.sizes, self.whole.strides
        reach = sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
        mask = torch.zeros(self.whole.offset + reach + 1, dtype=torch.bool)
        for stray in self._strays:
            mask.as_strided(stray.sizes, stray.strides, stray.offset).fill_(True)
        own = mask.as_strided(sizes, strides, self.whole.offset)
        for box in self._boxes:
            own[_slices(box)] = True
        return mask


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


def as_box(whole: Extent, extent: Extent) -> Box | None:
    rank = len(whole.sizes)
    start = [0] * rank
    length = [1] * rank
    rest = extent.offset - whole.offset
    if rest < 0:
        return None
    # Outermost dimension first; dimensions of one element can't be told apart
    # by their strides and need no telling.
    real = [d for d in range(rank) if whole.sizes[d] > 1]
    for dim in sorted(real, key=lambda d: -whole.strides[d]):
        stride = whole.strides[dim]
        if stride == 0:
            return None
        start[dim], rest = divmod(rest, stride)
    if rest:
        return None
    by_stride = {whole.strides[d]: d for d in real}
    for size, stride in zip(extent.sizes, extent.strides, strict=True):
        if size == 1:
            continue
        found = by_stride.pop(stride, None)
        if found is None:
            return None
        length[found] = size
    stop = [a + n for a, n in zip(start, length, strict=True)]
    if any(b > n for b, n in zip(stop, whole.sizes, strict=True)):
        return None
    return Box(tuple(start), tuple(stop))


def _grids(boxes: Sequence[Box], rank: int) -> list[list[int]]:
    return [sorted({edge for b in boxes for edge in (b.start[d], b.stop[d])}) for d in range(rank)]


def _mark(boxes: set[Box], grids: list[list[int]]) -> Tensor:
    places = [{edge: i for i, edge in enumerate(grid)} for grid in grids]
    mask = torch.zeros([max(len(grid) - 1, 0) for grid in grids], dtype=torch.bool)
    for box in boxes:
        cells = tuple(
            slice(place[a], place[b])
            for place, a, b in zip(places, box.start, box.stop, strict=True)
        )
        mask[cells] = True
    return mask
