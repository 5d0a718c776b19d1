"""Signals of agents that aren't known yet: they begin a version before this rank has."""

from __future__ import annotations

from weightwire.errors import TransferError

__all__ = ["Early"]

_MOST_MESSAGES = 1 << 14
_MOST_BYTES = 1 << 27


class Early:
    """Encoded signals by agent, until the agent is known or the version has begun."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[bytes]] = {}
        self._count = 0
        self._nbytes = 0

    def add(self, agent: str, payload: bytes) -> None:
        """Keep a signal.

        Raises:
            TransferError: more has come in than a version's beginning needs.
        """
        if self._count >= _MOST_MESSAGES or self._nbytes >= _MOST_BYTES:
            raise TransferError(
                f"{self._count} signals ({self._nbytes} bytes) came from agents that no offer "
                f"names, the last one from {agent[:64]!r}: end what sends them"
            )
        self._waiting.setdefault(agent, []).append(payload)
        self._count += 1
        self._nbytes += len(payload)

    def take(self, agent: str) -> list[bytes]:
        """Those of one agent, in the order in which they came."""
        found = self._waiting.pop(agent, [])
        self._count -= len(found)
        self._nbytes -= sum(len(payload) for payload in found)
        return found

    def clear(self) -> None:
        self._waiting.clear()
        self._count = self._nbytes = 0
