"""Moves posted groups on while the receiver's thread verifies and writes the one before."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["Progress"]


class Progress:
    """A thread that takes steps while there is something to wait for.

    Over shared memory the copy is made by the thread that posts the read, so that
    without this one nothing would arrive during replay.  It runs for one version.

    Args:
        step: takes what steps are possible; whether more will come.  What it raises is
            kept for ``check``, and ends the thread.
        pause: seconds between two steps.
    """

    def __init__(self, step: Callable[[], bool], pause: float) -> None:
        self._step = step
        self._pause = pause
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
                while self._step() and not self._ends:
                    time.sleep(self._pause)
            except BaseException as error:
                self._error = error
                return
