"""How ranks find each other's metadata: opaque bytes, framed, by (side, member, rank)."""

from __future__ import annotations

from weightwire.contract import Context
from weightwire_nixl.discovery.base import Discovery, frame, unframe
from weightwire_nixl.discovery.modelexpress import ModelExpressDiscovery
from weightwire_nixl.discovery.session import SessionDiscovery

__all__ = [
    "Discovery",
    "ModelExpressDiscovery",
    "SessionDiscovery",
    "frame",
    "open_discovery",
    "unframe",
]


def open_discovery(context: Context, option: str) -> Discovery:
    """What the option ``discovery`` means.

    Raises:
        BackendUnavailable: it needs a client that isn't installed.
    """
    return SessionDiscovery() if option == "session" else ModelExpressDiscovery(context, option)
