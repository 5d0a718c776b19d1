"""What expert kernels derive from weights follows them, at the addresses of the first load."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from weightwire.errors import TraceError
from weightwire_vllm.kernels import derived_copies


@dataclass
class Scale:
    scale: torch.Tensor


def made(own: torch.Tensor, derived: torch.Tensor) -> tuple[SimpleNamespace, SimpleNamespace]:
    config = SimpleNamespace(_w1=Scale(own), alphas=derived)
    return SimpleNamespace(experts=SimpleNamespace(quant_config=config), names=["a"]), config


def method_after(own: torch.Tensor, derived: torch.Tensor) -> SimpleNamespace:
    kernel, config = made(own, derived)
    return SimpleNamespace(moe_kernel=kernel, moe_quant_config=config)


def test_derived_tensors_are_copied_and_the_layers_own_are_left_to_it():
    own, derived = torch.ones(4), torch.ones(2)
    method = method_after(torch.zeros(4), torch.full((2,), 7.0))
    pairs = list(derived_copies("layer", [(method, *made(own, derived))], [own, None]))
    assert {id(old) for old, _ in pairs} == {id(derived)}
    assert all(torch.equal(new, torch.full((2,), 7.0)) for _, new in pairs)


def test_a_kernel_that_wasnt_built_again_needs_nothing():
    kernel, config = made(torch.ones(4), torch.ones(2))
    method = SimpleNamespace(moe_kernel=kernel, moe_quant_config=config)
    assert not list(derived_copies("layer", [(method, kernel, config)], []))


@pytest.mark.parametrize("after", [torch.ones(3), torch.ones(2, dtype=torch.float64)])
def test_what_cant_be_copied_into_place_is_refused_by_name(after):
    own = torch.ones(4)
    method = method_after(torch.zeros(4), after)
    with pytest.raises(TraceError, match="expert kernel"):
        list(derived_copies("layer", [(method, *made(own, torch.ones(2)))], [own]))
