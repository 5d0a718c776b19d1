"""Tiny random models, saved as checkpoints that vLLM and transformers load.

For tests, the demo and conformance runs: real architectures, sizes that start
in seconds on a CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedModel

__all__ = ["TinyKind", "checkpoint_names", "save_checkpoint", "tiny_model"]

TinyKind = Literal["qwen3", "qwen3-tied", "qwen3_moe"]

_COMMON: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}


def tiny_model(
    kind: TinyKind, seed: int, *, dtype: torch.dtype = torch.bfloat16, **overrides: Any
) -> PreTrainedModel:
    """A seeded random model.

    Args:
        kind: architecture; ``qwen3-tied`` shares its input and output embeddings.
        seed: same seed, same bits.
        dtype: of all parameters.
        overrides: further config values.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    options = {**_COMMON, **overrides}
    model: PreTrainedModel
    if kind == "qwen3_moe":
        options = {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "tie_word_embeddings": False,
            **options,
        }
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**options))
    else:
        options = {"tie_word_embeddings": kind == "qwen3-tied", **options}
        model = Qwen3ForCausalLM(Qwen3Config(**options))
    model = model.to(dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator) * 0.08
            # Norm weights stay near one, so that activations keep their scale.
            parameter.copy_(noise + 1.0 if name.endswith("norm.weight") else noise)
    return model


def checkpoint_names(
    model: PreTrainedModel, state: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """A model's state by the names under which ``save_pretrained`` writes it.

    transformers 5 keeps experts fused in memory (``mlp.experts.gate_up_proj``)
    while checkpoints hold one tensor per expert.  ``open_sender`` takes the model as
    it is and sends views; this makes the tensors, for comparisons.

    Args:
        model: defines the conversion.
        state: tensors by in-memory name; the model's own ``state_dict`` by default.
    """
    from transformers.core_model_loading import revert_weight_conversion

    source = dict(model.state_dict() if state is None else state)
    with torch.no_grad():
        return dict(revert_weight_conversion(model, source))


def save_checkpoint(model: PreTrainedModel, directory: Path) -> Path:
    """Save a Hugging Face checkpoint without a tokenizer; returns its directory."""
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory, safe_serialization=True)
    return directory
