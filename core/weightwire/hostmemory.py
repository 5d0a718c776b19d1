"""A tensor's own host memory, as bytes and as an array.

Not by ``Tensor.numpy``: torch then takes the storage for shared and never lets it be
resized again, which is how trainers offload their parameters.
"""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["array_of", "bytes_of"]

_DTYPES = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor; writing to the view writes to the tensor."""
    if tensor.numel() == 0:
        return memoryview(b"")
    content = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    content.owner = tensor  # type: ignore[attr-defined]  # the memory lives as long as the view
    return memoryview(content).cast("B")


def array_of(tensor: Tensor) -> NDArray[np.generic]:
    """The elements of a contiguous CPU tensor, flat, as integers of their width."""
    array: NDArray[np.generic] = np.frombuffer(bytes_of(tensor), _DTYPES[tensor.element_size()])
    return array
