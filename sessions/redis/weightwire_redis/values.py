"""What Redis says, before it is used."""

from __future__ import annotations

import re
from typing import NamedTuple

from weightwire.errors import SessionError
from weightwire.session.marks import open_value

__all__ = ["Write", "read_identity", "read_record", "read_write", "read_writes"]

_HEX = re.compile(rb"[0-9a-f]{16}\Z")
_ENTRY = re.compile(rb"(\d{1,20})-(\d{1,20})\Z")
_HISTORY = "(the session's history)"


class Write(NamedTuple):
    """A write in a session's history; later ones compare greater.

    Attributes:
        moment, number: the name of its entry, which rises.
        mark: tells it from another that got the same name after a loss.
    """

    moment: int
    number: int
    mark: bytes

    @property
    def entry(self) -> str:
        return f"{self.moment}-{self.number}"


def read_record(key: str, value: object) -> bytes | None:
    """The record of a value, or None where there is none.

    Raises:
        SessionError: nobody of ours wrote it.
    """
    if not isinstance(value, bytes):
        raise _foreign(key)
    return open_value(key, value) if value else None


def read_identity(value: object) -> str | None:
    """Which session's records these are, or None where there is no session.

    Raises:
        SessionError: nobody of ours wrote it.
    """
    if value == b"":
        return None
    if not isinstance(value, bytes) or not _HEX.match(value):
        raise _foreign("(the session's identity)")
    return value.decode()


def read_writes(value: object) -> Write | None:
    """The write in a range of the history that holds one or none.

    Raises:
        SessionError: nobody of ours wrote it.
    """
    match value:
        case []:
            return None
        case [[entry, [b"w", bytes(mark)]]] if _HEX.match(mark):
            return read_write(entry, mark)
    raise _foreign(_HISTORY)


def read_write(entry: object, mark: bytes) -> Write:
    """A write by the name of its entry.

    Raises:
        SessionError: Redis doesn't name entries like that.
    """
    found = _ENTRY.match(entry) if isinstance(entry, bytes) else None
    if found is None:
        raise _foreign(_HISTORY)
    return Write(int(found[1]), int(found[2]), mark)


def _foreign(key: str) -> SessionError:
    return SessionError(
        f"record {key!r} can't be read: is something else writing to this session's keys? "
        "choose another name"
    )
