"""Protocols as generators: straight-line code that a test can interleave and crash anywhere.

A protocol step that must wait yields ``Waiting`` and looks again when resumed;
one that needs its driver to act (move bytes, commit) yields an ``Act`` and gets
the result back.  Production runs one with ``drive``; the tests schedule many at
random and drop some half-way, as a crash would.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from weightwire.deadline import Watch

__all__ = ["Act", "Run", "Steps", "Waiting", "drive"]

T = TypeVar("T")
A = TypeVar("A", bound="Act")

_FIRST_PAUSE = 0.0005
_LAST_PAUSE = 0.25
_LAST_PAUSE_OF_A_BELL = 0.01


@dataclass(frozen=True)
class Waiting:
    """Nothing to do until another process acts.

    Attributes:
        for_what: noun for an error message.
        missing: who hasn't acted yet.
        grace: seconds by which this wait outlasts the call's deadline, because the
            one who is waited for has the same deadline and will say why it failed.
        bell: a number that changes when there may be news, where that is cheaper to ask for
            than to look; the protocol looks from time to time all the same.
    """

    for_what: str
    missing: Sequence[str]
    grace: float = 0.0
    bell: Callable[[], int] | None = None


class Act:
    """Base of what a protocol asks its driver to do."""


Steps: TypeAlias = Generator[Waiting | Act, Any, T]
Perform: TypeAlias = Callable[[Act], Any]


class Run(Generic[T]):
    """A protocol on its way: waits for it, performs its acts, and can stop at one of them.

    What the watch knows of (a lost peer, a passed deadline, a cancelled caller)
    and what an act raises is raised *inside* the protocol, so that it can abort
    in good order.

    Args:
        perform: carries out an act and returns its result.
    """

    def __init__(self, steps: Steps[T], watch: Watch, perform: Perform | None = None) -> None:
        self._steps = steps
        self._watch = watch
        self._perform = perform
        self._pending: Waiting | Act | None = None
        self._result: T | None = None

    def until(self, kind: type[A]) -> A:
        """Run up to the next act of type ``kind``, which is performed when the run goes on."""
        act = self._run(kind, None)
        if not isinstance(act, kind):
            raise TypeError(f"the protocol ended before {kind.__name__}")
        self._pending = act
        return act

    def finish(self) -> T:
        """Run to the end; returns what the protocol returns."""
        self._run(None, None)
        return self._result  # type: ignore[return-value]  # set when the protocol returned

    def fail(self, error: BaseException) -> None:
        """Raise ``error`` where the protocol stopped, and let it abort."""
        self._run(None, error)

    def _run(self, stop_at: type[Act] | None, failure: BaseException | None) -> Act | None:
        step, self._pending = self._pending, None
        send: Any = None
        waits_since: float | None = None
        heard: int | None = None
        while True:
            try:
                if step is None or failure is not None:
                    error, failure = failure, None
                    step = self._steps.send(send) if error is None else self._steps.throw(error)
                    send = None
                    if stop_at is not None and isinstance(step, stop_at):
                        return step
                if isinstance(step, Waiting):
                    self._watch.check(step.for_what, step.missing, step.grace)
                    now = time.monotonic()
                    waits_since = now if waits_since is None else waits_since
                    # Looks are a tenth of the wait so far apart: soon at first, cheap later.
                    pause = min(max(_FIRST_PAUSE, (now - waits_since) / 10), _LAST_PAUSE)
                    heard, is_rung = self._doze(step, pause, now - waits_since, heard)
                    if is_rung:
                        waits_since = None  # what was announced comes within moments
                else:
                    waits_since = heard = None
                    if self._perform is None:
                        raise TypeError(f"nobody performs {step!r}")
                    send = self._perform(step)
            except BaseException as error:
                if inspect.getgeneratorstate(self._steps) == inspect.GEN_CLOSED:
                    if not isinstance(error, StopIteration):
                        raise  # the protocol itself ended with it
                    self._result = error.value
                    return None
                # Wherever it came from (an interrupt comes anywhere), the protocol aborts.
                failure = error
            step = None

    def _doze(
        self, step: Waiting, pause: float, waited: float, heard: int | None
    ) -> tuple[int | None, bool]:
        """Pause until the next look, or until the bell rings.

        Args:
            heard: what the bell said before the last look: what rang since isn't missed.

        Returns:
            What it says now, and whether it rang.
        """
        shortest = min(max(_FIRST_PAUSE, waited / 50), _LAST_PAUSE_OF_A_BELL)
        if step.bell is None or shortest >= pause:
            self._watch.pause(pause, step.grace)
            return heard, False
        if heard is None:
            return step.bell(), False  # and look at once
        end = time.monotonic() + pause
        while (left := end - time.monotonic()) > 0:
            self._watch.pause(min(shortest, left), step.grace)
            self._watch.check(step.for_what, step.missing, step.grace)
            if (now := step.bell()) != heard:
                return now, True
        return heard, False


def drive(steps: Steps[T], watch: Watch, perform: Perform | None = None) -> T:
    """Run a protocol from its beginning to its end."""
    return Run(steps, watch, perform).finish()
