"""Checksums of chunks: xxh3_64 of every ``chunk_nbytes`` of a tensor, from its first byte.

A ranged read that covers a whole chunk is checked against its sum.  The bytes
of a chunk that is read only in part are covered by the seals' digests instead.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

__all__ = ["CHUNK_NBYTES", "Sums", "checksum", "chunk_count", "decode", "empty", "encode"]

CHUNK_NBYTES = 1 << 20
"""Bytes of a chunk: still in the cache when it is written just after it was hashed."""

Sums = npt.NDArray[np.uint64]
"""One checksum per chunk of a tensor."""

checksum = xxhash.xxh3_64_intdigest


def chunk_count(nbytes: int, chunk_nbytes: int) -> int:
    """Chunks of a tensor of ``nbytes``."""
    return -(-nbytes // chunk_nbytes)


def empty(nbytes: int, chunk_nbytes: int) -> Sums:
    """Room for the checksums of a tensor of ``nbytes``."""
    return np.zeros(chunk_count(nbytes, chunk_nbytes), dtype=np.uint64)


def encode(sums: Sums) -> str:
    """16 hex digits per chunk, in order."""
    return sums.astype(">u8").tobytes().hex()


def decode(text: str) -> Sums:
    """Inverse of ``encode``.

    Raises:
        ValueError: not made of 16 hex digits per chunk.
    """
    raw = bytes.fromhex(text)
    if len(raw) * 2 != len(text) or len(raw) % 8:
        raise ValueError("a checksum has 16 hex digits")
    return np.frombuffer(raw, dtype=">u8").astype(np.uint64)
