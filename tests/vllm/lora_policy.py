"""A policy of which an adapter is trained."""

from __future__ import annotations

import torch

__all__ = ["LAYERS", "step", "trainer"]

LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def trainer(base, **options):
    """The base with an adapter whose weights aren't zero."""
    import peft

    torch.manual_seed(3)
    options = {"r": 4, "lora_alpha": 6, "target_modules": LAYERS, **options}
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **options))
    step(model)
    return model


def step(model):
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.3)
