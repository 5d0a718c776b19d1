from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightwire.errors import ConfigError
from weightwire.grouping import layer_key, make_groups
from weightwire.table import Part, Shard, TensorEntry, TensorTable


def entries(*sized: tuple[str, int]) -> list[TensorEntry]:
    return [
        TensorEntry(name, (nbytes,), "uint8", (Shard(0, (0,), (nbytes,)),))
        for name, nbytes in sized
    ]


def named(sized: list[TensorEntry], budget: int) -> list[list[str]]:
    return [[sized[i].name for i in group.tensors] for group in make_groups(sized, budget)]


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("model.layers.3.mlp.w", ("model.layers", 3)),
        ("model.layers.3.mlp.experts.7.w1", ("model.layers", 3)),
        ("0.weight", ("", 0)),
        ("model.norm.weight", None),
        ("w2.v3", None),
        ("h.12345678901.w", None),
    ],
)
def test_the_outermost_index_says_which_layer_a_tensor_belongs_to(name, key):
    assert layer_key(name) == key


def test_each_layer_is_a_group_when_no_two_fit():
    sized = entries(("embed", 4), ("l.0.a", 6), ("l.0.b", 4), ("l.1.a", 6), ("l.1.b", 4))
    assert named(sized, 10) == [["embed"], ["l.0.a", "l.0.b"], ["l.1.a", "l.1.b"]]


def test_layers_are_merged_up_to_the_budget():
    sized = entries(("l.0.a", 4), ("l.1.a", 4), ("l.2.a", 4))
    assert named(sized, 8) == [["l.0.a", "l.1.a"], ["l.2.a"]]


def test_layers_travel_by_number_whatever_the_order_of_names():
    sized = entries(("l.10.a", 8), ("l.2.a", 8), ("l.1.a", 8))
    assert named(sized, 8) == [["l.1.a"], ["l.2.a"], ["l.10.a"]]


def test_tensors_outside_layers_go_before_or_after_them():
    sized = entries(("embed", 8), ("l.0.a", 8), ("norm", 4), ("head", 4))
    assert named(sized, 8) == [["embed"], ["l.0.a"], ["norm", "head"]]


def test_only_a_layer_above_the_budget_is_split():
    sized = entries(("l.0.a", 6), ("l.0.b", 6), ("l.0.c", 6))
    assert named(sized, 12) == [["l.0.a", "l.0.b"], ["l.0.c"]]


def test_a_tensor_above_the_budget_is_cut_over_groups_and_its_rest_travels_with_what_follows():
    sized = entries(("l.0.a", 4), ("l.0.huge", 25), ("l.0.b", 4), ("l.0.c", 4))
    groups = make_groups(sized, 10)
    assert named(sized, 10) == [
        ["l.0.a"],
        ["l.0.huge"],
        ["l.0.huge"],
        ["l.0.huge", "l.0.b"],
        ["l.0.c"],
    ]
    assert [group.parts.get(1) for group in groups] == [
        None, Part((0,), (10,)), Part((10,), (10,)), Part((20,), (5,)), None
    ]  # fmt: skip


def test_2_gib_at_256_mib_are_eight_groups():
    embedding = TensorEntry(
        "embed", (131072, 8192), "bfloat16", (Shard(0, (0, 0), (131072, 8192)),)
    )
    groups = make_groups([embedding], 256 << 20)
    assert [group.parts[0].sizes for group in groups] == [(16384, 8192)] * 8


def test_where_one_row_is_too_large_rows_are_cut():
    entry = TensorEntry("w", (2, 3, 4), "float32", (Shard(0, (0, 0, 0), (2, 3, 4)),))
    boxes = [(g.parts[0].offsets, g.parts[0].sizes) for g in make_groups([entry], 40)]
    assert boxes == [
        ((0, 0, 0), (1, 2, 4)), ((0, 2, 0), (1, 1, 4)),
        ((1, 0, 0), (1, 2, 4)), ((1, 2, 0), (1, 1, 4)),
    ]  # fmt: skip
    assert {g.parts[0].sizes for g in make_groups([entry], 8)} == {(1, 1, 2)}


def test_a_budget_that_makes_too_many_parts_is_refused_by_name():
    huge = TensorEntry("embed", (1 << 20,), "float32", (Shard(0, (0,), (1 << 20,)),))
    with pytest.raises(ConfigError, match="group_bytes=32 cuts tensor 'embed' of 4194304 bytes"):
        make_groups([huge], 32)


def test_a_budget_below_one_element_is_refused():
    with pytest.raises(ConfigError, match="group_bytes=7 is below one element: use at least 8"):
        make_groups(entries(("a", 1)), 7)


@settings(deadline=None, database=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["embed", "l.0", "l.1", "l.2", "m.0.l.1", "head"]), st.integers(0, 90)
        ),
        max_size=20,
    ),
    st.integers(8, 60),
)
def test_every_tensor_is_in_one_group_and_groups_keep_the_budget(parts, budget):
    sized = entries(*((f"{name}.{i}x", nbytes) for i, (name, nbytes) in enumerate(parts)))
    groups = make_groups(sized, budget)
    table = TensorTable(1, tuple(sized), groups)
    table.validate()  # every element is in one group
    for number, group in enumerate(groups):
        assert group.tensors
        assert table.group_nbytes(number) <= budget
