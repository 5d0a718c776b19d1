"""What binds a seal to its version: bytes of another one come with another stamp."""

from __future__ import annotations

import hashlib

from weightwire.contract import Policy

__all__ = ["stamp"]

_BYTES = 8


def stamp(session_id: str, policy: Policy) -> int:
    """64 bits that differ from those of other attempts, versions, senders and sessions."""
    text = f"{session_id} {policy.incarnation} {policy.version} {policy.attempt}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=_BYTES).digest(), "big")
