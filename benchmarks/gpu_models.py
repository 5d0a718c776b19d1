"""Models for the benchmarks on GPUs: shapes like Qwen3's, in one buffer."""

from __future__ import annotations

from collections.abc import Callable

import torch

from weightwire.bench_model import views_of

__all__ = ["MODELS", "Shapes", "State", "digest"]

CHUNK = 1 << 26  # elements of a digest's intermediate values
Shapes = dict[str, tuple[int, ...]]


def attention(prefix: str, hidden: int, heads: int, kv_heads: int, head: int) -> Shapes:
    return {
        f"{prefix}.self_attn.q_proj.weight": (heads * head, hidden),
        f"{prefix}.self_attn.k_proj.weight": (kv_heads * head, hidden),
        f"{prefix}.self_attn.v_proj.weight": (kv_heads * head, hidden),
        f"{prefix}.self_attn.o_proj.weight": (hidden, heads * head),
        f"{prefix}.self_attn.q_norm.weight": (head,),
        f"{prefix}.self_attn.k_norm.weight": (head,),
        f"{prefix}.input_layernorm.weight": (hidden,),
        f"{prefix}.post_attention_layernorm.weight": (hidden,),
    }


def mlp(prefix: str, hidden: int, wide: int) -> Shapes:
    return {
        f"{prefix}.gate_proj.weight": (wide, hidden),
        f"{prefix}.up_proj.weight": (wide, hidden),
        f"{prefix}.down_proj.weight": (hidden, wide),
    }


def around(layers: Shapes, hidden: int, vocabulary: int = 151_936) -> Shapes:
    return {
        "model.embed_tokens.weight": (vocabulary, hidden),
        **layers,
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocabulary, hidden),
    }


def qwen3_8b(layers: int = 36) -> Shapes:
    found: Shapes = {}
    for i in range(layers):
        found |= attention(f"model.layers.{i}", 4096, 32, 8, 128)
        found |= mlp(f"model.layers.{i}.mlp", 4096, 12_288)
    return around(found, 4096)


def qwen3_30b_a3b(layers: int = 48, *, fused: bool = True) -> Shapes:
    """As transformers holds it, a layer's experts in two tensors; or as its checkpoint has it."""
    found: Shapes = {}
    for i in range(layers):
        found |= attention(f"model.layers.{i}", 2048, 32, 4, 128)
        found[f"model.layers.{i}.mlp.gate.weight"] = (128, 2048)
        if fused:
            found[f"model.layers.{i}.mlp.experts.gate_up_proj"] = (128, 2 * 768, 2048)
            found[f"model.layers.{i}.mlp.experts.down_proj"] = (128, 2048, 768)
        for expert in range(0 if fused else 128):
            found |= mlp(f"model.layers.{i}.mlp.experts.{expert}", 2048, 768)
    return around(found, 2048)


MODELS: dict[str, Callable[[], Shapes]] = {
    "qwen3-8b": qwen3_8b,
    "qwen3-30b-a3b": qwen3_30b_a3b,
    "qwen3-30b-a3b-checkpoint": lambda: qwen3_30b_a3b(fused=False),
    "tiny": lambda: around(mlp("model.layers.0.mlp", 1024, 2048), 1024, 1000),
}


class State:
    """A state dict in one buffer, whose bits can be changed and digested at once."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype, device: torch.device) -> None:
        numel = sum(int(torch.Size(shape).numel()) for shape in shapes.values())
        self.flat = torch.zeros(-(-numel // 4) * 4, dtype=dtype, device=device)
        self.tensors = views_of(self.flat, shapes)
        self.numel = numel

    def change(self, seed: int) -> None:
        """Other weights, as after an optimizer step."""
        generator = torch.Generator(self.flat.device).manual_seed(seed)
        if self.flat.dtype is torch.float32:
            self.flat.normal_(generator=generator)
        else:
            self.flat.view(torch.int64).random_(generator=generator)

    def digest(self) -> int:
        return digest(self.flat)


def digest(flat: torch.Tensor) -> int:
    """Of the values in bfloat16: each element's bits, weighted by where it lies."""
    total = 0
    for begin in range(0, flat.numel(), CHUNK):
        bits = flat[begin : begin + CHUNK].bfloat16().view(torch.int16).to(torch.int64)
        place = torch.arange(begin, begin + bits.numel(), device=bits.device)
        total += int(((bits + 1) * (place * 0x9E3779B97F4A7C1 | 1)).sum().item())
    return total & ((1 << 64) - 1)
