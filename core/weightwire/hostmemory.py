"""Host memory: a tensor's own, as bytes and as an array; and how much there is.

Not by ``Tensor.numpy``: torch then takes the storage for shared and never lets it be
resized again, which is how trainers offload their parameters.
"""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["CGROUPS", "PROC", "array_of", "available_nbytes", "bytes_of"]

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")

_DTYPES = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor; writing to the view writes to the tensor."""
    if tensor.numel() == 0:
        return memoryview(b"")
    content = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    content.owner = tensor  # type: ignore[attr-defined]  # the memory lives as long as the view
    return memoryview(content).cast("B")


def array_of(tensor: Tensor) -> NDArray[np.generic]:
    """The elements of a contiguous CPU tensor, flat, as integers of their width."""
    array: NDArray[np.generic] = np.frombuffer(bytes_of(tensor), _DTYPES[tensor.element_size()])
    return array


def available_nbytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Bytes of host memory that this process can have, or None where that isn't known."""
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


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text().strip()
    return ""


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0
