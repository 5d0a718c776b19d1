"""What Redis says, before it is used."""

from __future__ import annotations

import re

from weightwire.errors import SessionError
from weightwire.session.marks import open_value

__all__ = ["read_identity", "read_number", "read_record"]

_HEX = re.compile(rb"[0-9a-f]{16}\Z")


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
    if value is None:
        return None
    if not isinstance(value, bytes) or not _HEX.match(value):
        raise _foreign("(the session's identity)")
    return value.decode()


def read_number(value: object) -> int:
    """A counter, zero where there is none.

    Raises:
        SessionError: nobody of ours wrote it.
    """
    if value is None:
        return 0
    if isinstance(value, int) and value >= 0:
        return value
    if isinstance(value, bytes) and len(value) < 20 and value.isdigit():
        return int(value)
    raise _foreign("(the session's clock)")


def _foreign(key: str) -> SessionError:
    return SessionError(
        f"record {key!r} can't be read: is something else writing to this session's keys? "
        "choose another name"
    )
