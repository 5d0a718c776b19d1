"""weightwire's NIXL backend: prepared one-sided transfers, exact signals, elastic peers."""

from __future__ import annotations

from weightwire_nixl.backend import NixlBackend
from weightwire_nixl.config import NixlConfig

__all__ = ["NixlBackend", "NixlConfig"]
