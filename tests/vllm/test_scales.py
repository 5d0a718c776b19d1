"""Scales of a quantised KV cache, which vLLM's dummy load fills at random, become a load's."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from weightwire_vllm.layers import finish_attention

SCALES = ("_k_scale", "_v_scale", "_q_scale", "_prob_scale", "_k_scale_cpu", "_v_scale_cpu")


class Attention(nn.Module):
    """What vLLM finishes after a load."""

    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        assert dtype is torch.bfloat16


@pytest.fixture(scope="module")
def attention() -> Callable[..., Attention]:
    """With vLLM's own scales and quant method, without an engine around them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's and those of what it imports
        from vllm.model_executor.layers.attention.attention import set_default_quant_scales
        from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

    def make(method: object = None) -> Attention:
        layer = Attention()
        set_default_quant_scales(layer, register_buffer=True)
        layer.quant_method = method if method is not None else BaseKVCacheMethod(None)
        for name in SCALES:
            getattr(layer, name).fill_(3e-4)
        layer._k_scale_float = 3e-4
        return layer

    return make


def finish(
    layer: Attention, *, load_format: str = "dummy", measures: bool = False, is_first: bool = True
) -> None:
    config = SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.bfloat16),
        load_config=SimpleNamespace(load_format=load_format),
        cache_config=SimpleNamespace(calculate_kv_scales=measures),
    )
    finish_attention([layer], config, is_first=is_first)


def test_after_a_dummy_load_they_are_those_of_a_checkpoint_without_any(attention):
    layer = attention()
    held = {name: getattr(layer, name) for name in SCALES}
    finish(layer)
    assert layer._k_scale_float == 1.0
    for name, tensor in held.items():
        assert getattr(layer, name) is tensor  # kernels and CUDA graphs know it
        assert float(tensor) == 1.0


@pytest.mark.parametrize(
    ("method", "options"),
    [
        (None, {"load_format": "safetensors"}),  # they may be the checkpoint's
        (None, {"measures": True}),  # vLLM measures them
        (None, {"is_first": False}),  # they were set by whoever
        (object(), {}),  # vLLM sets them
    ],
)
def test_otherwise_they_stay(attention, method, options):
    layer = attention(method)
    finish(layer, **options)
    assert [float(getattr(layer, name)) for name in SCALES] == pytest.approx([3e-4] * len(SCALES))
