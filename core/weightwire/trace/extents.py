"""Chains of operations on indices as strided extents of the tensors that they view."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch

from weightwire.trace.cover import Box, Extent, as_box
from weightwire.trace.reads import contiguous
from weightwire.views import Step, View

__all__ = ["box_of", "extent_of", "within"]


def extent_of(view: View, shapes: Mapping[str, Sequence[int]]) -> Extent | None:
    """A view as an extent of its one source, contiguous; None where it can't be one.

    Args:
        shapes: of the source tensors, by name.
    """
    if len(view.parts) != 1:
        return None
    extent: Extent | None = contiguous(shapes[view.parts[0].source])
    for step in (*view.parts[0].steps, *view.steps):
        if extent is None:
            return None
        extent = _stepped(extent, step)
    return extent


def box_of(view: View, shapes: Mapping[str, Sequence[int]]) -> Box | None:
    """The box of its one source whose elements, in order, are the view's; None if there is none."""
    extent = extent_of(view, shapes)
    if extent is None:
        return None
    strides = [
        stride for size, stride in zip(extent.sizes, extent.strides, strict=True) if size > 1
    ]
    if any(a <= b for a, b in itertools.pairwise(strides)):
        return None  # permuted
    return as_box(contiguous(shapes[view.parts[0].source]), extent)


def within(shape: Sequence[int], view: Extent, inner: Extent) -> Extent | None:
    """An extent of a contiguous tensor of ``shape``, seen through the view that it stands for.

    Args:
        view: where the tensor's elements really are: an extent of that shape.
        inner: an extent of the tensor.

    Returns:
        The same elements as an extent of what ``view`` is one of; None where they
        can't be one (a reshape across dimensions that aren't neighbours there).
    """
    whole = contiguous(shape)
    if view.strides == whole.strides:
        return Extent(view.offset + inner.offset, inner.sizes, inner.strides)
    box = as_box(whole, inner)
    if box is None:
        return None
    offset = view.offset + sum(a * s for a, s in zip(box.start, view.strides, strict=True))
    outer = {whole.strides[d]: view.strides[d] for d in range(len(shape)) if shape[d] > 1}
    strides = tuple(
        stride if size == 1 else outer[stride]
        for size, stride in zip(inner.sizes, inner.strides, strict=True)
    )
    return Extent(offset, inner.sizes, strides)


def _stepped(extent: Extent, step: Step) -> Extent | None:
    offset, sizes, strides = extent
    args = step.args
    if step.op == "select":
        dim, index = args
        at = offset + index * strides[dim]
        return Extent(at, sizes[:dim] + sizes[dim + 1 :], strides[:dim] + strides[dim + 1 :])
    if step.op == "slice":
        dim, start, stop, by = args
        size = -(-(stop - start) // by)
        return Extent(
            offset + start * strides[dim],
            (*sizes[:dim], size, *sizes[dim + 1 :]),
            (*strides[:dim], strides[dim] * by, *strides[dim + 1 :]),
        )
    if step.op == "permute":
        return Extent(offset, tuple(sizes[d] for d in args), tuple(strides[d] for d in args))
    return _reshaped(extent, args)


def _reshaped(extent: Extent, shape: tuple[int, ...]) -> Extent | None:
    old = [(n, s) for n, s in zip(extent.sizes, extent.strides, strict=True) if n != 1]
    if [n for n in shape if n != 1] == [n for n, _ in old]:
        rest = iter(old)
        strides = tuple(1 if n == 1 else next(rest)[1] for n in shape)
        return Extent(extent.offset, shape, strides)
    viewed = torch.empty_strided(extent.sizes, extent.strides, device="meta")
    try:
        viewed = viewed.view(shape)
    except RuntimeError:
        return None  # it makes a copy
    return Extent(extent.offset, shape, viewed.stride())
