"""The session store: a small, slow, durable map from keys to bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from urllib.parse import SplitResult

from weightwire.deadline import Deadline

__all__ = ["OpenRequest", "PartOfStore", "SessionScheme", "SessionStore"]


class SessionStore(ABC):
    """Where a session's records are kept.

    Every operation is atomic and returns within seconds or raises
    ``SessionError`` with the address and the remedy.  Operations may be called
    from several threads.  Keys have been validated (``keys.validate_key``).
    """

    url: str
    directory: Path | None = None
    """The session's directory, for stores that are one; backends may keep versions there."""
    outlives_members: bool = True
    """If False, the store goes with the member that serves it: whoever waits for an offer
    waits for the store to come back, and joins the new session there."""
    counts_rings: bool = False
    """Whether ``rings`` answers, and several times as cheaply as the looks at records that it
    saves: those who wait ask for it between two looks."""

    @abstractmethod
    def get(self, key: str) -> bytes | None:
        """The value at ``key``, or None."""

    @abstractmethod
    def put(self, key: str, value: bytes, *, durable: bool = True) -> None:
        """Replace the value at ``key``: readers see the old one or the new one, whole.

        Args:
            durable: if False, the value may be lost with the machine, and a day after it was
                written last (leases).
        """

    @abstractmethod
    def create(self, key: str, value: bytes) -> bool:
        """Set ``key`` only if it is absent; of several callers exactly one gets True.

        Args:
            value: UTF-8 text, as every record is.
        """

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove ``key`` if it is there."""

    @abstractmethod
    def children(self, prefix: str) -> list[str]:
        """Sorted next components of all keys below ``prefix``."""

    @abstractmethod
    def delete_tree(self, prefix: str) -> None:
        """Remove ``prefix`` and every key below it."""

    def ring(self, bell: str) -> None:
        """Tell those who wait that a record is about to be written.

        Args:
            bell: a valid key; it is no record.
        """

    def rings(self, bell: str) -> int:
        """How often ``ring`` was called by anybody.  Asked for where ``counts_rings``."""
        return 0

    @abstractmethod
    def close(self) -> None:
        """Release the connection; the records stay.  Idempotent."""


class PartOfStore(SessionStore):
    """What lies below one key of another store, which outlives it."""

    def __init__(self, whole: SessionStore, below: str) -> None:
        self._whole = whole
        self._below = below
        self.url = f"{whole.url}/{below}"
        self.directory = whole.directory / below if whole.directory is not None else None
        self.outlives_members = whole.outlives_members
        self.counts_rings = whole.counts_rings

    def _key(self, key: str) -> str:
        return f"{self._below}/{key}"

    def get(self, key: str) -> bytes | None:
        return self._whole.get(self._key(key))

    def put(self, key: str, value: bytes, *, durable: bool = True) -> None:
        self._whole.put(self._key(key), value, durable=durable)

    def create(self, key: str, value: bytes) -> bool:
        return self._whole.create(self._key(key), value)

    def delete(self, key: str) -> None:
        self._whole.delete(self._key(key))

    def children(self, prefix: str) -> list[str]:
        return self._whole.children(self._key(prefix))

    def delete_tree(self, prefix: str) -> None:
        self._whole.delete_tree(self._key(prefix))

    def ring(self, bell: str) -> None:
        self._whole.ring(self._key(bell))

    def rings(self, bell: str) -> int:
        return self._whole.rings(self._key(bell))

    def close(self) -> None:
        """The whole store is closed by whoever opened it."""


@dataclass(frozen=True)
class OpenRequest:
    """What a scheme is asked to open.

    Attributes:
        url: the session URL in parts.
        serve: if True, this process is the one that serves the store, where the
            scheme has a server in a member (the sender's rank 0 of ``tcp``).
        authenticated: whether the session has a token.
        deadline: for connecting.
        read_only: if True, the store must exist and nothing is written (``inspect``).
    """

    url: SplitResult
    serve: bool
    authenticated: bool
    deadline: Deadline
    read_only: bool = False


class SessionScheme(ABC):
    """A URL scheme for sessions, as a plug-in describes it."""

    scheme: ClassVar[str]
    summary: ClassVar[str]

    @abstractmethod
    def open(self, request: OpenRequest) -> SessionStore:
        """Open the store.

        Raises:
            ConfigError: the URL is malformed.
            SessionError: it can't be reached, created or written.
        """
