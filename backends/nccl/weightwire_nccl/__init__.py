"""weightwire's nccl backend: torch.distributed, NCCL on GPUs and Gloo on CPUs."""

from __future__ import annotations

from weightwire_nccl.backend import NcclBackend
from weightwire_nccl.config import NcclConfig

__all__ = ["NcclBackend", "NcclConfig"]
