"""Plans: what is cut, packed and split, without processes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightwire.contract import Policy
from weightwire.errors import TableMismatch, TransferError
from weightwire.table import Group, Region, Shard, TensorEntry, TensorTable
from weightwire_nccl.pieces import ReadPlan, decode_regions, encode_regions, shards_by_owner
from weightwire_nccl.records import Header

dims = st.lists(st.integers(0, 9), min_size=0, max_size=3).map(tuple)


def table_of(shape: tuple[int, ...], owners: int) -> TensorTable:
    """One tensor, cut into rows over the owners."""
    rows = shape[0] if shape else 1
    shards = []
    for owner in range(owners if shape else 1):
        begin, end = rows * owner // owners, rows * (owner + 1) // owners
        offsets = (begin, *(0 for _ in shape[1:])) if shape else ()
        sizes = (end - begin, *shape[1:]) if shape else ()
        shards.append(Shard(owner, offsets, sizes))
    entry = TensorEntry("weight", shape, "float32", tuple(shards))
    return TensorTable(owners, (entry,), (Group((0,)),))


@given(dims, st.integers(1, 4), st.integers(64, 4096), st.data())
def test_pieces_cover_a_region_once(shape, owners, bucket_bytes, data):
    table = table_of(shape, owners)
    offsets = tuple(data.draw(st.integers(0, n)) for n in shape)
    sizes = tuple(data.draw(st.integers(0, n - at)) for n, at in zip(shape, offsets, strict=True))
    plan = ReadPlan(table, [Region(0, offsets, sizes)], bucket_bytes)
    marks = np.zeros(shape, dtype=int)
    total = 0
    for held in shards_by_owner(table).values():
        channel = plan.channel(held)
        total += channel.nbytes
        batches = channel.of_group(0)
        for batch in batches:
            assert 0 < sum(message.nbytes for message in batch) <= bucket_bytes
            for message in batch:
                assert message.nbytes == sum(piece.nbytes for piece in message.pieces)
        for piece in [piece for batch in batches for message in batch for piece in message.pieces]:
            box = tuple(slice(b, b + n) for b, n in zip(piece.begin, piece.sizes, strict=True))
            marks[box] += 1
            assert piece.nbytes == 4 * int(np.prod(piece.sizes))
    wanted = np.zeros(shape, dtype=int)
    wanted[tuple(slice(at, at + n) for at, n in zip(offsets, sizes, strict=True))] = 1
    assert (marks == wanted).all()
    assert total == 4 * wanted.sum()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=8, unique=True))
def test_plans_travel_as_they_are(corners):
    table = table_of((5, 5), 1)
    regions = [Region(0, corner, (2, 2)) for corner in corners]
    assert decode_regions(encode_regions(regions), table, "a reader") == regions


@pytest.mark.parametrize(
    "numbers",
    [
        [0, 2, 0, 0, 6, 5],  # too many rows
        [0, 2, -1, 0, 1, 1],  # begins before the tensor
        [1, 2, 0, 0, 1, 1],  # no such tensor
        [0, 3, 0, 0, 0, 1, 1, 1],  # another number of dimensions
        [0, 2, 0, 0, 1],  # ends early
        [0],
        [0, 2, 0, 0, 1, 1, 0, 2, 0, 0, 1, 1],  # one region twice
        [0, 1 << 62],
    ],
)
def test_a_plan_that_doesnt_fit_is_refused(numbers):
    payload = np.asarray(numbers, dtype="<i8").tobytes()
    with pytest.raises(TableMismatch, match="receiver 'x' rank 0"):
        decode_regions(payload, table_of((5, 5), 1), "receiver 'x' rank 0")


def test_a_plan_of_half_numbers_is_refused():
    with pytest.raises(TableMismatch):
        decode_regions(b"\0" * 12, table_of((5, 5), 1), "receiver 'x' rank 0")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("policy", Policy(1, 3, 1)),
        ("generation", 8),
        ("group", 5),
        ("nbytes", 11),
        ("plan", b"q" * 16),
    ],
)
def test_a_header_says_what_differs(field, value):
    mine = Header(Policy(1, 2, 1), group=4, generation=7, nbytes=10, plan=b"p" * 16, seal=3)
    assert Header.decode(mine.encode(), "x") == mine
    fields = {name: getattr(mine, name) for name in mine.__dataclass_fields__}
    theirs = Header(**{**fields, field: value})
    assert mine.difference(mine) == ""
    assert field in mine.difference(Header.decode(theirs.encode(), "x"))


def test_what_isnt_a_header_is_refused():
    mine = Header(Policy(1, 2, 1), 4, 7, 10, b"p" * 16)
    with pytest.raises(TransferError, match="sender rank 3"):
        Header.decode(b"x" + mine.encode()[1:], "sender rank 3")
