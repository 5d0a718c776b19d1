"""The narrow interface behind which metadata travels, and the frame that guards it."""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from typing import Literal

import xxhash

from weightwire.errors import TransferError

__all__ = ["MAX_PAYLOAD", "REFERENCE", "Discovery", "Side", "frame", "name_of", "unframe"]

Side = Literal["sender", "receiver"]

MAX_PAYLOAD = 1 << 26
"""Bytes of the largest payload that is read."""

REFERENCE = b"reference:"
"""How a payload begins that only says where the real one lies."""

_MAGIC = b"WWNX"
_HEAD = struct.Struct("<4sHxxQQ")  # magic, format, length, checksum
_FORMAT = 1


class Discovery(ABC):
    """Makes one rank's metadata known to its peers.

    ``put`` and ``get`` belong together: what ``put`` returns travels in the session
    (``SenderTransport.describe``, ``ReceiverTransport.describe``) and is what the
    peer's ``get`` is given.  It may be the payload itself, or a reference to it.
    """

    @abstractmethod
    def put(self, side: Side, member: str, rank: int, payload: bytes) -> bytes:
        """Publish this rank's metadata, in place of what it published before.

        Returns:
            What its peers need to ``get`` it; at most 1 MiB.
        """

    @abstractmethod
    def get(self, side: Side, member: str, rank: int, carried: bytes) -> bytes:
        """The metadata of a peer.

        Args:
            carried: what the peer's ``put`` returned.

        Raises:
            TransferError: it is truncated, corrupt or gone; names the peer.
        """

    def close(self) -> None:
        """Withdraw what was published.  Idempotent."""


def name_of(side: Side, member: str, rank: int) -> str:
    """A rank, for messages."""
    return f"sender rank {rank}" if side == "sender" else f"receiver {member!r} rank {rank}"


def frame(payload: bytes) -> bytes:
    """``payload`` with its length and checksum before it."""
    return _HEAD.pack(_MAGIC, _FORMAT, len(payload), xxhash.xxh3_64_intdigest(payload)) + payload


def unframe(framed: bytes, who: str) -> bytes:
    """The payload of ``frame``, if it is whole.

    NIXL evicts a live peer when it is handed a truncated blob: nothing gets there
    that hasn't passed here.

    Raises:
        TransferError: it isn't; names ``who`` it came from.
    """
    head = framed[: _HEAD.size]
    if len(head) < _HEAD.size or not head.startswith(_MAGIC):
        raise TransferError(
            f"{who} sent metadata that isn't the nixl backend's ({len(framed)} bytes): "
            "run one weightwire version, and one backend, on both sides"
        )
    _, number, length, checksum = _HEAD.unpack(head)
    payload = framed[_HEAD.size :]
    if number != _FORMAT:
        raise TransferError(
            f"{who} sent metadata of format {number}, this is {_FORMAT}: "
            "run one weightwire version on both sides"
        )
    if len(payload) != length or length > MAX_PAYLOAD:
        raise TransferError(
            f"{who} sent truncated metadata ({len(payload)} of {length} bytes): restart it"
        )
    if xxhash.xxh3_64_intdigest(payload) != checksum:
        raise TransferError(f"{who} sent corrupt metadata (wrong checksum): restart it")
    return payload
