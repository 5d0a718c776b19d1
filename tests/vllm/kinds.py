"""Which model a test's kind is; engines and the trainers beside them must agree on it."""

from __future__ import annotations

from typing import Any

from weightwire_vllm.families import family_model
from weightwire_vllm.models import tiny_model

__all__ = ["SEEDS", "make"]

SEEDS = {"A": 1, "B": 2}


def make(kind: str, seed: int) -> Any:
    """A model whose vocabulary vLLM pads, so that padding is compared too."""
    if kind in ("qwen3", "qwen3-tied", "qwen3_moe"):
        return tiny_model(kind, seed, vocab_size=300)
    return family_model(kind, seed)
