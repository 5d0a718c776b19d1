"""Warm A→B is cold B, then A→B→B and A→B→A, for every family."""

from __future__ import annotations

import pytest
import torch

from weightwire.errors import TraceError
from weightwire_vllm.compare import reachable_tensors
from weightwire_vllm.families import FAMILIES
from weightwire_vllm.inprocess import on_model

SLICE = ("deepseek_v3",)  # experts, MLA, a router bias in fp32, several layer kinds
QUANTISED = (
    "qwen3@fp8_per_channel",
    "llama@fp8_per_channel",
    "qwen3@int8_per_channel_weight_only",
)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in SLICE else pytest.mark.soak)
        for kind in (*FAMILIES, *QUANTISED)
        if kind != "mamba2"
    ],
)
def test_updates_equal_cold_engines(labs, kind, record_property):
    lab = labs(kind)
    assert lab.cold["A"].logprobs != lab.cold["B"].logprobs
    before = addresses(lab)
    lab.target.plan(lab.of("A").table)
    record_property("traced", lab.target.path)  # for the table in docs/vllm.md
    for which in ("B", "B", "A"):
        assert lab.sync(lab.of(which), poison=True) is None
        lab.is_(which)
    assert addresses(lab) == before
    assert lab.target.path.startswith("traced")


@pytest.mark.soak
def test_a_buffer_that_nothing_refreshes_is_refused_by_name(labs):
    lab = labs("mamba2")
    with pytest.raises(TraceError, match=r"backbone\.layers\.0\.mixer\.conv_weights"):
        lab.target.plan(lab.of("B").table)
    lab.is_("A")


def refuse(*_args, **_kwargs):
    raise AssertionError("load_weights ran again")


def addresses(lab):
    tensors = on_model(lab.llm, reachable_tensors)
    return {path: tensor.data_ptr() for path, tensor in tensors.items()}


def test_models_differ_in_every_tensor(labs):
    lab = labs("deepseek_v3")
    a, b = (lab.of(which).tensors for which in ("A", "B"))
    assert all(not torch.equal(a[name], b[name]) for name in a)
