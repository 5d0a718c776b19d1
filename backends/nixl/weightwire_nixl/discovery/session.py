"""Discovery by the session: metadata travels in the offer and in ``receiver_ready``."""

from __future__ import annotations

from weightwire_nixl.discovery.base import Discovery, Side, frame, unframe

__all__ = ["SessionDiscovery"]


class SessionDiscovery(Discovery):
    """The payload itself is what travels."""

    def put(self, side: Side, member: str, rank: int, payload: bytes) -> bytes:
        del side, member, rank
        return frame(payload)

    def get(self, side: Side, member: str, rank: int, carried: bytes) -> bytes:
        who = f"sender rank {rank}" if side == "sender" else f"receiver {member!r} rank {rank}"
        return unframe(carried, who)
