"""What a tensor must be to be sent or filled: memory of its own, that is there now."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from weightwire.errors import ConfigError

__all__ = ["require_dense", "require_distinct"]


def require_dense(what: str, tensor: Tensor) -> None:
    """Refuse a tensor whose elements lie nowhere.

    Args:
        what: for messages, such as ``source tensor 'w'``.

    Raises:
        ConfigError: it is lazy, nested, sparse, on the meta device, or its storage was freed.
    """
    if is_lazy(tensor):
        raise ConfigError(
            f"{what} has no shape yet, it is a lazy module's: run the module once before"
        )
    if tensor.is_nested or tensor.layout is not torch.strided:
        kind = "is nested" if tensor.is_nested else f"has layout {tensor.layout}"
        raise ConfigError(f"{what} {kind}: give a dense tensor")
    if tensor.is_meta:
        raise ConfigError(f"{what} is on the meta device: materialise it first")
    if tensor.numel():
        reach = tensor.numel() - 1 if tensor.is_contiguous() else _reach(tensor)
        needed = (tensor.storage_offset() + reach + 1) * tensor.element_size()
        if tensor.untyped_storage().nbytes() < needed:
            raise ConfigError(
                f"{what} has no memory, its storage was freed (offloaded?): load it again first"
            )


def require_distinct(what: str, tensor: Tensor) -> None:
    """Refuse a tensor in which two elements may share memory: it can't hold every value.

    Raises:
        ConfigError: its strides are smaller than what they step over.
    """
    if not tensor.numel():
        return
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            raise ConfigError(
                f"{what} of shape {tuple(tensor.shape)} and strides {tensor.stride()} has elements "
                "that may share memory (an expanded one?): give a tensor of its own, `.clone()`"
            )
        reach += (size - 1) * stride


def _reach(tensor: Tensor) -> int:
    return sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
