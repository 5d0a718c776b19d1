"""How a trainer rank's agent ends: at once, or when nobody may read its memory any more."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping

from weightwire.contract import Policy
from weightwire.errors import WeightWireError
from weightwire_nixl.agent import Agent
from weightwire_nixl.aside import leave_behind
from weightwire_nixl.live import LiveMemory
from weightwire_nixl.pool import SlotPool
from weightwire_nixl.reader import Reader
from weightwire_nixl.strangers import Strangers
from weightwire_nixl.wire import Bye, Credit, GaveUp, Message, Over, encode, readable

__all__ = ["leave"]


def leave(
    agent: Agent,
    pool: SlotPool,
    live: LiveMemory | None,
    known: Mapping[str, Reader],
    strangers: Strangers,
    policy: Policy,
) -> None:
    """Close an agent; set it aside instead where somebody may still touch its memory.

    Args:
        pool, live: its memory, which nobody else keeps from now on.
        known: the readers that it has met, by agent.
        strangers: who has signalled and wasn't met.
        policy: the last version.
    """
    # Who is written to touches nothing of it; what is written is in flight, or isn't.
    late = {key: reader for key, reader in pool.late.items() if reader.writes is None}
    known = dict(known)
    memory: list[object] = [pool, live]  # alive as long as the agent
    since = time.monotonic()

    def is_over() -> bool:
        signals: dict[str, list[bytes]] = {}
        with contextlib.suppress(WeightWireError):
            signals = agent.drain()
        for name, messages in signals.items():
            if name not in known:
                for payload in messages:
                    with contextlib.suppress(WeightWireError):
                        strangers.hear(agent, name, payload)
            for message in map(readable, messages):
                if isinstance(message, Bye) and name in known:
                    known[name].said_bye = True  # it needs no goodbye of ours
                for key in [key for key in late if key[0] == name and _frees(message, key[1])]:
                    del late[key]
        is_free = not agent.in_flight and all(reader.is_gone for reader in late.values())
        return is_free and strangers.is_over(since)

    def release() -> None:
        # Only now: whoever hears it takes its memory for its own again.
        for reader in known.values():
            if not reader.is_gone:
                with contextlib.suppress(WeightWireError):
                    agent.notify(reader.agent, encode(Bye(policy)), reader.who)
        agent.close()
        del memory[:]

    if is_over():
        release()
    else:
        leave_behind(is_over, release)


def _frees(message: Message | None, generation: int) -> bool:
    """Whether a signal says that its sender reads this generation no more."""
    match message:
        case Credit():
            return message.generation == generation
        case GaveUp():
            return not message.in_flight
        case Over() | Bye():
            return True
    return False
