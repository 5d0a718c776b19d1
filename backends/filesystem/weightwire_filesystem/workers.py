"""A few threads that share out small jobs, with the calling thread among them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weightwire.deadline import Watch

__all__ = ["Job", "Source", "Workers", "shared"]

Job = Callable[[], None]
Source = Callable[[], "Job | None"]
"""Hands out the next job, from any thread; None when there is none now."""


def shared(jobs: Iterable[Job]) -> Source:
    """A source of these jobs, in order; threads may draw from it at once."""
    lock = threading.Lock()
    iterator = iter(jobs)

    def take() -> Job | None:
        with lock:
            return next(iterator, None)

    return take


class Workers:
    """Run the jobs of a source on ``threads`` threads, of which the caller is one.

    The others sleep between calls.  After the first error, a failed watch or a
    passed deadline no further job starts.
    """

    def __init__(self, threads: int, watch: Watch) -> None:
        self._helpers = threads - 1
        self._watch = watch
        self._pool: ThreadPoolExecutor | None = None
        self._running: dict[Source, set[Future[None]]] = {}
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    def run(self, source: Source, alone: bool = False) -> None:
        """Run every job of ``source``; return when the last one is done.

        Args:
            source: of the jobs.
            alone: if True, wake nobody: the jobs are small.

        Raises:
            The first error of a job, once no job runs any more.
        """
        if not alone:
            self.start(source)
        self.join(source)

    def start(self, source: Source) -> None:
        """Let the other threads begin with the jobs of ``source``, after those of earlier ones."""
        if self._pool is None and self._helpers:
            self._pool = ThreadPoolExecutor(self._helpers, "weightwire-filesystem")
        running = {future for future in self._running.get(source, ()) if not future.done()}
        while self._pool is not None and len(running) < self._helpers:
            running.add(self._pool.submit(self._work, source))
        self._running[source] = running

    def join(self, source: Source) -> None:
        """Take part until ``source`` is empty, and wait for the jobs of the others."""
        self._work(source)
        wait(self._running.pop(source, ()))
        with self._lock:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def stop(self, error: BaseException) -> None:
        """Start no further job, and forget what the running ones raise."""
        with self._lock:
            self._error = self._error or error
        for running in self._running.values():
            wait(running)
        self._running.clear()
        with self._lock:
            self._error = None

    def close(self) -> None:
        """End the threads.  Idempotent."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _work(self, source: Source) -> None:
        try:
            while self._error is None:
                job = source()
                if job is None:
                    return
                self._watch.check()
                job()
        except BaseException as error:  # whatever it is, join() raises it in the caller
            with self._lock:
                self._error = self._error or error
