from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightwire.errors import ConfigError
from weightwire.grouping import layer_key, make_groups
from weightwire.table import Shard, TensorEntry


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


def test_a_tensor_above_the_budget_is_a_group_of_its_own():
    sized = entries(("l.0.a", 4), ("l.0.huge", 100), ("l.0.b", 4))
    assert named(sized, 10) == [["l.0.a"], ["l.0.huge"], ["l.0.b"]]


def test_a_budget_below_one_element_is_refused():
    with pytest.raises(ConfigError, match="group_bytes=7 is below one element: use at least 8"):
        make_groups(entries(("a", 1)), 7)


@settings(deadline=None, database=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["embed", "l.0", "l.1", "l.2", "m.0.l.1", "head"]), st.integers(0, 40)
        ),
        max_size=20,
    ),
    st.integers(8, 60),
)
def test_every_tensor_is_in_one_group_and_groups_keep_the_budget(parts, budget):
    sized = entries(*((f"{name}.{i}x", nbytes) for i, (name, nbytes) in enumerate(parts)))
    groups = make_groups(sized, budget)
    assert sorted(i for group in groups for i in group.tensors) == list(range(len(sized)))
    for group in groups:
        nbytes = [sized[i].nbytes for i in group.tensors]
        assert nbytes
        assert sum(nbytes) <= budget or len([n for n in nbytes if n]) == 1
