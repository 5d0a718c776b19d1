"""Protocols as generators: straight-line code that a test can interleave and crash anywhere.

A protocol step that must wait yields ``Waiting`` and looks again when resumed;
one that needs its driver to act (move bytes, commit) yields an ``Act`` and gets
the result back.  Production runs one with ``drive``; the tests schedule many at
random and drop some half-way, as a crash would.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from weightwire.deadline import Watch

__all__ = ["Act", "Run", "Steps", "Waiting", "drive"]

T = TypeVar("T")
A = TypeVar("A", bound="Act")

_FIRST_PAUSE = 0.0005
_LAST_PAUSE = 0.03


@dataclass(frozen=True)
class Waiting:
    """Nothing to do until another process acts.

    Attributes:
        for_what: noun for an error message.
        missing: who hasn't acted yet.
        grace: seconds by which this wait outlasts the call's deadline, because the
            one who is waited for has the same deadline and will say why it failed.
    """

    for_what: str
    missing: Sequence[str]
    grace: float = 0.0


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
        pause = _FIRST_PAUSE
        step, self._pending = self._pending, None
        send: Any = None
        while True:
            if step is None or failure is not None:
                try:
                    step = (
                        self._steps.throw(failure)
                        if failure is not None
                        else self._steps.send(send)
                    )
                except StopIteration as stop:
                    self._result = stop.value
                    return None
                send, failure = None, None
                if stop_at is not None and isinstance(step, stop_at):
                    return step
            try:
                if isinstance(step, Waiting):
                    self._watch.check(step.for_what, step.missing, step.grace)
                    self._watch.pause(pause, step.grace)
                    pause = min(pause * 1.5, _LAST_PAUSE)
                else:
                    pause = _FIRST_PAUSE
                    if self._perform is None:
                        raise TypeError(f"nobody performs {step!r}")
                    send = self._perform(step)
            except BaseException as error:
                failure = error
            step = None


def drive(steps: Steps[T], watch: Watch, perform: Perform | None = None) -> T:
    """Run a protocol from its beginning to its end."""
    return Run(steps, watch, perform).finish()
