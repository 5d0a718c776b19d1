"""Which tensors share memory, element for element."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

__all__ = ["overlapping_pairs"]


def overlapping_pairs(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, str]]:
    """Pairs of names whose tensors have an element's byte in common.

    Linear where address ranges are apart, as they nearly always are.  Views that
    interleave (the columns of one matrix) have ranges that overlap and no byte in
    common: those few are compared element by element.
    """
    spans = sorted(
        (tensor.data_ptr(), _end(tensor), str(tensor.device), name, tensor)
        for name, tensor in tensors
        if tensor.numel()
    )
    open_spans: list[tuple[int, str, str, Tensor]] = []
    for begin, end, device, name, tensor in spans:
        open_spans = [span for span in open_spans if span[0] > begin and span[1] == device]
        for _, _, other, its in open_spans:
            if _share_bytes(its, tensor):
                yield other, name
        open_spans.append((end, device, name, tensor))


def _end(tensor: Tensor) -> int:
    last = tensor.numel() - 1
    if not tensor.is_contiguous():
        last = sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
    return tensor.data_ptr() + (last + 1) * tensor.element_size()


def _share_bytes(a: Tensor, b: Tensor) -> bool:
    """For two tensors whose address ranges overlap."""
    if a.is_contiguous() and b.is_contiguous():
        return True
    if a.element_size() != b.element_size():
        return True  # views of other widths of one memory: nobody fills both
    begin = min(a.data_ptr(), b.data_ptr())
    width = a.element_size()
    if (a.data_ptr() - begin) % width or (b.data_ptr() - begin) % width:
        return True
    elements = (max(_end(a), _end(b)) - begin) // width
    marks = torch.zeros(elements, dtype=torch.bool)
    marks.as_strided(a.shape, a.stride(), (a.data_ptr() - begin) // width).fill_(True)
    return bool(marks.as_strided(b.shape, b.stride(), (b.data_ptr() - begin) // width).any())
