from __future__ import annotations

import pytest
import torch

from weightwire.fingerprint import combine_fingerprints
from weightwire.fingerprinting import Fingerprinter, fingerprint_of
from weightwire.table import Region


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "matrix": torch.randn(40, 50, generator=generator),
        "transposed": torch.randn(50, 40, generator=generator).t(),
        "strided": torch.randn(30, 20, generator=generator)[::2, ::3],
        "half": torch.randn(7, generator=generator).bfloat16(),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "empty": torch.empty(0, 4),
        "flag": torch.tensor([True, False]),
    }


def test_equal_memory_has_equal_fingerprints_whatever_the_order_of_names():
    one = tensors()
    other = dict(reversed(list(tensors().items())))
    assert fingerprint_of(one, 3) == fingerprint_of(other, 3)


@pytest.mark.parametrize("name", ["transposed", "strided", "half", "scalar", "flag"])
def test_another_bit_in_a_small_tensor_changes_the_bits_and_not_the_layout(name):
    one, other = tensors(), tensors()
    small = {key: other[key][..., :5] if key == "transposed" else other[key] for key in other}
    same = {key: one[key][..., :5] if key == "transposed" else one[key] for key in one}
    place = small[name]
    place[(-1,) * place.dim()] = ~place[(-1,) * place.dim()] if name == "flag" else 5
    before, after = fingerprint_of(same, 1), fingerprint_of(small, 1)
    assert before.layout == after.layout
    assert before.bits != after.bits


@pytest.mark.parametrize(
    "change",
    [
        lambda own: own.update(matrix=own["matrix"].reshape(50, 40)),
        lambda own: own.update(half=own["half"].half()),
        lambda own: own.update(transposed=own["transposed"].contiguous()),
        lambda own: own.update(more=torch.zeros(1)),
        lambda own: own.pop("empty"),
    ],
)
def test_another_layout_is_never_compared(change):
    other = tensors()
    change(other)
    assert fingerprint_of(tensors(), 1).layout != fingerprint_of(other, 1).layout


def test_a_replicas_fingerprint_depends_on_each_rank_and_on_their_order():
    ranks = [fingerprint_of(tensors(seed), 1) for seed in (0, 1)]
    whole = combine_fingerprints(ranks)
    assert whole is not None
    assert combine_fingerprints(ranks) == whole
    assert combine_fingerprints(ranks[::-1]) != whole
    assert combine_fingerprints([ranks[0], ranks[0]]) != whole
    assert combine_fingerprints([*ranks, None]) is None


def test_what_is_made_of_other_parts_of_the_table_is_laid_out_otherwise():
    halves = [Region(0, (offset, 0), (20, 50)) for offset in (0, 20)]
    maker, held = Fingerprinter(), {"experts": torch.ones(20, 50)}
    first, second = (maker.of(held, 1, (region,)) for region in halves)
    assert first.layout != second.layout
    assert first.bits == second.bits
    assert Fingerprinter().of(held, 1, (Region(0, (0, 0), (20, 50)),)) == first
