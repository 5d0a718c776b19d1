from __future__ import annotations

import contextlib
import itertools
import time

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightwire.errors import TableMismatch
from weightwire.table import (
    DTYPES,
    Group,
    Shard,
    TensorEntry,
    TensorTable,
    dtype_from_name,
    dtype_name,
    validate_tensor_name,
)

FAST = settings(deadline=None, database=None, max_examples=150)


def entry(name="w", shape=(4, 6), dtype="float32", shards=None) -> TensorEntry:
    whole = (Shard(0, (0,) * len(shape), shape),)
    return TensorEntry(name, shape, dtype, whole if shards is None else tuple(shards))


def table(*entries: TensorEntry, groups=None, ties=None, world_size=4) -> TensorTable:
    if groups is None:
        groups = (Group(tuple(range(len(entries)))),)
    return TensorTable(world_size, entries, tuple(groups), ties or {})


def refusal(bad: TensorTable) -> str:
    with pytest.raises(TableMismatch) as caught:
        bad.validate()
    return str(caught.value).splitlines()[0]


def split(shape: tuple[int, ...], cuts: list[list[int]]) -> list[Shard]:
    """The grid of boxes between the cuts of each dimension."""
    spans = []
    for extent, inner in zip(shape, cuts, strict=True):
        edges = [0, *sorted(inner), extent]
        spans.append([(a, b - a) for a, b in itertools.pairwise(edges)])
    return [
        Shard(i % 4, tuple(a for a, _ in box), tuple(n for _, n in box))
        for i, box in enumerate(itertools.product(*spans))
    ]


shapes = st.lists(st.integers(0, 6), min_size=0, max_size=4).map(tuple)


@st.composite
def tilings(draw) -> tuple[tuple[int, ...], list[Shard]]:
    shape = draw(shapes)
    cuts = [draw(st.lists(st.integers(0, n), max_size=3)) for n in shape]
    return shape, draw(st.permutations(split(shape, cuts)))


def test_a_table_survives_its_encoding_and_equal_tables_have_equal_digests():
    first = table(entry("a"), entry("b", (), "int64"), ties={"c": "a"})
    again = TensorTable.decode(first.encode())
    assert again == first
    assert again.digest() == first.digest()
    assert first.digest() != table(entry("a"), entry("b", (), "int32"), ties={"c": "a"}).digest()


def test_sizes_count_payload_once():
    sent = table(
        entry("a"), entry("b", (3,), "bfloat16"), groups=[Group((1,)), Group((0,))], ties={"c": "a"}
    )
    assert sent.nbytes == 4 * 6 * 4 + 3 * 2
    assert sent.max_group_nbytes == 96
    assert sent.names() == ["a", "b", "c"]


@FAST
@given(tilings())
def test_shards_that_tile_a_tensor_are_accepted(tiling):
    shape, shards = tiling
    table(entry(shape=shape, shards=shards)).validate()


@FAST
@given(tilings(), st.data())
def test_shards_are_accepted_exactly_when_each_element_has_one_owner(tiling, data):
    shape, shards = tiling
    if not shape or not shards or 0 in shape:
        return
    moved = data.draw(st.integers(0, len(shards) - 1))
    box = shards[moved]
    offsets = tuple(
        data.draw(st.integers(0, n - size)) for n, size in zip(shape, box.sizes, strict=True)
    )
    changed = [*shards]
    changed[moved] = Shard(box.owner, offsets, box.sizes)
    counts = torch.zeros(shape, dtype=torch.int64)
    for shard in changed:
        where = tuple(slice(o, o + n) for o, n in zip(shard.offsets, shard.sizes, strict=True))
        counts[where] += 1
    bad = table(entry(shape=shape, shards=changed))
    if bool((counts == 1).all()):
        bad.validate()
    else:
        assert refusal(bad) == (
            "tensor 'w': its shards overlap; every element needs exactly one owner"
        )


def test_overlapping_shards_of_the_right_total_are_refused():
    shards = [Shard(0, (0, 0), (2, 6)), Shard(1, (1, 0), (2, 6))]
    assert "tensor 'w': its shards overlap" in refusal(table(entry(shards=shards)))


def test_the_same_shard_twice_is_refused():
    assert "overlap" in refusal(table(entry(shape=(4,), shards=[Shard(0, (0,), (2,))] * 2)))


def test_shards_that_leave_a_hole_are_refused_with_both_counts():
    assert refusal(table(entry(shards=[Shard(0, (0, 0), (3, 6))]))) == (
        "tensor 'w': shards hold 18 of 24 elements; every element needs exactly one owner"
    )


