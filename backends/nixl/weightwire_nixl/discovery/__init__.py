"""How ranks find each other's metadata: opaque bytes, framed, by (side, member, rank)."""

from __future__ import annotations

from weightwire_nixl.discovery.base import Discovery, frame, unframe
from weightwire_nixl.discovery.session import SessionDiscovery

__all__ = ["Discovery", "SessionDiscovery", "frame", "unframe"]
