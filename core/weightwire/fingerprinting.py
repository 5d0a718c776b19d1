"""Takes the fingerprints of tensors where they lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from torch import Tensor

from weightwire.digest import Box, Digester, tensor_key
from weightwire.fingerprint import Fingerprint, short_hash
from weightwire.table import Region

__all__ = ["Fingerprinter", "fingerprint_of"]


class Fingerprinter:
    """Fingerprints of the same tensors, for one version after another.

    It keeps where they lie, and never their memory.
    """

    def __init__(self) -> None:
        self._shown: list[tuple[object, ...]] | None = None
        self._reads: Sequence[Region] = ()
        self._layout = ""
        self._digester = Digester([])

    def prepare(self, version: int) -> None:
        """Before a version is in place: where ``of`` will look, if the tensors lie as they did."""
        if self._shown is not None:
            self._digester.prepare(0, "sample", version)

    def of(
        self, tensors: Mapping[str, Tensor], version: int, reads: Sequence[Region] = ()
    ) -> Fingerprint:
        """``SAMPLES`` places of each tensor, others for each version.

        Args:
            tensors: by name; of any shape, dtype and strides; read where they lie.
            reads: what they are made of, where that isn't all of the table: ranks that hold
                different experts are not laid out alike.
        """
        names = sorted(tensors)
        held = [tensors[name] for name in names]
        shown: list[tuple[object, ...]] = [
            (name, tuple(tensor.shape), tensor.stride(), str(tensor.dtype), tensor.device.type)
            for name, tensor in zip(names, held, strict=True)
        ]
        if shown != self._shown or reads is not self._reads:
            layout = short_hash()
            layout.update(msgspec.json.encode(shown))
            layout.update(msgspec.json.encode([(r.tensor, r.offsets, r.sizes) for r in reads]))
            self._layout = layout.hexdigest()
            self._digester = Digester([[_box(name, tensors[name]) for name in names]])
            self._shown, self._reads = shown, reads
        digests = self._digester.digests(0, held, "sample", version)
        bits = short_hash()
        bits.update(np.array(digests, "<u8").tobytes())
        return Fingerprint(self._layout, bits.hexdigest())


def fingerprint_of(tensors: Mapping[str, Tensor], version: int) -> Fingerprint:
    """Fingerprint of named tensors: see ``Fingerprinter.of``."""
    return Fingerprinter().of(tensors, version)


def _box(name: str, tensor: Tensor) -> Box:
    shape = tuple(tensor.shape)
    strides = None if tensor.is_contiguous() else tensor.stride()
    origin = (0,) * len(shape)
    return Box(tensor_key(name), shape, origin, shape, tensor.element_size(), strides)
