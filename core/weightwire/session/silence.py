"""How long a session didn't answer: time that counts against nobody's lease."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from weightwire.errors import SessionError

__all__ = ["Silence"]

_SLOW = 0.25
"""Seconds that an answer may take without being taken for silence: a small part of any lease."""


class Silence:
    """Time from a failure to the next answer, and that of answers that were slow to come."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failing_since: float | None = None
        self._counted_to = clock()
        self._seconds = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of silence so far, up to the last answer."""
        with self._lock:
            return self._seconds

    @contextlib.contextmanager
    def asked(self) -> Iterator[None]:
        """Around each operation on the session's store; threads may overlap."""
        began = self._clock()
        try:
            yield
        except SessionError:
            with self._lock:
                if self._failing_since is None:
                    self._failing_since = began
            raise
        ended = self._clock()
        if self._failing_since is None and ended - began <= _SLOW:
            return
        with self._lock:
            since = began if ended - began > _SLOW else ended
            if self._failing_since is not None:
                since = min(since, self._failing_since)
                self._failing_since = None
            since = max(since, self._counted_to)  # what another thread counted
            self._seconds += max(0.0, ended - since)
            self._counted_to = max(self._counted_to, ended)
