"""Notifications that have come in and wait to be used: exactly once, in any order."""

from __future__ import annotations

import threading
from typing import TypeVar

from weightwire.contract import Policy
from weightwire.errors import TransferError
from weightwire_nixl.wire import Announced, Granted, Message, Written

__all__ = ["Backlog"]

Signal = Announced | Granted | Written
S = TypeVar("S", Announced, Granted, Written)

_MOST_MESSAGES = 1 << 16
_MOST_BYTES = 1 << 28

_Key = tuple[str, type[Message], int]


class Backlog:
    """Signals about groups, by peer, kind and group, for one version at a time.

    Those of the current version and of later ones are kept until they are taken;
    one that was taken isn't taken again, whatever arrives; those of earlier
    versions are dropped.  Its lock is held for a look into a dictionary only.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._policy = Policy(0, 0, 0)
        self._waiting: dict[Policy, dict[_Key, Signal]] = {}
        self._taken: set[_Key] = set()
        self._count = 0
        self._nbytes = 0

    def begin(self, policy: Policy) -> None:
        """A version starts: what belongs to earlier ones is dropped."""
        with self._lock:
            self._policy = policy
            self._taken.clear()
            for old in [known for known in self._waiting if known < policy]:
                for signal in self._waiting.pop(old).values():
                    self._forget(signal)

    def add(self, peer: str, signal: Signal, who: str) -> None:
        """Keep a signal until it is taken.

        Raises:
            TransferError: more has come in than any version needs.
        """
        with self._lock:
            if signal.policy < self._policy:
                return
            key = (peer, type(signal), signal.group)
            waiting = self._waiting.setdefault(signal.policy, {})
            if key in waiting or (signal.policy == self._policy and key in self._taken):
                return
            if self._count >= _MOST_MESSAGES or self._nbytes >= _MOST_BYTES:
                raise TransferError(
                    f"{self._count} signals ({self._nbytes} bytes) wait to be used, the last one "
                    f"from {who}: more than any version needs; restart it"
                )
            waiting[key] = signal
            self._count += 1
            self._nbytes += _nbytes(signal)

    def take(self, peer: str, kind: type[S], group: int) -> S | None:
        """The peer's signal about a group of the current version, once."""
        with self._lock:
            key = (peer, kind, group)
            signal = self._waiting.get(self._policy, {}).pop(key, None)
            if signal is None:
                return None
            self._forget(signal)
            self._taken.add(key)
            assert isinstance(signal, kind)  # noqa: S101 - the kind is part of the key
            return signal

    def forget(self, peer: str) -> None:
        """Drop what a peer that is gone has sent."""
        with self._lock:
            for waiting in self._waiting.values():
                for key in [known for known in waiting if known[0] == peer]:
                    self._forget(waiting.pop(key))

    def __len__(self) -> int:
        return self._count

    def _forget(self, signal: Signal) -> None:
        self._count -= 1
        self._nbytes -= _nbytes(signal)


def _nbytes(signal: Signal) -> int:
    return 256 + (0 if isinstance(signal, Granted) else len(signal.seal))
