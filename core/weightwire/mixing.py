"""How an element's place and bits become 64 bits of a digest: in torch and in numpy, alike.

``mix(index, bits, key)`` is ``(bits + 1) * (scramble(index * GAMMA + key) | 1)``, modulo
2**64, where bits of eight-byte elements are scrambled first.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

__all__ = [
    "GAMMA",
    "MASK",
    "MIX",
    "U64",
    "mix",
    "scramble",
    "scramble_array",
    "shift",
    "u64",
]

U64 = NDArray[np.uint64]

MASK = (1 << 64) - 1
# Odd constants of SplitMix64 (Steele, Lea, Flood: Fast Splittable PRNGs, 2014), as int64.
GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
MIX = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def u64(value: int) -> np.uint64:
    return np.uint64(value & MASK)


def mix(index: Tensor, bits: Tensor, key: Tensor | int, *, wide: bool) -> Tensor:
    """Of int64 tensors.

    Args:
        bits: sign-extended to 64 bits.
        wide: whether they are of eight-byte elements.
    """
    weight = scramble(index * GAMMA + key)
    # An odd weight makes any change of one element change the sum.  Weights of two places
    # differ by few low bits' worth: eight-byte elements that differ only in their high bits
    # (their signs) could change places unnoticed if they weren't scrambled too.
    if wide:
        bits = scramble(bits)
    return (bits + 1) * weight.bitwise_or_(1)


def scramble(value: Tensor) -> Tensor:
    value = (value ^ shift(value, 30)) * MIX
    value = (value ^ shift(value, 27)) * _MIX_2
    return value ^ shift(value, 31)


def shift(value: Tensor, by: int) -> Tensor:
    """Logical shift to the right of int64."""
    return (value >> by).bitwise_and_((1 << (64 - by)) - 1)


def scramble_array(value: U64) -> U64:
    value = (value ^ (value >> u64(30))) * u64(MIX)
    value = (value ^ (value >> u64(27))) * u64(_MIX_2)
    return value ^ (value >> u64(31))
