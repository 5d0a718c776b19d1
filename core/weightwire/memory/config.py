"""Options of the ``memory`` backend."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from weightwire.contract import BackendConfig

__all__ = ["MemoryConfig"]


class MemoryConfig(BackendConfig):
    """Options of the ``memory`` backend.

    Attributes:
        directory: where the shared files lie; by default ``/dev/shm`` where there
            is one, else the directory for temporary files.
        max_bytes: most bytes that one rank's file may take.
    """

    directory: Path | None = None
    max_bytes: int = Field(default=1 << 40, gt=0)
