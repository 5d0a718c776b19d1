"""What the two sides of the ``memory`` backend tell each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from weightwire.errors import TransferError

__all__ = ["ReaderInfo", "SenderInfo", "session_path"]

_Name = Annotated[str, Meta(max_length=4096)]
_Size = Annotated[int, Meta(ge=0, le=1 << 50)]


class SenderInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A trainer rank's segment.

    Attributes:
        headers: first byte of each slot's header.
        slots: first byte of each slot.
        seal_bytes: room for a seal in a header.
    """

    path: _Name
    nbytes: _Size
    headers: Annotated[tuple[_Size, ...], Meta(min_length=1, max_length=2)]
    slots: Annotated[tuple[_Size, ...], Meta(min_length=1, max_length=2)]
    slot_bytes: _Size
    seal_bytes: _Size


class ReaderInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An inference rank's segment, and which groups it reads from which owner."""

    path: _Name
    nbytes: _Size
    reads: Annotated[
        dict[int, Annotated[tuple[int, ...], Meta(max_length=1 << 24)]], Meta(max_length=1 << 20)
    ]


def session_path(path: str, session_id: str, who: str) -> Path:
    """The path of another member's shared file, if that is what it names."""
    named = Path(path)
    if not named.is_absolute() or not named.name.startswith(f"weightwire-{session_id}-"):
        raise TransferError(
            f"{who} names {path!r} as its shared memory, which isn't this session's: "
            "run one weightwire version on both sides"
        )
    return named
