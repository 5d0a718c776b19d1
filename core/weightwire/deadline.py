"""Deadlines, and the one way in which weightwire waits for anything.

Every wait in core and in a backend goes through ``Watch.until``: it ends when
its condition holds, when the deadline passes, when a peer is known to have
failed, or when the caller was cancelled, whichever is first.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from weightwire.errors import Cancelled, ConfigError, TransferTimeout

__all__ = ["Deadline", "Watch", "calling", "patience"]

T = TypeVar("T")

_FIRST_PAUSE = 0.0002
_LAST_PAUSE = 0.02
_LEAST_PATIENCE = 0.2
_MOST_SECONDS = 1e9

_thread = threading.local()


class Deadline:
    """A point on this process's monotonic clock.

    Args:
        seconds: from now; more than zero.

    Raises:
        ConfigError: ``seconds`` is zero, negative or not a finite number.
    """

    def __init__(self, seconds: float) -> None:
        if isinstance(seconds, bool) or not isinstance(seconds, int | float):
            raise ConfigError(f"timeout {seconds!r} isn't a number: give seconds above zero")
        if not 0 < seconds < float("inf"):
            raise ConfigError(f"timeout {seconds} is not above zero: give the seconds to wait")
        if seconds > _MOST_SECONDS:
            raise ConfigError(f"timeout is beyond {_MOST_SECONDS:.0e} s: give the seconds to wait")
        self.seconds = float(seconds)
        self._end = time.monotonic() + self.seconds

    def remaining(self, grace: float = 0.0) -> float:
        """Seconds left (and ``grace`` more), never below zero."""
        return max(0.0, self._end + grace - time.monotonic())

    def passed(self) -> bool:
        return time.monotonic() >= self._end


@contextlib.contextmanager
def calling(deadline: Deadline) -> Iterator[None]:
    """This thread runs a call with this deadline: ``patience`` keeps to it."""
    before = getattr(_thread, "deadline", None)
    _thread.deadline = deadline
    try:
        yield
    finally:
        _thread.deadline = before


def patience(most: float) -> float:
    """Seconds for an operation that has no deadline of its own, such as one on the session.

    Args:
        most: what it may take outside any call, and on threads of our own.

    Returns:
        What the call that runs on this thread has left, but never more than
        ``most``, nor less than it takes to ask a peer that answers.
    """
    deadline: Deadline | None = getattr(_thread, "deadline", None)
    return most if deadline is None else min(most, max(_LEAST_PATIENCE, deadline.remaining()))


class Watch:
    """What a running version must notice while it waits.

    The thread that renews leases reports failures here; the thread that moves
    bytes looks here between two pauses and before each group.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._deadline: Deadline | None = None
        self._wake = threading.Event()
        self._call = 0

    @property
    def call(self) -> int:
        """Number of the running call, to report a failure of that one only."""
        return self._call

    def start(self, deadline: Deadline) -> None:
        """Begin a new call: forget earlier failures and take its deadline."""
        with self._lock:
            self._call += 1
            self._failure = None
            self._deadline = deadline
            self._wake.clear()

    @property
    def deadline(self) -> Deadline:
        if self._deadline is None:
            raise RuntimeError("Watch.start() comes before any wait")
        return self._deadline

    def fail(self, error: BaseException, call: int | None = None) -> None:
        """Make the current wait, and every later one of this call, raise ``error``.

        Args:
            call: the call that it is about; a verdict on an earlier one is dropped.
        """
        with self._lock:
            if call is not None and call != self._call:
                return
            if self._failure is None:
                self._failure = error
            self._wake.set()

    def cancel(self, reason: str) -> None:
        """The caller gave up: that outweighs what failed before."""
        with self._lock:
            self._failure = Cancelled(reason)
            self._wake.set()

    def forgive(self, error: BaseException) -> None:
        """Go on with the call although ``error`` was reported: its cause is gone."""
        with self._lock:
            if self._failure is error:
                self._failure = None
                self._wake.clear()

    def check(
        self,
        waiting_for: str = "end of the transfer",
        missing: Sequence[str] = (),
        grace: float = 0.0,
    ) -> None:
        """Raise if a peer failed, the caller was cancelled or the deadline passed.

        Args:
            grace: seconds by which this wait outlasts the deadline.
        """
        failure = self._failure
        if failure is not None:
            raise failure
        if not self.deadline.remaining(grace):
            raise TransferTimeout(timeout_message(self.deadline.seconds, waiting_for, missing))

    def pause(self, seconds: float, grace: float = 0.0) -> None:
        """Sleep, but not beyond the deadline nor past a failure."""
        self._wake.wait(min(seconds, self.deadline.remaining(grace)))

    def until(
        self,
        condition: Callable[[], T | None],
        waiting_for: str,
        missing: Callable[[], Sequence[str]] = tuple,
        rest: Callable[[float], object] | None = None,
    ) -> T:
        """Poll ``condition`` until it returns something true.

        Args:
            condition: cheap; polled with pauses from 0.2 ms up to 20 ms.  It may be
                evaluated any number of times, also after it held: it may make progress,
                but nothing may depend on how often it ran.
            waiting_for: noun for the message, such as ``"credits of group 3"``.
            missing: who hasn't answered yet, for the message.
            rest: passes the time between two looks, at most so many seconds, and
                returns early when there may be something new, such as
                ``threading.Event.wait``.

        Raises:
            TransferTimeout: the deadline passed; names ``missing``.
            PeerLost: a peer that this version needs is gone.
        """
        pause = _FIRST_PAUSE
        while True:
            value = condition()
            if value:
                return value
            if self._failure is not None or self.deadline.passed():
                self.check(waiting_for, missing())
            if rest is None:
                self.pause(pause)
            else:
                rest(min(_LAST_PAUSE, self.deadline.remaining()))
            pause = min(pause * 1.5, _LAST_PAUSE)


def timeout_message(seconds: float, waiting_for: str, missing: Sequence[str]) -> str:
    who = f" from {', '.join(missing)}" if missing else ""
    remedy = "check that it is alive (`weightwire inspect`), or raise" if missing else "raise"
    return f"no {waiting_for}{who} within {seconds:g} s: {remedy} the timeout"
