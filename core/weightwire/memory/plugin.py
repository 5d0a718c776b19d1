"""Registers the ``memory`` backend."""

from __future__ import annotations

from collections.abc import Sequence

from weightwire.doctor.check import Check
from weightwire.hookspecs import hookimpl
from weightwire.memory.backend import MemoryBackend

__all__: list[str] = []


@hookimpl
def weightwire_describe_backend() -> MemoryBackend:
    return MemoryBackend()


@hookimpl
def weightwire_describe_checks() -> Sequence[Check]:
    return [
        Check(
            "memory.share",
            "a segment of shared memory written by one process and read by another",
            "weightwire.memory.checks:share",
            60.0,
            "enlarge /dev/shm (docker run --shm-size=8g, or --ipc=host)",
        )
    ]
