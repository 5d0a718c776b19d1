"""What ``weightwire doctor`` tries for the nccl backend.  Gloo is core's own check."""

from __future__ import annotations

import torch
import torch.distributed

from weightwire.doctor.check import CheckOptions, Verdict
from weightwire.doctor.machine import broadcasts_arrive

__all__ = ["broadcast"]

_MOST_RANKS = 8


def broadcast(options: CheckOptions) -> Verdict:
    """Rank 0's random bytes arrive at the other GPUs; one GPU alone forms a group of itself."""
    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return Verdict.absent(
            "torch is built without NCCL", "nothing, where weights lie on CPUs: Gloo moves them"
        )
    if not torch.cuda.is_available():
        return Verdict.absent(
            "there is no GPU that torch can use", "nothing, where weights lie on CPUs"
        )
    version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    ranks = min(torch.cuda.device_count(), _MOST_RANKS)
    if not broadcasts_arrive("nccl", ranks, options):
        return Verdict.failed(
            "a broadcast arrived with other bytes than were sent",
            "run nccl-tests with checks; try NCCL_P2P_DISABLE=1 to find the path at fault",
            nccl=version,
        )
    return Verdict.ok(f"NCCL {version} broadcast between {ranks} GPUs", nccl=version, gpus=ranks)
