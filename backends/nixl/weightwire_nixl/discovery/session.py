"""Discovery by the session: metadata travels in the offer and in ``receiver_ready``."""

from __future__ import annotations

from weightwire.errors import ConfigError
from weightwire_nixl.discovery.base import REFERENCE, Discovery, Side, frame, name_of, unframe

__all__ = ["SessionDiscovery"]


class SessionDiscovery(Discovery):
    """The payload itself is what travels."""

    def put(self, side: Side, member: str, rank: int, payload: bytes) -> bytes:
        del side, member, rank
        return frame(payload)

    def get(self, side: Side, member: str, rank: int, carried: bytes) -> bytes:
        who = name_of(side, member, rank)
        payload = unframe(carried, who)
        if payload.startswith(REFERENCE):
            raise ConfigError(
                f"{who} has its metadata at a ModelExpress server, and this side looks into the "
                "session: give both sides the same nixl option 'discovery'"
            )
        return payload
