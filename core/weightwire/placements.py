"""Which box of a tensor lies on this rank: plain tensors and DTensors of any placement."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weightwire.errors import ConfigError

__all__ = ["LocalBox", "local_box"]


@dataclass(frozen=True)
class LocalBox:
    """What this rank holds of a tensor.

    Attributes:
        local: its elements, detached, of any stride.
        shape: the tensor's global shape.
        offsets: first index in each dimension.
        sizes: extent in each dimension; equal to the local shape.
    """

    local: Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def local_box(name: str, tensor: Tensor) -> LocalBox:
    """The box of ``tensor`` on this rank: all of a plain tensor, the shard of a DTensor.

    Raises:
        ConfigError: it isn't a dense tensor with values here, or its placement
            isn't a box (a pending reduction).
    """
    if not isinstance(tensor, Tensor):
        raise ConfigError(f"source tensor {name!r} is a {type(tensor).__name__}, not a tensor")
    if _is_dtensor(tensor):
        return _shard_box(name, tensor)
    return _whole_box(name, tensor.detach())


def _whole_box(name: str, tensor: Tensor) -> LocalBox:
    _require_dense(name, tensor)
    shape = tuple(tensor.shape)
    return LocalBox(tensor, shape, (0,) * len(shape), shape)


def _shard_box(name: str, tensor: Any) -> LocalBox:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(placement.is_partial() for placement in tensor.placements):
        raise ConfigError(
            f"source tensor {name!r} has a pending reduction {tensor.placements}: "
            "redistribute it before sending"
        )
    local = tensor.detach().to_local()
    _require_dense(name, local)
    shape = tuple(tensor.shape)
    sizes, offsets = compute_local_shape_and_global_offset(
        shape, tensor.device_mesh, tensor.placements
    )
    if tuple(sizes) != tuple(local.shape):
        raise ConfigError(
            f"source tensor {name!r} holds {tuple(local.shape)} here, its placement "
            f"{tensor.placements} says {tuple(sizes)}: build it with its global shape and stride"
        )
    if 0 in sizes:
        offsets = (0,) * len(shape)  # an empty shard lies nowhere
    return LocalBox(local, shape, tuple(offsets), tuple(sizes))


def _is_dtensor(tensor: Tensor) -> bool:
    # Without the import: a process that never made one needn't load the package.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _require_dense(name: str, tensor: Tensor) -> None:
    if tensor.is_meta:
        raise ConfigError(f"source tensor {name!r} is on the meta device: materialise it first")
    if tensor.layout is not torch.strided:
        raise ConfigError(f"source tensor {name!r} has layout {tensor.layout}: send a dense tensor")
