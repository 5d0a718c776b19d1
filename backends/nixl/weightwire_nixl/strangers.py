"""Agents that signal before they were met: they begin a version before this rank has.

Some never are: this rank may fail before it begins.  A reader that has granted its slots keeps
that memory aside until it knows that nothing will be written there, which only this rank can say.
"""

from __future__ import annotations

import contextlib
import time

from weightwire.errors import WeightWireError
from weightwire_nixl.agent import Agent
from weightwire_nixl.early import Early
from weightwire_nixl.wire import Bye, GaveUp, Granted, Over, encode, readable

__all__ = ["Strangers"]

_CONNECTING = 2.0
"""Seconds in which a first signal to an agent has left: it connects before."""

_LINGERING = 30.0
"""Seconds for which a closing agent waits to answer who hasn't given up yet."""


class Strangers:
    """Keeps their signals until they are met, and answers those that give up before."""

    def __init__(self) -> None:
        self._early = Early()
        self._granted: set[str] = set()  # whose memory waits for an answer, should they give up
        self._answered: dict[str, float] = {}

    def hear(self, agent: Agent, name: str, payload: bytes) -> None:
        """Keep a signal; or answer it, if it says that its sender gave up.

        Raises:
            TransferError: more has come in than a version's beginning needs.
        """
        if name in self._answered:
            return  # signals come in any order: it has given up
        message = readable(payload)
        if isinstance(message, Granted):
            self._granted.add(name)
        if isinstance(message, Bye):
            self.meet(name)
        elif isinstance(message, GaveUp) and message.metadata:
            self.meet(name)
            self._answered[name] = time.monotonic()
            who = f"a receiver that gave up ({name[:64]})"
            with contextlib.suppress(WeightWireError):  # it is gone by now
                agent.add(name, message.metadata, who)
                agent.notify(name, encode(Over(message.policy)), who)
        else:
            self._early.add(name, payload)

    def was_answered(self, name: str) -> bool:
        """Whether it was told that nothing will be written to it."""
        return name in self._answered

    def meet(self, name: str) -> list[bytes]:
        """Its signals, in the order in which they came."""
        self._granted.discard(name)
        return self._early.take(name)

    def begun(self, agent: Agent) -> None:
        """A version began: what is left is of earlier ones, and later offers name successors."""
        self._early.clear()
        self._granted.clear()
        for name in [name for name, at in self._answered.items() if _is_sent(at)]:
            del self._answered[name]
            agent.remove(name)

    def is_over(self, closing_since: float) -> bool:
        """Whether the agent may close: nobody waits for an answer, and answers have left."""
        waits = bool(self._granted) and time.monotonic() < closing_since + _LINGERING
        return not waits and all(map(_is_sent, self._answered.values()))


def _is_sent(at: float) -> bool:
    return time.monotonic() >= at + _CONNECTING
