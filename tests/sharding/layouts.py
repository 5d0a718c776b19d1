"""What trainer ranks and receivers of the sharding tests agree on, without sharing memory."""

from __future__ import annotations

import torch
from torch import nn

LAYOUTS = {
    1: ["fsdp", "rows", "streamed"],
    2: ["fsdp", "columns", "plain", "resharded", "streamed"],
    3: ["fsdp", "rows", "columns", "replicated", "boxes", "streamed"],
    4: ["fsdp", "rows", "columns", "hsdp", "fsdp x tp", "streamed"],
}


def layouts(world: int, backend: str) -> list[str]:
    """Those that a backend takes: a stream and a collective one could wait for each other."""
    return [layout for layout in LAYOUTS[world] if (layout, backend) != ("streamed", "nccl")]


def model() -> nn.Sequential:
    """Sizes that no world size divides, a tensor smaller than the world, integers and buffers."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(10, 22), nn.ReLU(), nn.Linear(22, 7), nn.BatchNorm1d(7), nn.Linear(7, 2)
    )


def full_values(version: int) -> dict[str, torch.Tensor]:
    """Every tensor of a version, whole."""
    generator = torch.Generator().manual_seed(version)
    return {
        name: torch.randn(tensor.shape, generator=generator)
        if tensor.is_floating_point()
        else torch.tensor(version)
        for name, tensor in model().state_dict().items()
    }
