"""The digest against an oracle in plain Python, element by element."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightwire.digest import SAMPLES, Box, Digester, box_digest, tensor_key
from weightwire.sampling import _GpuPlaces, _Group, sample_places
from weightwire.table import DTYPES

MASK = (1 << 64) - 1
GAMMA, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
FAST = settings(deadline=None, database=None, max_examples=80)


def scramble(value: int) -> int:
    value = ((value ^ (value >> 30)) * MIX_1) & MASK
    value = ((value ^ (value >> 27)) * MIX_2) & MASK
    return value ^ (value >> 31)


def oracle(tensor: torch.Tensor, key: int, places=None) -> int:
    """The sum over the whole tensor, from its raw bytes."""
    size = tensor.element_size()
    raw = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())
    total = 0
    for index in range(tensor.numel()) if places is None else places:
        piece = raw[index * size : (index + 1) * size]
        # Wider integers extend the sign, except that of single bytes.
        bits = int.from_bytes(piece, "little", signed=size > 1) & MASK
        if size == 8:
            bits = scramble(bits)
        total += (bits + 1) * (scramble((index * GAMMA + key) & MASK) | 1)
    return total & MASK


def digest(tensor, shape=None, offsets=None, *, key=None, verify="full", version=1) -> int:
    return box_digest(
        tensor,
        key=tensor_key("w") if key is None else key,
        shape=tuple(tensor.shape) if shape is None else shape,
        offsets=(0,) * tensor.dim() if offsets is None else offsets,
        verify=verify,
        version=version,
    )


def described(tensor, key, shape=None, offsets=None) -> Box:
    sizes = tuple(tensor.shape)
    strides = None if tensor.is_contiguous() else tensor.stride()
    origin = (0,) * len(sizes)
    return Box(key, shape or sizes, offsets or origin, sizes, tensor.element_size(), strides)


def sample_digests(tensors, keys, version) -> list[int]:
    boxes = [described(tensor, key) for tensor, key in zip(tensors, keys, strict=True)]
    return Digester([boxes]).digests(0, tensors, "sample", version)


def on_a_device(groups: list[list[Box]], tensors: list[list[torch.Tensor]], version) -> list[int]:
    """The way of GPUs, which needs none to be right."""
    places = _GpuPlaces([box for boxes in groups for box in boxes], torch.device("cpu"))
    found, first = [], 0
    for boxes, held in zip(groups, tensors, strict=True):
        sums = np.zeros(len(boxes), np.uint64)
        for run in _Group(boxes).runs(held):
            sums[run.rows] = places.sums(run, first, version)()
        found += sums.tolist()
        first += len(boxes)
    return found


def random_tensor(shape: tuple[int, ...], name: str, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    dtype = DTYPES[name]
    numel = math.prod(shape)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).to(torch.bool)
    raw = torch.randint(0, 256, (numel * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).view(shape)


shapes = st.lists(st.integers(1, 7), min_size=0, max_size=4).map(tuple)
dtypes = st.sampled_from(sorted(DTYPES))
seeds = st.integers(0, 1 << 30)


@FAST
@given(shapes, dtypes, seeds, st.integers(-(1 << 63), (1 << 63) - 1))
def test_full_is_the_oracles_sum_for_every_dtype(shape, dtype, seed, key):
    tensor = random_tensor(shape, dtype, seed)
    assert digest(tensor, key=key) == oracle(tensor, key)


@FAST
@given(shapes, dtypes, seeds, st.data())
def test_digests_add_up_over_any_grid_of_boxes(shape, dtype, seed, data):
    tensor = random_tensor(shape, dtype, seed)
    spans = []
    for extent in shape:
        cuts = data.draw(st.lists(st.integers(0, extent), max_size=2))
        spans.append(list(itertools.pairwise([0, *sorted(cuts), extent])))
    for verify in ("full", "sample"):
        parts = 0
        for box in itertools.product(*spans):
            part = tensor[tuple(slice(a, b) for a, b in box)] if shape else tensor
            parts += digest(part.contiguous(), shape, tuple(a for a, _ in box), verify=verify)
        assert parts & MASK == digest(tensor, verify=verify)


@pytest.mark.parametrize("verify", ["full", "sample"])
def test_boxes_of_a_tensor_larger_than_the_sample_add_up(verify):
    tensor = random_tensor((130, 140), "bfloat16", 5)
    whole = digest(tensor, verify=verify)
    rows = [
        digest(tensor[a:b].contiguous(), (130, 140), (a, 0), verify=verify)
        for a, b in itertools.pairwise([0, 1, 57, 130])
    ]
    columns = [
        digest(tensor[:, a:b].contiguous(), (130, 140), (0, a), verify=verify)
        for a, b in itertools.pairwise([0, 99, 140])
    ]
    assert sum(rows) & MASK == whole
    assert sum(columns) & MASK == whole


@FAST
@given(shapes, dtypes, seeds, st.data())
def test_every_single_flipped_bit_is_found_in_full(shape, dtype, seed, data):
    tensor = random_tensor(shape, "uint8" if dtype == "bool" else dtype, seed)
    flat = tensor.reshape(-1).view(torch.uint8)
    before = digest(tensor)
    at = data.draw(st.integers(0, flat.numel() - 1))
    flat[at] ^= 1 << data.draw(st.integers(0, 7))
    assert digest(tensor) != before


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "int64", "int8", "bool"])
def test_an_element_that_changes_places_is_found_in_full(dtype):
    digests = set()
    for place in range(60):
        tensor = torch.ones(60, dtype=DTYPES[dtype])
        tensor[place] = 0 if dtype == "bool" else 2
        digests.add(digest(tensor))
    assert len(digests) == 60


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_a_sign_that_moves_to_another_element_is_found_in_full(dtype):
    digests = set()
    for place in range(60):
        tensor = torch.ones(60, dtype=DTYPES[dtype])
        tensor[place] = -1.0
        digests.add(digest(tensor))
    assert len(digests) == 60


def test_the_same_bits_under_another_name_or_shape_offset_count_differently():
    tensor = random_tensor((8,), "float32", 1)
    assert digest(tensor, key=tensor_key("a")) != digest(tensor, key=tensor_key("b"))
    assert digest(tensor, (16,), (0,)) != digest(tensor, (16,), (8,))


def test_zeros_are_not_the_digest_of_nothing():
    assert digest(torch.zeros(4)) not in (0, digest(torch.zeros(5)))
    assert digest(torch.empty(0)) == 0
    assert digest(torch.zeros(4), verify="off") == 0


@FAST
@given(st.integers(1, 1 << 40), st.integers(0, 1 << 40))
def test_the_sample_has_one_place_in_each_part_of_the_tensor(total, version):
    places = sample_places(total, tensor_key("w"), version).tolist()
    wanted = min(total, SAMPLES)
    assert len(places) == wanted
    assert len(set(places)) == wanted
    for i, place in enumerate(places):
        assert i * total // wanted <= place < (i + 1) * total // wanted


def test_the_sample_is_the_same_on_both_sides_and_varies_by_version_and_tensor():
    key = tensor_key("w")
    first = sample_places(1 << 20, key, 1)
    assert torch.equal(first, sample_places(1 << 20, key, 1))
    for other in (sample_places(1 << 20, key, 2), sample_places(1 << 20, tensor_key("v"), 1)):
        assert int((first == other).sum()) < SAMPLES // 10


def test_versions_together_look_at_most_of_a_tensor():
    total = 4 * SAMPLES
    seen = set()
    for version in range(40):
        seen.update(sample_places(total, tensor_key("w"), version).tolist())
    assert len(seen) > 0.99 * total


def test_the_sample_sums_what_it_looks_at():
    tensor = random_tensor((5000,), "float32", 3)
    key = tensor_key("w")
    places = sample_places(5000, key, 9).tolist()
    assert digest(tensor, verify="sample", version=9) == oracle(tensor, key, places)


@pytest.mark.parametrize("size", [1, 7, SAMPLES])
def test_small_tensors_are_compared_whole_even_in_a_sample(size):
    tensor = random_tensor((size,), "bfloat16", 2)
    assert digest(tensor, verify="sample") == digest(tensor, verify="full")


def test_chunks_of_a_large_tensor_leave_no_seam():
    size = (1 << 16) + 3
    tensor = random_tensor((size,), "int16", 8)
    assert digest(tensor) == oracle(tensor, tensor_key("w"))


@FAST
@given(
    st.lists(st.tuples(st.integers(0, 3 * SAMPLES), dtypes, seeds), max_size=6),
    st.integers(0, 1 << 40),
)
def test_samples_of_many_tensors_together_are_those_of_each(parts, version):
    tensors = [random_tensor((size,), dtype, seed) for size, dtype, seed in parts]
    keys = [tensor_key(f"w{i}") for i in range(len(tensors))]
    assert sample_digests(tensors, keys, version) == [
        digest(tensor, key=key, verify="sample", version=version)
        for tensor, key in zip(tensors, keys, strict=True)
    ]


@FAST
@given(st.lists(st.tuples(shapes, dtypes, seeds, st.data()), min_size=1, max_size=6), st.data())
def test_boxes_together_here_and_on_a_device_give_what_each_gives_alone(parts, data):
    version = 5
    tensors, boxes, expected = [], [], []
    for number, (shape, dtype, seed, inner) in enumerate(parts):
        whole = random_tensor(shape, dtype, seed)
        spans = [sorted(inner.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
        offsets = tuple(a for a, _ in spans)
        box = whole[tuple(slice(a, b) for a, b in spans)] if shape else whole
        if inner.draw(st.booleans()):
            box = box.contiguous()
        key = tensor_key(f"w{number}")
        tensors.append(box)
        boxes.append(described(box, key, shape, offsets))
        expected.append(
            digest(box.contiguous(), shape, offsets, key=key, verify="sample", version=version)
        )
    at = data.draw(st.integers(0, len(boxes)))
    groups = [boxes[:at], boxes[at:]]
    held = [tensors[:at], tensors[at:]]
    digester = Digester(groups)
    for _ in range(2):  # prepared, and as it was prepared
        assert [
            value
            for group in range(2)
            for value in digester.digests(group, held[group], "sample", version)
        ] == expected
    assert on_a_device(groups, held, version) == expected


def test_large_tensors_give_the_same_on_a_device():
    tensors = [random_tensor((1000, 77 + i), "bfloat16", i) for i in range(3)]
    keys = [tensor_key(f"w{i}") for i in range(3)]
    boxes = [described(tensor, key) for tensor, key in zip(tensors, keys, strict=True)]
    for version in (1, 1 << 40):
        expected = [
            digest(tensor, key=key, verify="sample", version=version)
            for tensor, key in zip(tensors, keys, strict=True)
        ]
        assert sample_digests(tensors, keys, version) == expected
        assert on_a_device([boxes], [tensors], version) == expected


def test_a_digester_follows_its_boxes_to_other_memory():
    tensors = [random_tensor((40, 40), "float32", seed) for seed in range(4)]
    digester = Digester([[described(tensors[0], tensor_key("w"))]])
    for tensor in tensors:
        assert digester.digests(0, [tensor], "sample", 1) == [digest(tensor, verify="sample")]
    kept = tensors[3]
    kept[3:] += 1
    assert digester.digests(0, [kept], "sample", 1) == [digest(kept, verify="sample")]


@pytest.mark.parametrize("rows", [8192, 3], ids=["all held", "some held"])
def test_what_was_prepared_for_a_version_is_what_it_would_have_been(monkeypatch, rows):
    monkeypatch.setattr("weightwire.sampling._ROWS", rows)
    tensors = [random_tensor((20 + i, 30), "bfloat16", i) for i in range(6)]
    groups = [tensors[:2], tensors[2:4], tensors[4:]]
    keys = {id(tensor): tensor_key(f"w{i}") for i, tensor in enumerate(tensors)}
    digester = Digester([[described(t, keys[id(t)]) for t in group] for group in groups])
    for version in (1, 2, 2, 5):
        digester.prepare(0, "sample", version)
        digester.prepare(2, "sample", version + 1)  # for a version that doesn't come
        pending = [
            digester.start(number, group, "sample", version) for number, group in enumerate(groups)
        ]
        assert [give() for give in pending] == [
            [digest(t, key=keys[id(t)], verify="sample", version=version) for t in group]
            for group in groups
        ]


def test_more_groups_than_places_are_held_for_are_digested_one_after_the_other(monkeypatch):
    monkeypatch.setattr("weightwire.sampling._ROWS", 3)
    tensors = [random_tensor((20 + i, 30), "bfloat16", i) for i in range(7)]
    groups = [tensors[:2], tensors[2:4], [], tensors[4:5], tensors[5:]]
    keys = {id(tensor): tensor_key(f"w{i}") for i, tensor in enumerate(tensors)}
    digester = Digester([[described(t, keys[id(t)]) for t in group] for group in groups])
    for version in (1, 2):
        for number in (0, 1, 2, 3, 4, 1):
            assert digester.digests(number, groups[number], "sample", version) == [
                digest(t, key=keys[id(t)], verify="sample", version=version) for t in groups[number]
            ]


def test_many_small_tensors_of_all_widths_are_digested_as_each_alone():
    generator = torch.Generator().manual_seed(7)
    dtypes = [torch.uint8, torch.int16, torch.bfloat16, torch.float32, torch.int64, torch.bool]
    shapes = [(), (3,), (0, 4), (16, 16), (17, 16), (2, 3, 5), (1,)]
    tensors = [
        torch.randint(0, 2, shape, generator=generator).sub(i).to(dtype)
        for i, (dtype, shape) in enumerate(itertools.product(dtypes, shapes))
    ]
    keys = [tensor_key(f"tensor {i}") for i in range(len(tensors))]
    together = sample_digests(tensors, keys, version=3)
    alone = [
        box_digest(
            tensor,
            key=key,
            shape=tuple(tensor.shape),
            offsets=(0,) * tensor.dim(),
            verify="sample",
            version=3,
        )
        for tensor, key in zip(tensors, keys, strict=True)
    ]
    assert together == alone
