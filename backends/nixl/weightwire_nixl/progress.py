"""Moves posted groups on while the receiver's thread verifies and writes the one before."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["PAUSE", "Progress"]

PAUSE = 0.0002
"""Seconds between two looks for what a peer says."""


class Progress:
    """A thread that takes steps while there is something to wait for.

    Over shared memory the copy is made by the thread that posts the read, so that
    without this one nothing would arrive during replay.  It runs for one version.

    Args:
        step: takes what steps are possible; returns the seconds until the next ones, None
            when there is nothing more to wait for.  What it raises is kept for ``check``, and
            ends the thread.
    """

    def __init__(self, step: Callable[[], float | None]) -> None:
        self._step = step
        self._work = threading.Event()
        self._ends = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="weightwire-nixl", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """There is something new to wait for."""
        self._work.set()

    def check(self) -> None:
        """Raise what a step has raised."""
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Return when no step runs any more.  Idempotent."""
        self._ends = True
        self._work.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._work.wait()
            if self._ends:
                return
            try:
                self._work.clear()
                while (pause := self._step()) is not None and not self._ends:
                    time.sleep(pause)
            except BaseException as error:
                self._error = error
                return
