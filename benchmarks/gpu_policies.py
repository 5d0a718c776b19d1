"""Policies of 1 to 8 B parameters for engines on one GPU: config and checkpoint shapes."""

from __future__ import annotations

from typing import Any

from gpu_models import Shapes, around, attention, mlp

__all__ = ["config", "shapes"]

_ROPE = {"rope_theta": 1e6, "rope_type": "default"}
_COMMON: dict[str, Any] = {
    "vocab_size": 32_000, "hidden_size": 2048, "num_attention_heads": 16,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "tie_word_embeddings": False, "attention_bias": False, "torch_dtype": "bfloat16",
    "bos_token_id": 0, "eos_token_id": 1, "rope_theta": 1e6,
}  # fmt: skip
_KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 32,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 8192,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
        "num_hidden_layers": 8, "num_key_value_heads": 4, "head_dim": 128,
        "intermediate_size": 8192, "num_experts": 64, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "deepseek_v3": {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
        "num_hidden_layers": 8, "num_key_value_heads": 16, "intermediate_size": 8192,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        "first_k_dense_replace": 1, "n_group": 8, "topk_group": 4, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        "moe_layer_freq": 1, "num_nextn_predict_layers": 0,
    },
}  # fmt: skip


def config(kind: str, **overrides: Any) -> dict[str, Any]:
    """Of a Hugging Face checkpoint."""
    return {**_COMMON, **_KINDS[kind], **overrides}


def shapes(kind: str, **overrides: Any) -> Shapes:
    """The tensors of its checkpoint."""
    c = config(kind, **overrides)
    hidden, found = c["hidden_size"], Shapes()
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}"
        if kind == "deepseek_v3":
            found |= _mla(at, c)
        else:
            heads = (c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"])
            found |= attention(at, hidden, *heads)
        if kind == "qwen3" or i < c.get("first_k_dense_replace", 0):
            found |= mlp(f"{at}.mlp", hidden, c["intermediate_size"])
            continue
        experts, wide = c.get("num_experts", c.get("n_routed_experts")), c["moe_intermediate_size"]
        found[f"{at}.mlp.gate.weight"] = (experts, hidden)
        if kind == "deepseek_v3":
            found[f"{at}.mlp.gate.e_score_correction_bias"] = (experts,)
            found |= mlp(f"{at}.mlp.shared_experts", hidden, wide * c["n_shared_experts"])
        for expert in range(experts):
            found |= mlp(f"{at}.mlp.experts.{expert}", hidden, wide)
    return around(found, hidden, c["vocab_size"])


def _mla(at: str, c: dict[str, Any]) -> Shapes:
    hidden, heads, lora = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    return {
        f"{at}.self_attn.q_a_proj.weight": (c["q_lora_rank"], hidden),
        f"{at}.self_attn.q_a_layernorm.weight": (c["q_lora_rank"],),
        f"{at}.self_attn.q_b_proj.weight": (heads * (nope + rope), c["q_lora_rank"]),
        f"{at}.self_attn.kv_a_proj_with_mqa.weight": (lora + rope, hidden),
        f"{at}.self_attn.kv_a_layernorm.weight": (lora,),
        f"{at}.self_attn.kv_b_proj.weight": (heads * (nope + value), lora),
        f"{at}.self_attn.o_proj.weight": (hidden, heads * value),
        f"{at}.input_layernorm.weight": (hidden,),
        f"{at}.post_attention_layernorm.weight": (hidden,),
    }
