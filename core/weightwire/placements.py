"""Which box of a tensor lies on this rank: of plain tensors, DTensors and declared boxes."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from weightwire.dense import require_dense
from weightwire.errors import ConfigError

__all__ = ["LocalBox", "LocalShard", "local_box", "local_part"]


@dataclass(frozen=True, eq=False)
class LocalShard:
    """A box of a tensor, declared by a trainer that shards in a way of its own.

    What the ranks declare together has to hold every element; a box that several ranks
    hold is served by one of them.  A rank that holds nothing of a tensor (another pipeline
    stage, another expert) leaves it out.

    Attributes:
        local: the elements that lie on this rank, of any stride.
        shape: the tensor's global shape.
        offsets: first index of ``local`` in each dimension of the global tensor.
    """

    local: Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]


class LocalBox(NamedTuple):
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


def local_box(name: str, tensor: Tensor | LocalShard) -> LocalBox:
    """The box of ``tensor`` on this rank: all of a plain tensor, the shard of a DTensor.

    Raises:
        ConfigError: it isn't a dense tensor with values here, or its placement
            isn't a box (a pending reduction), or a declared box lies outside its
            tensor.
    """
    if isinstance(tensor, LocalShard):
        return _declared_box(name, tensor)
    if not isinstance(tensor, Tensor):
        raise ConfigError(f"source tensor {name!r} is a {type(tensor).__name__}, not a tensor")
    if _is_dtensor(tensor):
        return _shard_box(name, tensor)
    return _whole_box(name, tensor)


def local_part(tensor: Tensor | LocalShard) -> tuple[Tensor | None, object]:
    """What lies on this rank, and how it is placed; None where that is something else.

    Called without gradients: nothing is recorded.
    """
    if isinstance(tensor, LocalShard):
        plain = isinstance(tensor.local, Tensor) and not _is_dtensor(tensor.local)
        return (tensor.local if plain else None), (tuple(tensor.shape), tuple(tensor.offsets))
    placed: object = None
    local: Any = tensor
    if isinstance(tensor, Tensor) and _is_dtensor(tensor):
        placed = (tensor.shape, local.placements, local.device_mesh)
        local = local.to_local()
    return (local if type(local) in (Tensor, nn.Parameter) else None), placed


def _whole_box(name: str, tensor: Tensor) -> LocalBox:
    require_dense(f"source tensor {name!r}", tensor)
    shape = tuple(tensor.shape)
    return LocalBox(tensor.detach(), shape, (0,) * len(shape), shape)


def _declared_box(name: str, shard: LocalShard) -> LocalBox:
    if not isinstance(shard.local, Tensor) or _is_dtensor(shard.local):
        raise ConfigError(
            f"source tensor {name!r}: a LocalShard holds a {type(shard.local).__name__}, not a "
            "plain tensor"
        )
    local = shard.local.detach()
    require_dense(f"source tensor {name!r}", local)
    sizes, shape, offsets = tuple(local.shape), tuple(shard.shape), tuple(shard.offsets)
    if not len(sizes) == len(shape) == len(offsets) or any(
        offset < 0 or offset + size > extent
        for offset, size, extent in zip(offsets, sizes, shape, strict=True)
    ):
        raise ConfigError(
            f"source tensor {name!r}: the box of {sizes} at {offsets} doesn't lie in a tensor of "
            f"shape {shape}: correct its LocalShard"
        )
    if 0 in sizes:
        offsets = (0,) * len(shape)  # an empty shard lies nowhere
    return LocalBox(local, shape, offsets, sizes)


def _shard_box(name: str, tensor: Any) -> LocalBox:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(placement.is_partial() for placement in tensor.placements):
        raise ConfigError(
            f"source tensor {name!r} has a pending reduction {tensor.placements}: "
            "redistribute it before sending"
        )
    local = tensor.detach().to_local()
    require_dense(f"source tensor {name!r}", local)
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
