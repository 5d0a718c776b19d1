"""Where shared memory lies, which is known without torch."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

__all__ = ["default_directory"]


def default_directory() -> Path:
    """``/dev/shm`` where there is one, else the directory for temporary files."""
    shm = Path("/dev/shm")  # noqa: S108 - the system's shared-memory filesystem
    return shm if shm.is_dir() and os.access(shm, os.W_OK) else Path(tempfile.gettempdir())
