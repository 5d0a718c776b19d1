"""The same with CPU weight packing on, as engines really run: outputs are compared."""

from __future__ import annotations

import pytest

from weightwire.errors import UnsupportedOperation
from weightwire_vllm.compare import snapshot
from weightwire_vllm.inprocess import on_model


@pytest.fixture(params=["qwen3-tied", "qwen3_moe"], scope="module")
def lab(request, labs):
    return labs(request.param, packed=True)


def test_packed_engines_follow(lab):
    # With tied embeddings the output layer packs its own copy of the shared matrix.
    assert lab.cold["A"].logprobs != lab.cold["B"].logprobs
    for which in ("B", "B", "A"):
        assert lab.sync(lab.of(which), poison=True) is None
        lab.is_(which)


def test_packed_engines_survive_a_failure(lab):
    lab.sync(lab.of("A"))
    assert lab.sync(lab.of("B"), stop_before=0) is True
    lab.is_("A")
    lab.sync(lab.of("B"), stop_before=2)
    lab.now()
    lab.sync(lab.of("B"))
    lab.is_("B")


def test_packed_engines_are_not_compared(lab):
    with pytest.raises(UnsupportedOperation, match="comparable_engines"):
        on_model(lab.llm, snapshot)
