"""What a replica's memory holds after a version is in place, in a few bytes.

Digests compare what arrived with what was sent; a fingerprint compares what was
made of it.  Replicas that are laid out alike (the same names, shapes and dtypes on every
rank, made of the same parts of the table) must hold the same bits, post-processed
layers and derived tensors included; where they don't, one of them serves something else
than the policy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

__all__ = ["Fingerprint", "combine_fingerprints", "short_hash"]


class Fingerprint(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One rank's, or one replica's.

    Attributes:
        layout: equal where names, shapes, strides, dtypes and device types are, and what they
            are made of; hex.
        bits: equal where the sampled places of all tensors are; hex.
    """

    layout: Annotated[str, Meta(max_length=64)]
    bits: Annotated[str, Meta(max_length=64)]


def combine_fingerprints(ranks: Sequence[Fingerprint | None]) -> Fingerprint | None:
    """A replica's, from those of its ranks in order; None if one of them has none."""
    layout, bits = short_hash(), short_hash()
    for rank in ranks:
        if rank is None:
            return None
        layout.update(rank.layout.encode())
        bits.update(rank.bits.encode())
    return Fingerprint(layout.hexdigest(), bits.hexdigest())


def short_hash() -> hashlib.blake2b:
    """What fingerprints are made with: 64 bits."""
    return hashlib.blake2b(digest_size=8)
