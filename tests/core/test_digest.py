"""The digest against an oracle in plain Python, element by element."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightwire.digest import SAMPLES, Digester, box_digest, tensor_key
from weightwire.sampling import _OnGpu, _OnHost, _padded, sample_places
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


def sample_digests(tensors, keys, version) -> list[int]:
    shapes = [tuple(tensor.shape) for tensor in tensors]
    origins = [(0,) * len(shape) for shape in shapes]
    return Digester(keys, shapes, origins).digests(tensors, "sample", version)


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
@given(st.lists(st.tuples(shapes, dtypes, seeds, st.data()), min_size=1, max_size=6))
def test_boxes_together_here_and_on_a_device_give_what_each_gives_alone(parts):
    """The way of GPUs, which needs none to be right: one gather for all of an element size."""
    version = 5
    by_width: dict[int, list[tuple]] = {}
    for number, (shape, dtype, seed, data) in enumerate(parts):
        whole = random_tensor(shape, dtype, seed)
        spans = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
        box = whole[tuple(slice(a, b) for a, b in spans)].contiguous() if shape else whole
        offsets = tuple(a for a, _ in spans)
        if box.numel():
            row = (box, tensor_key(f"w{number}"), shape, offsets)
            by_width.setdefault(box.element_size(), []).append(row)
    for width, rows in by_width.items():
        boxes, keys, wholes, offsets = map(list, zip(*rows, strict=True))
        expected = [
            box_digest(b, key=k, shape=s, offsets=o, verify="sample", version=version)
            for b, k, s, o in rows
        ]
        assert Digester(keys, wholes, offsets).digests(boxes, "sample", version) == expected
        for form in (_OnHost, _OnGpu):
            part = form(
                list(range(len(rows))),
                width,
                torch.device("cpu"),
                np.array([box.data_ptr() for box in boxes], np.int64),
                np.array(keys, np.int64),
                _padded(wholes, 1),
                _padded(offsets, 0),
                _padded([tuple(box.shape) for box in boxes], 1),
            )
            assert part.sums(version).tolist() == expected


def test_large_tensors_give_the_same_on_a_device():
    tensors = [random_tensor((1000, 77 + i), "bfloat16", i) for i in range(3)]
    keys = [tensor_key(f"w{i}") for i in range(3)]
    addresses = np.array([tensor.data_ptr() for tensor in tensors], np.int64)
    shapes = _padded([tuple(tensor.shape) for tensor in tensors], 1)
    part = _OnGpu([0, 1, 2], 2, torch.device("cpu"), addresses, np.array(keys), shapes, None, None)
    for version in (1, 1 << 40):
        assert part.sums(version).tolist() == sample_digests(tensors, keys, version)


def test_a_digester_follows_its_boxes_to_other_memory():
    digester = Digester([tensor_key("w")], [(40, 40)], [(0, 0)])
    for seed in range(4):
        tensor = random_tensor((40, 40), "float32", seed)
        assert digester.digests([tensor], "sample", 1) == [digest(tensor, verify="sample")]
    kept = tensor
    kept[3:] += 1
    assert digester.digests([kept], "sample", 1) == [digest(kept, verify="sample")]
    narrow = tensor[:20].contiguous()
    assert digester.digests([narrow], "sample", 1) == [
        digest(narrow, (40, 40), (0, 0), verify="sample")
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
