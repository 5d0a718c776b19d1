"""Threads that do what they are given, one thing after the other."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

__all__ = ["Job", "Worker"]

T = TypeVar("T")


class Job(Generic[T]):
    """Something that a thread does; ``done`` is set when it has ended, in whatever way."""

    def __init__(self, work: Callable[[], T]) -> None:
        self.work: Callable[[], T] | None = work
        self.done = threading.Event()
        self.error: BaseException | None = None
        self.result: T | None = None

    def outcome(self) -> T:
        """What it returned, or its error raised; it has ended."""
        if self.error is not None:
            raise self.error
        return self.result  # type: ignore[return-value]  # set, as there is no error


class Worker:
    """One thread.

    Args:
        before: called before each job; raises what the job then ends with.
        failed: what a job ends with that raised this.
        leave: what the thread does at its end.

    Attributes:
        awaited: the ranks for which its job waits now.
    """

    def __init__(
        self,
        name: str,
        before: Callable[[], None],
        failed: Callable[[BaseException], BaseException],
        leave: Callable[[], None],
    ) -> None:
        self.awaited: Sequence[int] = ()
        self._before = before
        self._failed = failed
        self._leave = leave
        self._jobs: queue.SimpleQueue[Job[Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], T]) -> Job[T]:
        """Have the thread do something, after all that it was given before."""
        job = Job(work)
        self._jobs.put(job)
        return job

    def end(self) -> None:
        """Let the thread end after all that it was given."""
        self._jobs.put(None)

    def join(self, seconds: float) -> bool:
        """Whether the thread has ended, after at most so long."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    @property
    def is_this(self) -> bool:
        """Whether the caller runs on its thread."""
        return threading.current_thread() is self._thread

    def _ended_with(self, error: BaseException) -> BaseException:
        """What a job ends with; the thread outlives whatever that raises."""
        try:
            return self._failed(error)
        except BaseException as another:
            error.add_note(f"giving up after it failed, too: {another!r}")
            return error

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, job.work = job.work, None
            try:
                self._before()
                assert work is not None  # noqa: S101 - a job is run once
                job.result = work()
            except BaseException as error:
                job.error = self._ended_with(error)
            finally:
                del work
                self.awaited = ()
                job.done.set()
            del job
        self._leave()
