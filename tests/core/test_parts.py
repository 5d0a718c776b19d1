"""Digests of tensors that are read in parts, by one rank or by several."""

from __future__ import annotations

import pytest
import torch
from fetching import BareTarget, BareTransport, fetch

from weightwire.contract import Seal
from weightwire.digest import box_digest, tensor_key
from weightwire.errors import SessionError, VerificationError
from weightwire.parts import Fetched, PartDigests, compare_parts
from weightwire.pipeline import FetchPlan
from weightwire.table import Group, Region, Shard, TensorEntry, TensorTable

W = torch.randn(8, 4)


def part(rows, *, tensor=W, owners=(0, 1)):
    """What a rank hands in that has read these rows, from these owners."""
    return PartDigests(
        0,
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


class Copying(BareTransport):
    """Two owners of ``W``, in this process; one element may be damaged on the way."""

    def __init__(self, damaged=None):
        self.damaged = damaged

    def fetch(self, group, regions):
        sent = W.clone()
        if self.damaged is not None:
            sent[self.damaged] += 1
        owners = set()
        for position, memory in regions.items():
            (row, column), (rows, columns) = (
                self.regions[position].offsets,
                self.regions[position].sizes,
            )
            memory.copy_(sent[row : row + rows, column : column + columns])
            owners |= {at // 4 for at in range(row, row + rows)}
        return [Seal({0: digest(W[o * 4 : o * 4 + 4], (o * 4, 0))}, o) for o in owners]


class Keeping(BareTarget):
    """Holds what it was given."""

    def write(self, group, tensors):
        self.held.update({region: tensor.clone() for region, tensor in tensors.items()})


def fetched(regions, damaged=None):
    transport, target = Copying(damaged), Keeping()
    transport.set_plan(table(), regions)
    result = fetch(FetchPlan(table(), regions), transport, target, version=3, verify="full")
    for region, tensor in target.held.items():
        (row, column), (rows, columns) = region.offsets, region.sizes
        if damaged is None:
            assert torch.equal(tensor, W[row : row + rows, column : column + columns])
    return result


LEFT = [Region(0, (0, 0), (8, 1)), Region(0, (0, 3), (8, 1))]
RIGHT = [Region(0, (0, 1), (8, 2))]


def test_two_ranks_that_read_columns():
    compare_parts(table(), [fetched(LEFT), fetched(RIGHT)], 3)
    for damaged in ((2, 0), (5, 3)):
        with pytest.raises(VerificationError, match="in parts"):
            compare_parts(table(), [fetched(LEFT, damaged), fetched(RIGHT)], 3)


def test_one_rank_whose_regions_make_the_whole_compares_them_at_once():
    assert fetched(LEFT + RIGHT).parts == ()
    with pytest.raises(VerificationError, match="isn't what was sent"):
        fetched(LEFT + RIGHT, (4, 2))
