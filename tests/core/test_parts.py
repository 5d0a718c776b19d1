"""Digests of tensors that are read in parts, by one rank or by several."""

from __future__ import annotations

import pytest
import torch

from weightwire.digest import box_digest, tensor_key
from weightwire.errors import SessionError, VerificationError
from weightwire.parts import Fetched, PartDigests, compare_parts
from weightwire.table import Group, Shard, TensorEntry, TensorTable

W = torch.randn(8, 4)


def part(rows, *, tensor=W, owners=(0, 1)):
    """What a rank hands in that has read these rows, from these owners."""
    return PartDigests(
        0,
        tuple(((a, 0), (b - a, 4), digest(tensor[a:b], (a, 0))) for a, b in rows),
        {owner: digest(W[owner * 4 : owner * 4 + 4], (owner * 4, 0)) for owner in owners},
    )


def digest(box, offsets):
    return box_digest(
        box.contiguous(),
        key=tensor_key("w"),
        shape=(8, 4),
        offsets=offsets,
        verify="full",
        version=3,
    )


def table():
    shards = (Shard(0, (0, 0), (4, 4)), Shard(1, (4, 0), (4, 4)))
    return TensorTable(2, (TensorEntry("w", (8, 4), "float32", shards),), (Group((0,)),))


def compare(*parts):
    ranks = [Fetched.decode(Fetched(1, (p,)).encode()) for p in parts]
    compare_parts(table(), ranks, 3)


def test_parts_of_two_ranks_are_compared_together():
    bad = W.clone()
    bad[6, 1] += 1
    compare(part([(0, 3)]), part([(3, 8)]))
    with pytest.raises(VerificationError, match=r"'w' of version 3.*in parts"):
        compare(part([(0, 3)]), part([(3, 8)], tensor=bad))


def test_seals_of_several_ranks_make_one_set():
    compare(part([(0, 4)], owners=[0]), part([(4, 8)], owners=[1]))


def test_a_replicated_part_counts_once_and_must_be_equal():
    bad = W.clone()
    bad[0, 0] = 7
    compare(part([(0, 4)]), part([(0, 4)]), part([(4, 8)]))
    with pytest.raises(VerificationError, match="different bytes"):
        compare(part([(0, 4)]), part([(0, 4)], tensor=bad), part([(4, 8)]))


def test_what_cannot_be_compared_is_left_alone():
    bad = W.clone()
    bad[0, 0] = 7
    compare(part([(0, 3)], tensor=bad))  # the rest is read by nobody
    compare(part([(0, 5)], tensor=bad), part([(4, 8)]))  # they overlap
    compare(part([(0, 4)], tensor=bad, owners=[]), part([(4, 8)], owners=[1]))


def test_malformed_reports_are_refused():
    with pytest.raises(SessionError, match="one weightwire version"):
        Fetched.decode(b"\x93")
