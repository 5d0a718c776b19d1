"""From strided extents of sources to the regions that are read for them.

An extent that is a box of its tensor is read as that box.  One that isn't (a
reshape that splits a dimension, a step) is cut out of the smallest block of
whole rows that holds it.  A box of many short runs costs more than its bytes:
where the block around it is cheaper, that is read instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from weightwire.trace.cover import Box, Extent, as_box

__all__ = [
    "RUN_COST",
    "contiguous",
    "cover_boxes",
    "enclosing_block",
    "place",
    "read_box",
]

RUN_COST = 512
"""Bytes that could be read in the time that one more contiguous run costs."""


def contiguous(shape: Sequence[int]) -> Extent:
    """A contiguous tensor of this shape."""
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * max(shape[i + 1], 1)
    return Extent(0, tuple(shape), tuple(strides))


def read_box(shape: Sequence[int], extent: Extent, itemsize: int) -> Box:
    """The box of a contiguous tensor to read for one extent of it."""
    whole = contiguous(shape)
    block = _block(whole, extent)
    box = as_box(whole, extent)
    if box is None:
        return block
    return box if _cost(box, shape, itemsize) <= _cost(block, shape, itemsize) else block


def place(shape: Sequence[int], box: Box, extent: Extent) -> Extent:
    """The extent's elements in a contiguous buffer that holds only ``box``.

    The box holds the extent: it is its own box, a block around it, or a union
    of boxes.
    """
    whole = contiguous(shape)
    inner = contiguous([b - a for a, b in zip(box.start, box.stop, strict=True)])
    if math.prod(inner.sizes) == math.prod(whole.sizes):
        return extent
    own = as_box(whole, extent)
    if own is None:
        # Only within a block: one contiguous range, so strides stay what they are.
        begin = sum(a * s for a, s in zip(box.start, whole.strides, strict=True))
        return Extent(extent.offset - begin, extent.sizes, extent.strides)
    offset = sum((a - b) * s for a, b, s in zip(own.start, box.start, inner.strides, strict=True))
    by_stride = {
        whole.strides[d]: inner.strides[d] for d in range(len(shape)) if whole.sizes[d] > 1
    }
    strides = tuple(
        stride if size == 1 else by_stride[stride]
        for size, stride in zip(extent.sizes, extent.strides, strict=True)
    )
    return Extent(offset, extent.sizes, strides)


def cover_boxes(
    shape: Sequence[int], boxes: Iterable[Box], strays: Iterable[Box], within: Box | None = None
) -> list[Box]:
    """Disjoint boxes that together hold all of ``boxes``: no element is read twice.

    Args:
        boxes: any boxes of a tensor of this shape.
        within: a box of the tensor that is one contiguous range and holds them all; by
            default the tensor.
        strays: blocks that hold extents which are no boxes: what covers one of
            them must be one contiguous range.
    """
    blocks = set(strays)
    found = _merged(sorted(set(boxes) | blocks))
    for block in blocks:
        holder = next(box for box in found if _holds(box, block))
        if not _is_block(shape, holder):
            return [within or Box((0,) * len(shape), tuple(shape))]
    return found


def _merged(boxes: list[Box]) -> list[Box]:
    if len(boxes) < 2:
        return boxes
    around = _union(boxes)
    if sum(map(_volume, boxes)) >= _volume(around):
        return [around]  # they fill it, or overlap so much that it costs no more
    for dim in range(len(around.start)):
        boxes = _joined(boxes, dim)
    return _without_overlap(boxes)


def _joined(boxes: list[Box], dim: int) -> list[Box]:
    """Merge neighbours along one dimension."""

    def others(box: Box) -> tuple[tuple[int, int], ...]:
        spans = list(zip(box.start, box.stop, strict=True))
        return tuple(spans[:dim] + spans[dim + 1 :])

    result: list[Box] = []
    for box in sorted(boxes, key=lambda box: (others(box), box.start[dim])):
        if result and others(result[-1]) == others(box) and result[-1].stop[dim] >= box.start[dim]:
            result[-1] = _union([result[-1], box])
        else:
            result.append(box)
    return result


def _without_overlap(boxes: list[Box]) -> list[Box]:
    result: list[Box] = []
    for box in sorted(boxes):
        while (clash := next((r for r in result if _meet(r, box)), None)) is not None:
            result.remove(clash)
            box = _union([clash, box])
        result.append(box)
    return result


def _union(boxes: Sequence[Box]) -> Box:
    return Box(
        tuple(map(min, zip(*(box.start for box in boxes), strict=True))),
        tuple(map(max, zip(*(box.stop for box in boxes), strict=True))),
    )


def _meet(a: Box, b: Box) -> bool:
    return all(
        max(a0, b0) < min(a1, b1)
        for a0, a1, b0, b1 in zip(a.start, a.stop, b.start, b.stop, strict=True)
    )


def _holds(outer: Box, inner: Box) -> bool:
    return all(
        a0 <= b0 and b1 <= a1
        for a0, a1, b0, b1 in zip(outer.start, outer.stop, inner.start, inner.stop, strict=True)
    )


def _volume(box: Box) -> int:
    return math.prod(b - a for a, b in zip(box.start, box.stop, strict=True))


def enclosing_block(shape: Sequence[int], extent: Extent) -> Box:
    """The smallest contiguous range of whole rows that holds an extent of a contiguous tensor."""
    return _block(contiguous(shape), extent)


def _block(whole: Extent, extent: Extent) -> Box:
    """The smallest contiguous range of whole rows that holds an extent."""
    reach = sum((n - 1) * s for n, s in zip(extent.sizes, extent.strides, strict=True))
    first = _index(whole, extent.offset)
    last = _index(whole, extent.offset + reach)
    start, stop = [0] * len(first), list(whole.sizes)
    for dim, (a, b) in enumerate(zip(first, last, strict=True)):
        start[dim], stop[dim] = a, b + 1
        if a != b:
            break
    return Box(tuple(start), tuple(stop))


def _index(whole: Extent, flat: int) -> list[int]:
    index = []
    for stride in whole.strides:
        at, flat = divmod(flat, stride)
        index.append(at)
    return index


def _is_block(shape: Sequence[int], box: Box) -> bool:
    """Whether a box is one contiguous range of a contiguous tensor."""
    return _runs(box, shape) <= 1


def _runs(box: Box, shape: Sequence[int]) -> int:
    """Contiguous ranges that a box of a contiguous tensor falls into."""
    sizes = [b - a for a, b in zip(box.start, box.stop, strict=True)]
    dim = len(shape)
    while dim > 0 and sizes[dim - 1] == shape[dim - 1]:
        dim -= 1
    return math.prod(sizes[: max(dim - 1, 0)])


def _cost(box: Box, shape: Sequence[int], itemsize: int) -> int:
    return _volume(box) * itemsize + _runs(box, shape) * RUN_COST
