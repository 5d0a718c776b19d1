"""What memory is there, and of which kind: looked at before an arena is made of it."""

from __future__ import annotations

from pathlib import Path

import torch

from weightwire import hostmemory
from weightwire.devicememory import is_shareable
from weightwire.errors import ConfigError
from weightwire.hostmemory import CGROUPS, PROC

__all__ = ["available_nbytes", "check_fits", "check_shareable"]


def check_fits(nbytes: int, device: torch.device, what: str) -> None:
    """Refuse what can't fit before it is allocated: host memory is promised freely.

    Raises:
        ConfigError: there isn't that much.
    """
    available = available_nbytes(device)
    if available is not None and nbytes > available:
        raise ConfigError(
            f"{what} of {nbytes} bytes on {device} can't be allocated, {available} bytes are "
            "available: lower group_bytes or max_retired_slots, or do without overlap"
        )


def available_nbytes(
    device: torch.device, proc: Path = PROC, cgroups: Path = CGROUPS
) -> int | None:
    """Bytes that can be had on a device, or None where that isn't known."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free) + int(cached)
    return hostmemory.available_nbytes(proc, cgroups)


def check_shareable(address: int, device: torch.device, what: str) -> None:
    """Refuse CUDA memory that NIXL registers and other processes can't map.

    UCX then copies it in software, over TCP, at a thousandth of the speed, and says nothing.

    Raises:
        ConfigError: it isn't memory of ``cudaMalloc``.
    """
    if device.type == "cuda" and not is_shareable(address, device):
        raise ConfigError(
            f"{what} on {device} lies in virtual memory (an expandable segment of torch's "
            "allocator, or a pool such as vLLM's sleep mode), which other processes can't map by "
            "CUDA IPC: unset expandable_segments in PYTORCH_CUDA_ALLOC_CONF (or "
            "PYTORCH_ALLOC_CONF), or use zero_copy=False"
        )
