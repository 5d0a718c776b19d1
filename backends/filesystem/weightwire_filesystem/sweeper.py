"""Deletes dropped versions beside the trainer's work: freeing gigabytes takes a while."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

from weightwire_filesystem.files import remove_tree

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Sweeper"]


def _remove(path: Path) -> None:
    if sys.platform == "linux":
        # There a thread has a scheduling class of its own: leave the cores to whoever
        # reads the new version just now.
        with suppress(OSError):
            os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))
    remove_tree(path)


class Sweeper:
    """Removes directories on a thread of its own, which ends when there are none left."""

    def __init__(self) -> None:
        self._pending: list[Future[None]] = []

    def remove(self, path: Path) -> None:
        """Remove ``path`` and what is in it, soon."""
        pool = ThreadPoolExecutor(1, "weightwire-filesystem-sweeper")
        self._pending.append(pool.submit(_remove, path))
        pool.shutdown(wait=False)

    def idle(self) -> bool:
        """Whether all that was to be removed is gone: a new version may need its space."""
        self._pending = [future for future in self._pending if not future.done()]
        return not self._pending

    def close(self) -> None:
        """Wait for what is being removed.  Idempotent."""
        for future in self._pending:
            future.result()
        self._pending = []
