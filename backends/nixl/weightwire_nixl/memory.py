"""What memory is there, and of which kind: looked at before an arena is made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from weightwire import hostmemory
from weightwire.errors import ConfigError
from weightwire.hostmemory import CGROUPS, PROC

__all__ = ["available_nbytes", "check_fits", "check_shareable", "in_expandable_segment"]


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
        ConfigError: it lies in an expandable segment of torch's allocator.
    """
    if device.type != "cuda":
        return
    segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    if in_expandable_segment(address, segments):
        raise ConfigError(
            f"{what} on {device} lies in an expandable segment, which other processes can't map "
            "by CUDA IPC: unset expandable_segments in PYTORCH_CUDA_ALLOC_CONF (or "
            "PYTORCH_ALLOC_CONF)"
        )


def in_expandable_segment(address: int, segments: Sequence[Mapping[str, Any]]) -> bool:
    """Whether an address lies in one.

    Args:
        segments: of ``torch.cuda.memory_snapshot()``.
    """
    return any(
        segment.get("is_expandable", False)
        and segment["address"] <= address < segment["address"] + segment["total_size"]
        for segment in segments
    )
