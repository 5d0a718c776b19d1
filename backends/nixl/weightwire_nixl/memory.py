"""What memory is there, and of which kind: looked at before an arena is made of it."""

from __future__ import annotations

import contextlib
from pathlib import Path, PurePosixPath

import torch

from weightwire.devicememory import is_shareable
from weightwire.errors import ConfigError

__all__ = ["available_nbytes", "check_fits", "check_shareable"]

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


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
    device: torch.device, proc: Path = _PROC, cgroups: Path = _CGROUPS
) -> int | None:
    """Bytes that can be had on a device, or None where that isn't known."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free) + int(cached)
    known = [limit for limit in (_of_host(proc), _of_cgroup(proc, cgroups)) if limit is not None]
    return min(known, default=None)


def _of_host(proc: Path) -> int | None:
    for line in _text(proc / "meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return _number(value.split()[0]) * 1024
    return None


def _of_cgroup(proc: Path, cgroups: Path) -> int | None:
    """What the control groups (version 2) of this process leave."""
    least: int | None = None
    for line in _text(proc / "self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number != "0" or controllers:
            continue
        inside = PurePosixPath(path.lstrip("/"))
        for group in (inside, *inside.parents):
            directory = cgroups / group
            limit = _text(directory / "memory.max")
            if not limit.isdecimal():
                continue  # "max", or no such file
            used = _number(_text(directory / "memory.current"))
            stat = dict(
                line.split()
                for line in _text(directory / "memory.stat").splitlines()
                if " " in line
            )
            # Pages of files that nobody uses give way.
            left = int(limit) - used + _number(stat.get("inactive_file", "0"))
            least = left if least is None else min(least, left)
    return None if least is None else max(0, least)


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


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text().strip()
    return ""


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0
