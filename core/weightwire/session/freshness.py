"""Refusing records that are older than what was read before: replayed, or reordered."""

from __future__ import annotations

import threading
from collections import OrderedDict

__all__ = ["Freshness"]

_MOST_KEYS = 1 << 14
"""Places that are remembered; those read longest ago are forgotten first."""


class Freshness:
    """The newest sequence number that this process has read at each place.

    An HMAC says who wrote a record, not when.  A writer numbers its records, so
    that one put back in the place of its successor shows.  Whoever reads a place
    for the first time can't know.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: OrderedDict[str, tuple[str, int]] = OrderedDict()

    def newest(self, key: str) -> tuple[str, int]:
        """Writer and number of the newest record read here; ask before reading again."""
        with self._lock:
            return self._newest.get(key, ("", 0))

    def note(self, key: str, writer: str, sequence: int) -> None:
        """A record was read.  Threads may come here in another order than they read."""
        with self._lock:
            known = self._newest.get(key)
            if known is None or known[0] != writer or known[1] < sequence:
                self._newest[key] = (writer, sequence)
            self._newest.move_to_end(key)
            if len(self._newest) > _MOST_KEYS:
                self._newest.popitem(last=False)
