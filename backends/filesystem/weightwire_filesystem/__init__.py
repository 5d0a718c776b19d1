"""weightwire's filesystem backend."""

from __future__ import annotations

from weightwire_filesystem.backend import FilesystemBackend
from weightwire_filesystem.config import FilesystemConfig

__all__ = ["FilesystemBackend", "FilesystemConfig"]
