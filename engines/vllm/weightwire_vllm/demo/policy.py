"""The trainer of the demo: a tiny policy, REINFORCE, and a reward that can be checked."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weightwire_vllm.models import tiny_model

__all__ = ["Policy", "TARGET_STRIDE", "reward_of"]

TARGET_STRIDE = 4
"""A token earns reward when its id is a multiple of this."""


def reward_of(completion: Sequence[int]) -> float:
    """Share of tokens whose id is a multiple of ``TARGET_STRIDE``: from 0 to 1."""
    return sum(token % TARGET_STRIDE == 0 for token in completion) / len(completion)


class Policy:
    """A random Qwen3 in float32 and its optimizer.

    Args:
        kind: ``qwen3`` or ``qwen3_moe``.
        seed: of the weights.
    """

    def __init__(self, kind: str, seed: int, learning_rate: float = 1e-2) -> None:
        self.model = tiny_model(kind, seed, dtype=torch.float32)  # type: ignore[arg-type]
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=learning_rate)

    def logprobs(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]
    ) -> Tensor:
        """Log-probabilities of the completions' tokens, float32, ``[batch, tokens]``."""
        tokens = torch.tensor(
            [
                [*prompt, *completion]
                for prompt, completion in zip(prompts, completions, strict=True)
            ]
        )
        length = len(completions[0])
        logits = self.model(tokens).logits[:, -length - 1 : -1].float()
        chosen = tokens[:, -length:].unsqueeze(-1)
        return torch.log_softmax(logits, dim=-1).gather(-1, chosen).squeeze(-1)

    def step(self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> float:
        """One REINFORCE update with a batch baseline; returns the batch's mean reward."""
        earned = torch.tensor(completions).remainder(TARGET_STRIDE).eq(0).float()
        advantage = (earned - earned.mean()) / (earned.std() + 1e-6)
        loss = -(advantage * self.logprobs(prompts, completions)).mean()
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        return float(earned.mean())
