"""Where tensors lie."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["device_of"]


def device_of(tensors: Iterable[object]) -> torch.device:
    """The device of the first tensor; the CPU where there is none."""
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            return tensor.device
    return torch.device("cpu")
