"""The model that backends' benchmarks move: 84 tensors with a Llama's proportions."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

__all__ = ["llama_shapes", "views_of"]

_LAYERS = 9


def llama_shapes(parameters: int) -> dict[str, tuple[int, ...]]:
    """84 shapes by name, with about this many parameters."""
    hidden = max(64, int(math.sqrt(parameters / 162.5)) // 64 * 64)
    wide = 4 * hidden
    layer = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden // 4, hidden),
        "self_attn.v_proj": (hidden // 4, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    body = _LAYERS * sum(math.prod(shape) for shape in layer.values()) + hidden
    vocabulary = max(64, (parameters - body) // (2 * hidden))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for i in range(_LAYERS):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    shapes["lm_head.weight"] = (vocabulary, hidden)
    return shapes


def views_of(flat: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Tensors of these shapes, one after the other in a 1-d tensor of at least their elements."""
    views, begin = {}, 0
    for name, shape in shapes.items():
        end = begin + math.prod(shape)
        views[name] = flat[begin:end].view(shape)
        begin = end
    return views
