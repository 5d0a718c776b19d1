"""What is kept at a record's key: who wrote it there, and the record.

Sixteen hexadecimal digits, drawn anew for each write, a line feed, and the bytes.
By the digits a writer whose connection broke sees whether its write was carried
out; and no value is empty, which Redis doesn't tell from absent.
"""

from __future__ import annotations

import re
import secrets

from weightwire.errors import SessionError
from weightwire.session.records import MAX_RECORD

__all__ = ["MARK", "MAX_VALUE", "mark", "open_value", "read_identity", "read_number", "seal_value"]

MARK = 16
"""Bytes of a write's mark."""
MAX_VALUE = MAX_RECORD + MARK + 1
"""Bytes of the largest value that is read."""

_HEX = re.compile(rb"[0-9a-f]{16}\Z")


def mark() -> bytes:
    """A mark for one write."""
    return secrets.token_hex(MARK // 2).encode()


def seal_value(write: bytes, record: bytes) -> bytes:
    """The value of a record, by the mark of its write."""
    return write + b"\n" + record


def open_value(key: str, value: object) -> bytes | None:
    """The record of a value, or None where there is none.

    Raises:
        SessionError: nobody of ours wrote it.
    """
    if not isinstance(value, bytes):
        raise _foreign(key)
    if not value:
        return None
    if len(value) > MAX_VALUE:
        raise SessionError(
            f"record {key!r} has more than {MAX_RECORD} bytes: is something else writing to this "
            "session?"
        )
    if value[MARK : MARK + 1] != b"\n" or not _HEX.match(value[:MARK]):
        raise _foreign(key)
    return value[MARK + 1 :]


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
