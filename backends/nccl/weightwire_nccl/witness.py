"""Who is to blame for a long wait: not who is waited for, but who neither waits nor moves.

A member that stands still makes others wait, and these make others wait in turn.
Whoever has waited for a while says in the store, again and again, for whom; the
one at the end of every such chain who says nothing is the one that is missing.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence

import msgspec

from weightwire.contract import decode_message
from weightwire.errors import WeightWireError
from weightwire_nccl.meeting import Client
from weightwire_nccl.records import Wait

__all__ = ["Witness", "silent"]

_PAUSE_SECONDS = 0.1
_BEATS_MISSED = 5
_JOIN_SECONDS = 0.5


class Witness:
    """A thread for the time of one long wait.

    Args:
        client: a connection of its own; made before, since connecting to a server that
            stands still can't be ended at once.
        prefix: of the group's keys.
        rank: of this process in the group.
        awaited: the ranks for which it waits now.
    """

    def __init__(
        self,
        client: Client,
        prefix: str,
        rank: int,
        size: int,
        awaited: Callable[[], Sequence[int]],
    ) -> None:
        self._client = client
        self._prefix = prefix
        self._rank = rank
        self._size = size
        self._awaited = awaited
        self._beats: dict[int, tuple[int, int]] = {}
        self._over = threading.Event()
        self._silent: tuple[int, ...] = ()
        self._thread = threading.Thread(target=self._run, name="weightwire-witness", daemon=True)
        self._thread.start()

    @property
    def silent(self) -> tuple[int, ...]:
        """Ranks at the ends of the chains of waits; empty while that isn't known."""
        return self._silent

    def close(self) -> None:
        """End the thread."""
        self._over.set()
        self._thread.join(_PAUSE_SECONDS)
        if self._thread.is_alive():
            self._client.hang_up()
            self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        with contextlib.suppress(WeightWireError):
            beat = 0
            while not self._over.is_set():
                beat += 1
                wait = Wait(beat, tuple(self._awaited()))
                self._client.put(self._key(self._rank), msgspec.msgpack.encode(wait))
                waits = {self._rank: wait.awaited, **self._others(beat)}
                if beat > _BEATS_MISSED:
                    self._silent = silent(self._rank, waits)
                self._over.wait(_PAUSE_SECONDS)
            self._client.forget(self._key(self._rank))

    def _others(self, now: int) -> dict[int, tuple[int, ...]]:
        """For whom those wait who have said so lately."""
        found = {}
        for rank in range(self._size):
            payload = self._client.peek(self._key(rank)) if rank != self._rank else None
            if payload is None:
                continue
            wait = decode_message(payload, Wait, f"member {rank}")
            seen, since = self._beats.get(rank, (-1, now))
            if wait.beat != seen:
                since = now
                self._beats[rank] = (wait.beat, now)
            if now - since < _BEATS_MISSED:
                found[rank] = wait.awaited
        return found

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/waits/{rank}"


def silent(start: int, waits: Mapping[int, Sequence[int]]) -> tuple[int, ...]:
    """Those who are waited for, directly or not, and don't wait themselves.

    Args:
        start: a rank that waits.
        waits: for whom each waiting rank waits.
    """
    seen: set[int] = set()
    ends: set[int] = set()
    pending = [start]
    while pending:
        rank = pending.pop()
        if rank in seen:
            continue
        seen.add(rank)
        if rank in waits:
            pending += waits[rank]
        else:
            ends.add(rank)
    return tuple(sorted(ends))
