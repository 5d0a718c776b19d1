"""Tensors larger than the budget of a transfer group: cut on both sides, held in bounded memory."""

from __future__ import annotations

import math

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightwire.cuts import Cuts
from weightwire.errors import TableMismatch
from weightwire.layout import ALIGNMENT, slot_layout
from weightwire.pipeline import FetchPlan
from weightwire.sources import Spec
from weightwire.table import Group, Part, Region, Shard, TensorEntry, TensorTable
from weightwire.tables import build_table


def table_of(shape, budget, *boxes, dtype="float32"):
    """A table of one tensor, of whose boxes each rank holds one."""
    specs = [Spec((TensorEntry("w", shape, dtype, (Shard(0, *box),)),), {}) for box in boxes]
    return build_table(specs, budget)


def boxes_of(shape, dim, ranks):
    """Uneven shards, as torch cuts them; the last may be empty."""
    step = -(-shape[dim] // ranks)
    for rank in range(ranks):
        begin = min(rank * step, shape[dim])
        size = min(step, shape[dim] - begin)
        offsets = tuple(begin if d == dim and size else 0 for d in range(len(shape)))
        yield offsets, tuple(size if d == dim else n for d, n in enumerate(shape))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 7), max_size=4).map(tuple),
    st.integers(8, 200),
    st.integers(1, 5),
    st.integers(0, 3),
)
def test_every_element_lies_in_one_slot_and_no_slot_exceeds_the_budget(shape, budget, ranks, dim):
    boxes = [((0,) * len(shape), shape)]
    if shape:
        boxes = list(boxes_of(shape, dim % len(shape), ranks))
    table = TensorTable.decode(table_of(shape, budget, *boxes).encode())
    count = torch.zeros(shape, dtype=torch.int32)
    for group in range(len(table.groups)):
        assert table.group_nbytes(group) <= budget
        for owner in range(table.world_size):
            layout = slot_layout(table, group, owner)
            assert layout.nbytes <= budget + ALIGNMENT * len(layout.places)
            for i, shard in layout.shards.items():
                assert layout.places[i].shape == shard.sizes
                count[slices(shard)] += 1
    assert torch.equal(count, torch.ones_like(count))


def slices(box):
    return tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))


@settings(max_examples=100, deadline=None)
@given(st.data(), st.lists(st.integers(1, 7), min_size=1, max_size=3), st.integers(8, 100))
def test_a_region_is_cut_into_the_pieces_of_its_groups(data, shape, budget):
    table = table_of(tuple(shape), budget, ((0,) * len(shape), tuple(shape)))
    offsets = [data.draw(st.integers(0, n - 1)) for n in shape]
    sizes = [data.draw(st.integers(1, n - o)) for n, o in zip(shape, offsets, strict=True)]
    region = Region(0, tuple(offsets), tuple(sizes))
    cuts = Cuts(table)
    count = torch.zeros(shape, dtype=torch.int32)
    for group, piece in cuts.cut(region):
        assert cuts.group_of(piece) == group
        assert Part(piece.offsets, piece.sizes) == table.part(group, 0).meet(*piece_box(piece))
        count[slices(piece)] += 1
    expected = torch.zeros_like(count)
    expected[slices(region)] = 1
    assert torch.equal(count, expected)


def piece_box(region):
    return region.offsets, region.sizes


def test_receivers_hold_no_more_than_the_budget():
    table = table_of((1000, 64), 64 << 10, ((0, 0), (1000, 64)))
    plan = FetchPlan(table, [Region.whole(0, table.tensors[0])], pieces=True)
    assert len(plan.regions) == len(table.groups) == 4
    assert max(math.prod(region.sizes) * 4 for region in plan.regions) <= 64 << 10


def test_a_target_that_takes_no_pieces_has_to_plan_them():
    table = table_of((1000, 64), 64 << 10, ((0, 0), (1000, 64)))
    whole = Region.whole(0, table.tensors[0])
    with pytest.raises(
        TableMismatch, match=r"region of tensor 'w' lies in 4 transfer groups: plan"
    ):
        FetchPlan(table, [whole])
    FetchPlan(table, [piece for _, piece in Cuts(table).cut(whole)])


def test_empty_regions_of_a_cut_tensor_lie_in_one_group():
    table = table_of((1000, 64), 64 << 10, ((0, 0), (1000, 64)))
    assert Cuts(table).group_of(Region(0, (500, 0), (0, 64))) == 0


def broken(*groups):
    table = table_of((4, 6), 96, ((0, 0), (4, 6)))
    return msgspec.structs.replace(table, groups=groups).encode()


@pytest.mark.parametrize(
    "groups",
    [
        (Group((0,), {0: Part((0, 0), (2, 6))}),),
        (Group((0,), {0: Part((0, 0), (2, 6))}), Group((0,), {0: Part((1, 0), (3, 6))})),
        (Group((0,), {0: Part((0, 0), (2, 6))}), Group((0,), {0: Part((2, 0), (3, 6))})),
        (Group((0,), {0: Part((0, 0), (4, 3))}), Group((0,), {0: Part((0, 3), (4, 3))})),
        (Group((0,), {0: Part((0,), (4,))}),),
        (Group((0,), {0: Part((0, 0), (4, 6))}), Group((0,), {0: Part((0, 0), (0, 6))})),
        (Group((0,), {0: Part((0, 0), (4, 6))}), Group((0,))),
        (Group((0, 0), {0: Part((0, 0), (4, 6))}),),
        (Group((0,), {0: Part((0, 0), (4, 6)), 1: Part((0, 0), (4, 6))}),),
    ],
    ids=["lacks", "overlaps", "outside", "columns", "dims", "empty", "twice", "double", "nobody"],
)
def test_parts_that_do_not_make_a_tensor_up_are_refused(groups):
    with pytest.raises(TableMismatch, match=r"tensor 'w': its parts|transfer group"):
        TensorTable.decode(broken(*groups))


def test_equal_tables_have_equal_digests_whatever_the_order_of_their_parts():
    entries = tuple(TensorEntry(n, (4,), "uint8", (Shard(0, (0,), (4,)),)) for n in "ab")
    left = {0: Part((0,), (2,)), 1: Part((0,), (2,))}
    right = {i: Part((2,), (2,)) for i in (1, 0)}
    tables = [
        TensorTable(1, entries, (Group((0, 1), left), Group((0, 1), dict(sorted(p.items())))))
        for p in (right, dict(reversed(right.items())))
    ]
    other = TensorTable(1, entries, (Group((0, 1), left), Group((0, 1), right)))
    assert len({table.digest() for table in (*tables, other)}) == 1
