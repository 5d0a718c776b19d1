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
from msgspec import Meta
from torch import Tensor

from weightwire.digest import Box, Digester, tensor_key

__all__ = ["Fingerprint", "Fingerprinter", "combine_fingerprints", "fingerprint_of"]


class Fingerprint(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One rank's, or one replica's.

    Attributes:
        layout: equal where names, shapes, strides, dtypes and device types are; hex.
        bits: equal where the sampled places of all tensors are; hex.
    """

    layout: Annotated[str, Meta(max_length=64)]
    bits: Annotated[str, Meta(max_length=64)]


class Fingerprinter:
    """Fingerprints of the same tensors, for one version after another.

    It keeps where they lie, and never their memory.
    """

    def __init__(self) -> None:
        self._shown: list[tuple[object, ...]] | None = None
        self._layout = ""
        self._digester = Digester([])

    def of(self, tensors: Mapping[str, Tensor], version: int) -> Fingerprint:
        """``SAMPLES`` places of each tensor, others for each version.

        Args:
            tensors: by name; of any shape, dtype and strides; read where they lie.
        """
        names = sorted(tensors)
        held = [tensors[name] for name in names]
        shown: list[tuple[object, ...]] = [
            (name, tuple(tensor.shape), tensor.stride(), str(tensor.dtype), tensor.device.type)
            for name, tensor in zip(names, held, strict=True)
        ]
        if shown != self._shown:
            layout = _hash()
            layout.update(msgspec.json.encode(shown))
            self._layout = layout.hexdigest()
            self._digester = Digester([[_box(name, tensors[name]) for name in names]])
            self._shown = shown
        digests = self._digester.digests(0, held, "sample", version)
        bits = _hash()
        bits.update(np.array(digests, "<u8").tobytes())
        return Fingerprint(self._layout, bits.hexdigest())


def fingerprint_of(tensors: Mapping[str, Tensor], version: int) -> Fingerprint:
    """Fingerprint of named tensors: see ``Fingerprinter.of``."""
    return Fingerprinter().of(tensors, version)


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


def _box(name: str, tensor: Tensor) -> Box:
    shape = tuple(tensor.shape)
    strides = None if tensor.is_contiguous() else tensor.stride()
    origin = (0,) * len(shape)
    return Box(tensor_key(name), shape, origin, shape, tensor.element_size(), strides)
