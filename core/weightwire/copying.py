"""Copying many tensors at once, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["INTEGERS", "copy_all", "raw_bytes"]

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype of an element's size, to see its bits."""


def copy_all(into: Sequence[Tensor], of: Sequence[Tensor], *, non_blocking: bool = False) -> None:
    """``into[i].copy_(of[i])`` for all of them, fused where torch can.

    Where dtypes are equal, bits are copied.  torch's fused kernel for GPUs takes
    floating-point elements through a wider type, which makes one NaN of all NaNs, so
    that these are copied as integers; casts are torch's own.

    Args:
        into: tensors of the shapes of ``of``.
        of: of any dtype and strides.
    """
    targets, sources = [], []
    with torch.no_grad():
        for to, source in zip(into, of, strict=True):
            integer = INTEGERS.get(to.element_size())
            # Lazily conjugated or negated views have other bits than values.
            is_plain = not (source.is_conj() or source.is_neg())
            if to.dtype == source.dtype and integer is not None and is_plain:
                targets.append(to.view(integer))
                sources.append(source.view(integer))
            elif to.dtype == source.dtype:
                to.copy_(source, non_blocking=non_blocking)
            else:
                targets.append(to)
                sources.append(source)
        if targets:
            torch._foreach_copy_(targets, sources, non_blocking=non_blocking)


def raw_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's bytes, in place."""
    # One element may say any stride, which view() refuses.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
