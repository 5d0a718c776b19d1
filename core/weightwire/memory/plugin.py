"""Registers the ``memory`` backend."""

from __future__ import annotations

from weightwire.hookspecs import hookimpl
from weightwire.memory.backend import MemoryBackend

__all__: list[str] = []


@hookimpl
def weightwire_describe_backend() -> MemoryBackend:
    return MemoryBackend()
