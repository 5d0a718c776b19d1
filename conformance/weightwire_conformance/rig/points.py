"""Points in a worker at which a scenario may act: stop, fail, die, go slow, or corrupt."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Literal

__all__ = ["Action", "PlannedFailure", "Points"]

Action = Literal["stop", "raise", "interrupt", "slow", "flip", "misseal"]
"""What happens at an armed point.

``stop`` until it is released; ``raise`` a ``PlannedFailure``; ``interrupt`` this
process; go ``slow`` (every time); ``flip`` a bit of the payload, or ``misseal``
it: these two are done by whoever reached the point.
"""

_SLOW_SECONDS = 0.05
_LOOK_SECONDS = 0.05


class PlannedFailure(RuntimeError):
    """An engine's own failure, because a scenario asked for it."""


class _Gate:
    def __init__(self, action: Action, after: int) -> None:
        self.action = action
        self.left = after
        self.opened = threading.Event()


class Points:
    """The armed points of one worker.

    Args:
        report: told the name of a point at which the worker has stopped.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._armed: dict[str, _Gate] = {}
        self._stopped: dict[str, _Gate] = {}

    def arm(self, point: str, action: Action = "stop", after: int = 0) -> None:
        """Act at a point, the ``after + 1``-th time that it is reached."""
        self._armed[point] = _Gate(action, after)

    def release(self, point: str) -> None:
        self._stopped.pop(point).opened.set()

    def disarm(self) -> None:
        self._armed.clear()
        while self._stopped:
            self._stopped.popitem()[1].opened.set()

    def reach(self, point: str) -> Action | None:
        """Called by the worker at a point; returns what the caller itself must do."""
        gate = self._armed.get(point)
        if gate is None:
            return None
        if gate.left > 0:
            gate.left -= 1
            return None
        if gate.action == "slow":
            time.sleep(_SLOW_SECONDS)
            return "slow"
        del self._armed[point]
        match gate.action:
            case "stop":
                self._stopped[point] = gate
                self._report(point)
                # In short waits: a signal that comes as one begins doesn't end it.
                while not gate.opened.wait(_LOOK_SECONDS):
                    pass
            case "raise":
                raise PlannedFailure(f"planned failure at {point}")
            case "interrupt":
                os.kill(os.getpid(), signal.SIGINT)
        return gate.action
