"""Deletes dropped versions beside the trainer's work: freeing gigabytes takes a while."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from weightwire_filesystem.files import remove_tree

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Sweeper"]


class Sweeper:
    """Removes directories on a thread of its own, which ends when there are none left."""

    def __init__(self) -> None:
        self._pending: list[Future[None]] = []

    def remove(self, path: Path) -> None:
        """Remove ``path`` and what is in it, soon."""
        pool = ThreadPoolExecutor(1, "weightwire-filesystem-sweeper")
        self._pending.append(pool.submit(remove_tree, path))
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
