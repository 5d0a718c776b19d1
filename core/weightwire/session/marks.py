"""What stores keep at a record's key where a write must be told from any other: a mark, and it.

Sixteen hexadecimal digits, drawn anew for each write, a line feed, and the record.
By the mark a writer sees whether what is there is what it wrote, also when its
answer was lost, and also when another wrote the same; and no value is empty, which
some servers don't tell from absent.
"""

from __future__ import annotations

import re
import secrets

from weightwire.errors import SessionError
from weightwire.session.records import MAX_RECORD

__all__ = ["MARK", "MAX_VALUE", "mark", "open_value", "seal_value"]

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


def open_value(key: str, value: bytes) -> bytes:
    """The record of a value.

    Raises:
        SessionError: nobody of ours wrote it.
    """
    if len(value) > MAX_VALUE:
        raise SessionError(
            f"record {key!r} has more than {MAX_RECORD} bytes: is something else writing to this "
            "session?"
        )
    if value[MARK : MARK + 1] != b"\n" or not _HEX.match(value[:MARK]):
        raise SessionError(
            f"record {key!r} can't be read: is something else writing to this session's keys? "
            "choose another name"
        )
    return value[MARK + 1 :]
