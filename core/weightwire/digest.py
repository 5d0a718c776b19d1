"""A 64-bit digest of tensor elements that adds up over boxes.

``digest(tensor) = sum over elements of mix(key, global index, bits) mod 2**64``.
It is the same however a tensor is cut into boxes, so what owners serve and what
receivers hold can be compared without moving bytes.  ``key`` comes from the
tensor's name; equal bits at another place, or in another tensor, count
differently.  It finds faults, not forgeries.

``full`` takes every element.  ``sample`` takes ``SAMPLES`` places of each
tensor, the same ones on both sides, others for each version.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from weightwire.copying import INTEGERS
from weightwire.mixing import MASK, mix
from weightwire.sampling import SAMPLES, Box, Sampler, sample_places

__all__ = [
    "SAMPLES",
    "Box",
    "Digester",
    "Verify",
    "box_digest",
    "combine",
    "tensor_key",
]

Verify = Literal["off", "sample", "full"]

_CHUNK = 1 << 16  # elements whose intermediate values stay in a core's cache
_GPU_CHUNK = 1 << 24


@functools.lru_cache(maxsize=1 << 17)
def tensor_key(name: str) -> int:
    """The tensor's key: a signed 64-bit integer from its checkpoint name."""
    return int.from_bytes(
        hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True
    )


def box_digest(
    box: Tensor,
    *,
    key: int,
    shape: tuple[int, ...],
    offsets: tuple[int, ...],
    verify: Verify,
    version: int,
) -> int:
    """Digest of one box of a tensor.

    Args:
        box: its elements, contiguous, of the wire dtype.
        key: from ``tensor_key``.
        shape: the tensor's global shape.
        offsets: the box's first index in each dimension.
        verify: ``full``, or ``sample`` (the places depend on ``version``).

    Returns:
        An integer from 0 to 2**64 - 1; 0 for an empty box and for ``off``.
    """
    if verify == "off" or box.numel() == 0:
        return 0
    flat = box.reshape(-1).view(INTEGERS[box.element_size()])
    whole = tuple(box.shape) == tuple(shape)
    if verify == "full":
        return _full(flat, key, None if whole else (tuple(box.shape), shape, offsets))
    total = math.prod(shape)
    places = sample_places(total, key, version)
    if not whole:
        local, inside = _to_local(places, tuple(box.shape), shape, offsets)
        places, local = places[inside], local[inside]
    else:
        local = places
    bits = flat[local.to(flat.device)].to(torch.int64)
    mixed = mix(places.to(flat.device), bits, key, wide=box.element_size() == 8)
    return int(mixed.sum().item()) & MASK


class Digester:
    """Digests of the same boxes, for one version after another.

    Args:
        groups: the boxes that are digested together.
    """

    def __init__(self, groups: Sequence[Sequence[Box]]) -> None:
        self._groups = groups
        self._sampler = Sampler(groups)

    def prepare(self, group: int, verify: Verify, version: int) -> None:
        """Before the bytes are there: what of a group's digests doesn't depend on them."""
        if verify == "sample":
            self._sampler.prepare(group, version)

    def digests(
        self, group: int, boxes: Sequence[Tensor], verify: Verify, version: int
    ) -> list[int]:
        """Of a group's boxes.

        Args:
            boxes: as they were described, on any devices; contiguous, unless they are sampled.
        """
        return self.start(group, boxes, verify, version)()

    def start(
        self, group: int, boxes: Sequence[Tensor], verify: Verify, version: int
    ) -> Callable[[], list[int]]:
        """``digests``, as far as they can be taken without a wait: samples on one GPU are queued.

        Returns:
            What gives them; the boxes must hold their bytes until it has.
        """
        if verify == "sample" and len({box.device for box in boxes}) < 2:
            return self._sampler.start(group, boxes, version)
        return functools.partial(self._now, group, boxes, verify, version)

    def _now(self, group: int, boxes: Sequence[Tensor], verify: Verify, version: int) -> list[int]:
        if verify != "sample":
            described = zip(boxes, self._groups[group], strict=True)
            return [
                box_digest(
                    box,
                    key=of.key,
                    shape=of.shape,
                    offsets=of.offsets,
                    verify=verify,
                    version=version,
                )
                for box, of in described
            ]
        digests = [0] * len(boxes)  # a rank that offloads a part of its tensors
        for device in {box.device for box in boxes}:
            chosen = [i for i, box in enumerate(boxes) if box.device == device]
            sampler = Sampler([[self._groups[group][i] for i in chosen]])
            found = sampler.start(0, [boxes[i] for i in chosen], version)()
            for i, value in zip(chosen, found, strict=True):
                digests[i] = value
        return digests


def _full(
    flat: Tensor,
    key: int,
    place: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None,
) -> int:
    total = 0
    chunk = _CHUNK if flat.device.type == "cpu" else _GPU_CHUNK
    for begin in range(0, flat.numel(), chunk):
        bits = flat[begin : begin + chunk].to(torch.int64)
        index = torch.arange(begin, begin + bits.numel(), dtype=torch.int64, device=flat.device)
        if place is not None:
            index = _to_global(index, *place)
        total += int(mix(index, bits, key, wide=flat.element_size() == 8).sum().item())
    return total & MASK


def _strides(shape: tuple[int, ...]) -> list[int]:
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * shape[i + 1]
    return strides


def _to_global(
    index: Tensor, box: tuple[int, ...], shape: tuple[int, ...], offsets: tuple[int, ...]
) -> Tensor:
    result = torch.zeros_like(index)
    for inner, size, outer, offset in zip(
        _strides(box), box, _strides(shape), offsets, strict=True
    ):
        result += ((index // inner) % size + offset) * outer
    return result


def _to_local(
    index: Tensor, box: tuple[int, ...], shape: tuple[int, ...], offsets: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Local flat indices, and which of the global ones lie in the box."""
    result = torch.zeros_like(index)
    inside = torch.ones_like(index, dtype=torch.bool)
    rows = zip(_strides(box), box, _strides(shape), shape, offsets, strict=True)
    for inner, size, outer, extent, offset in rows:
        at = (index // outer) % extent - offset
        inside &= (at >= 0) & (at < size)
        result += at * inner
    return result, inside


def combine(digest: int, verify: Verify) -> str:
    """A digest as reports show it."""
    return "" if verify == "off" else f"{digest:016x}"
