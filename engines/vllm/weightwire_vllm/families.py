"""Tiny random configs of model families: every layer kind, kv heads below heads, padded vocabulary.

Sizes are the smallest that vLLM's CPU kernels take.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["FAMILIES", "family_model"]

BASE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "tie_word_embeddings": False,
}
HEADS = {"head_dim": 32}
MLA = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}

Family = tuple[str, dict[str, Any]]

FAMILIES: dict[str, Family] = {
    "qwen3": ("Qwen3", {**BASE, **HEADS}),
    "qwen3-tied": ("Qwen3", {**BASE, **HEADS, "tie_word_embeddings": True}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            **BASE,
            **HEADS,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
    ),
    "llama": ("Llama", {**BASE, **HEADS, "attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("Llama", {**BASE, **HEADS, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {**BASE, "hidden_size": 128}),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            **BASE,
            "hidden_size": 128,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
        },
    ),
    "mixtral": (
        "Mixtral",
        {**BASE, **HEADS, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "gemma2": (
        "Gemma2",
        {**BASE, **HEADS, "tie_word_embeddings": True, "query_pre_attn_scalar": 32},
    ),
    "gemma3": (
        "Gemma3Text",
        {**BASE, **HEADS, "tie_word_embeddings": True, "query_pre_attn_scalar": 32},
    ),
    "phi3": ("Phi3", {**BASE, "hidden_size": 128, "sliding_window": None}),
    "gpt2": (
        "GPT2",
        {
            "vocab_size": 300,
            "n_embd": 128,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 256,
            "bos_token_id": 0,
            "eos_token_id": 1,
        },
    ),
    "glm4": ("Glm4", {**BASE, **HEADS, "attention_bias": True}),
    "glm4_moe": (
        "Glm4Moe",
        {
            **BASE,
            **HEADS,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "attention_bias": True,
            "use_qk_norm": True,
        },
    ),
    "deepseek_v2": (
        "DeepseekV2",
        {
            **BASE,
            **MLA,
            "q_lora_rank": None,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {**BASE, **MLA, "q_lora_rank": 48, "n_group": 2, "topk_group": 1},
    ),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {
            **BASE,
            **HEADS,
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 32,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
        },
    ),
    "granitemoe": (
        "GraniteMoe",
        {**BASE, "hidden_size": 128, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "olmoe": (
        "Olmoe",
        {**BASE, "hidden_size": 128, "num_experts": 4, "num_experts_per_tok": 2},
    ),
    "mamba2": (
        "Mamba2",
        {
            "vocab_size": 300,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_heads": 4,
            "head_dim": 32,
            "state_size": 16,
            "n_groups": 2,
            "chunk_size": 16,
            "use_conv_bias": True,
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 1,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            **BASE,
            **HEADS,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 32,
        },
    ),
    "qwen3_next": (
        "Qwen3Next",
        {
            **BASE,
            **HEADS,
            "num_hidden_layers": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
    ),
    "olmo2": ("Olmo2", {**BASE, "hidden_size": 128}),
}


def family_model(kind: str, seed: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A seeded random model in which every tensor differs from every other seed's."""
    import transformers

    name, options = FAMILIES[kind]
    config = getattr(transformers, f"{name}Config")(**options)
    if kind == "deepseek_v3":
        config.topk_method = "noaux_tc"  # read by vLLM, and no option of the config class
    head = {"GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM"}.get(name)
    model = getattr(transformers, head or f"{name}ForCausalLM")(config)
    model = model.to(dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        state = model.state_dict(keep_vars=True)
        for key, tensor in sorted(state.items()):
            if not tensor.is_floating_point():
                continue
            noise = torch.randn(tensor.shape, generator=generator) * 0.08
            is_norm = tensor.dim() == 1 and key.endswith("norm.weight")
            tensor.copy_(noise + 1.0 if is_norm else noise)
    return model