def test_many_shards_are_checked_in_time_linear_in_their_number():
    rows = 60_000
    shards = [Shard(0, (i, 0), (1, 8)) for i in range(rows)]
    began = time.process_time()
    table(entry(shape=(rows, 8), shards=shards)).validate()
    assert time.process_time() - began < 10  # a pairwise check takes minutes


@pytest.mark.parametrize(
    "shard",
    [
        Shard(4, (0, 0), (4, 6)),
        Shard(0, (0,), (4, 6)),
        Shard(0, (0, 0), (4,)),
        Shard(0, (1, 0), (4, 6)),
        Shard(0, (0, 0), (4, 7)),
    ],
    ids=["owner", "offsets", "sizes", "first dimension", "last dimension"],
)
def test_a_shard_outside_the_tensor_or_the_world_is_refused(shard):
    assert refusal(table(entry(shards=[shard]))).startswith("tensor 'w': shard ")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (table(entry("w"), entry("w")), "tensor 'w' is in the table twice: names are keys"),
        (
            table(entry("w"), groups=[]),
            "transfer groups don't hold every tensor exactly once",
        ),
        (
            table(entry("w"), groups=[Group((0,)), Group((0,))]),
            "transfer groups don't hold every tensor exactly once",
        ),
        (
            table(entry("w"), groups=[Group((-1,))]),
            "transfer groups don't hold every tensor exactly once",
        ),
        (table(entry("w"), ties={"w": "w"}), "tie 'w' -> 'w' doesn't name"),
        (table(entry("w"), ties={"v": "u"}), "tie 'v' -> 'u' doesn't name"),
        (table(entry("w"), ties={"v": "w", "u": "v"}), "tie 'u' -> 'v' doesn't name"),
        (table(entry("w"), ties={"../v": "w"}), "tensor name '../v' reads as a path"),
        (table(entry(dtype="complex64")), "unknown wire dtype 'complex64'"),
        (
            table(entry(shape=(1 << 28, 1 << 28))),
            "tensor 'w' of shape (268435456, 268435456) is too large",
        ),
    ],
)
def test_contradictions_are_refused_by_name(bad, message):
    assert refusal(bad).startswith(message)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "a" * 1025,
        "/etc/passwd",
        "..",
        "a/../b",
        "a/./b",
        "a//b",
        "a/",
        "\\\\host\\x",
        "a\\..\\b",
    ],
)
def test_names_that_would_leave_a_directory_are_refused(name):
    with pytest.raises(TableMismatch, match=r"rename the tensor|use 1 to 1024"):
        validate_tensor_name(name)


@pytest.mark.parametrize("name", ["a\nb", "a\0b", "a\x1bb", "a\u202eb"])
def test_names_that_would_garble_a_message_are_refused(name):
    with pytest.raises(TableMismatch, match="unprintable characters: rename the tensor"):
        validate_tensor_name(name)


@pytest.mark.parametrize("name", ["w", "model.layers.0.w", "...", "a..b", "encoder/w", "überm.ß"])
def test_ordinary_names_pass(name):
    assert validate_tensor_name(name) == name


def test_every_dtype_that_travels_has_a_name_and_others_are_refused_with_the_choices():
    for name, dtype in DTYPES.items():
        assert dtype_name(dtype) == name
        assert dtype_from_name(name) is dtype
    with pytest.raises(TableMismatch, match=r"dtype torch.complex64 can't travel: cast .* bool"):
        dtype_name(torch.complex64)


@FAST
@given(st.binary(max_size=400))
def test_arbitrary_bytes_are_a_mismatch_and_nothing_else(payload):
    with pytest.raises(TableMismatch):
        TensorTable.decode(payload)


@settings(FAST, max_examples=400)
@given(st.data())
def test_damaged_tables_are_a_mismatch_and_nothing_else(data):
    payload = bytearray(
        table(entry("a", (4,), shards=split((4,), [[2]])), entry("b", ()), ties={"c": "a"}).encode()
    )
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(payload) - 1))
        payload[at] = data.draw(st.integers(0, 255))
    with contextlib.suppress(TableMismatch):  # and nothing else
        TensorTable.decode(bytes(payload)).validate()


json_like = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)


@FAST
@given(st.fixed_dictionaries(dict.fromkeys(("world_size", "tensors", "groups", "ties"), json_like)))
def test_wrong_types_are_a_mismatch_and_nothing_else(value):
    with contextlib.suppress(TableMismatch):  # and nothing else
        TensorTable.decode(msgspec.msgpack.encode(value)).validate()


def test_deep_nesting_is_a_mismatch():
    with pytest.raises(TableMismatch, match="can't be read"):
        TensorTable.decode(b"\x91" * 100_000)
