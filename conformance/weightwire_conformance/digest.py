"""A version's digest with ``verify="full"``, computed from its definition.

It shares no code with the library: the sum, modulo 2**64, of ``mix`` over all elements of
all tensors, where::

    mix = (bits + 1) * (scramble(index * GAMMA + key) | 1)

``index`` is the element's place in the tensor, row by row; ``bits`` are its own, with their
sign extended to 64 bits (those of one byte have none), and scrambled where they are 64
already; ``key`` is BLAKE2b of the tensor's name in 8 bytes, little-endian; ``GAMMA`` and
``scramble`` are those of SplitMix64.
"""

from __future__ import annotations

import hashlib

import torch

from weightwire_conformance.oracle import Model, arriving

__all__ = ["digest"]

_GAMMA = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1


def _scramble(value: int) -> int:
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _WORD
    return value ^ (value >> 31)


def digest(leaves: Model, version: int, seed: int) -> str:
    """Of a whole version, as reports show it; in Python's own integers, for small models."""
    total = 0
    for leaf in leaves:
        if leaf.tied is not None:
            continue
        key = int.from_bytes(hashlib.blake2b(leaf.name.encode(), digest_size=8).digest(), "little")
        value = arriving(leaf, version, seed).contiguous()
        size = value.element_size()
        raw = bytes(value.reshape(-1).view(torch.uint8).tolist())
        for index in range(value.numel()):
            element = raw[index * size : (index + 1) * size]
            bits = int.from_bytes(element, "little", signed=size > 1) & _WORD
            bits = _scramble(bits) if size == 8 else bits
            total += (bits + 1) * (_scramble(index * _GAMMA + key & _WORD) | 1)
    return f"{total & _WORD:016x}"
