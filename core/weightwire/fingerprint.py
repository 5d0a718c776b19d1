"""What a replica's memory holds after a version is in place, in a few bytes.

Digests compare what arrived with what was sent; a fingerprint compares what was
made of it.  Replicas that are laid out alike (the same names, shapes and dtypes
on every rank) must hold the same bits, post-processed layers and derived tensors
included; where they don't, one of them serves something else than the policy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from weightwire.digest import box_digest, sample_digests, tensor_key

__all__ = ["Fingerprint", "combine_fingerprints", "fingerprint_of"]


class Fingerprint(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One rank's, or one replica's.

    Attributes:
        layout: equal where names, shapes, strides, dtypes and device types are; hex.
        bits: equal where the sampled places of all tensors are; hex.
    """

    layout: Annotated[str, Meta(max_length=64)]
    bits: Annotated[str, Meta(max_length=64)]


def fingerprint_of(tensors: Mapping[str, Tensor], version: int) -> Fingerprint:
    """Fingerprint of named tensors: ``SAMPLES`` places of each, others for each version.

    Args:
        tensors: of any shape, dtype and strides; read where they lie.
    """
    names = sorted(tensors)
    held = [tensors[name].detach() for name in names]
    shown = [
        (name, tuple(tensor.shape), tensor.stride(), str(tensor.dtype), tensor.device.type)
        for name, tensor in zip(names, held, strict=True)
    ]
    together: dict[torch.device, list[int]] = {}
    digests = np.zeros(len(names), "<u8")
    for i, tensor in enumerate(held):
        if tensor.is_contiguous():
            together.setdefault(tensor.device, []).append(i)
        else:
            digests[i] = _strided(tensor, names[i], version)
    for chosen in together.values():
        keys = [tensor_key(names[i]) for i in chosen]
        found = sample_digests([held[i] for i in chosen], keys, version)
        digests[chosen] = np.array(found, np.uint64)
    layout, bits = _hash(), _hash()
    layout.update(msgspec.json.encode(shown))
    bits.update(digests.tobytes())
    return Fingerprint(layout.hexdigest(), bits.hexdigest())


def combine_fingerprints(ranks: Sequence[Fingerprint | None]) -> Fingerprint | None:
    """A replica's, from those of its ranks in order; None if one of them has none."""
    layout, bits = _hash(), _hash()
    for rank in ranks:
        if rank is None:
            return None
        layout.update(rank.layout.encode())
        bits.update(rank.bits.encode())
    return Fingerprint(layout.hexdigest(), bits.hexdigest())


def _hash() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=8)


def _strided(tensor: Tensor, name: str, version: int) -> int:
    """Of a tensor that isn't contiguous: in memory order where it is dense, else by a copy.

    Two replicas of one layout have the same strides, so that the order doesn't matter.
    """
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    dense = tensor.permute(order)
    box = dense if dense.is_contiguous() else tensor.contiguous()
    shape = tuple(box.shape)
    offsets = (0,) * len(shape)
    key = tensor_key(name)
    return box_digest(box, key=key, shape=shape, offsets=offsets, verify="sample", version=version)
