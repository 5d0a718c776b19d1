"""Options of the ``memory`` backend."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from weightwire.contract import BackendConfig

__all__ = ["MemoryConfig"]


class MemoryConfig(BackendConfig):
    """Options of the ``memory`` backend.

    Attributes:
        directory: where the shared files lie; by default ``/dev/shm`` where there
            is one, else the directory for temporary files.
        max_bytes: most bytes that one rank's file may take.
        column_blocks: lay large matrices out in blocks of columns, as transports do to
            which every contiguous run is a descriptor.  A copy between processes of
            one host is faster without.
        snapshot: ``"host"``: each trainer rank keeps a copy of its shards, from which a
            receiver that comes late gets the newest finished version as soon as it asks.
    """

    directory: Path | None = None
    max_bytes: int = Field(default=1 << 40, gt=0)
    column_blocks: bool = False
    snapshot: Literal["none", "host"] = "none"
