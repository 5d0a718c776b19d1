"""What a pool asks of an engine, whichever way it is reached."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

__all__ = ["EngineControl", "PauseMode"]

PauseMode = Literal["keep", "wait", "abort"]


class EngineControl(ABC):
    """One vLLM engine: vLLM's own calls, and nothing else.

    Each call ends within ``timeout`` seconds.  Errors are of weightwire's tree; their
    first line names the engine, and has the reason that it gave.

    Attributes:
        name: for messages; a URL where there is one.
    """

    name: str

    @abstractmethod
    async def check(self, timeout: float) -> None:
        """Raise unless it is there and can be driven.

        Raises:
            PeerLost: nothing answers.
            AuthenticationError: it wants a key.
            UnsupportedOperation: it doesn't have the calls.
        """

    @abstractmethod
    async def pause(self, mode: PauseMode, timeout: float) -> None:
        """Stop generating.  Idempotent; no cache is cleared."""

    @abstractmethod
    async def resume(self, timeout: float) -> None:
        """Generate again.  Idempotent; an engine that sleeps refuses (``is_asleep``)."""

    @abstractmethod
    async def is_paused(self, timeout: float) -> bool:
        """Whether it generates nothing: somebody paused it, or it sleeps."""

    @abstractmethod
    async def wake(self, tags: Sequence[str], timeout: float) -> None:
        """Give an engine that sleeps its memory again: ``weights``, ``kv_cache``.

        One that has all of it afterwards generates again.
        """

    @abstractmethod
    async def attach(self, info: dict[str, Any], timeout: float) -> None:
        """``init_weight_transfer_engine``.  Idempotent for equal ``info``."""

    @abstractmethod
    async def detach(self, timeout: float) -> None:
        """``shutdown_weight_transfer_engine``: it leaves the session."""

    @abstractmethod
    async def start(self, timeout: float) -> None:
        """``start_weight_update``; an engine whose weights sleep refuses (``is_asleep``)."""

    @abstractmethod
    async def update(self, info: dict[str, Any], timeout: float) -> None:
        """``update_weights``."""

    @abstractmethod
    async def finish(self, timeout: float) -> None:
        """``finish_weight_update``, which leaves the version's name as it is."""

    @abstractmethod
    async def name_version(self, version: str, timeout: float) -> str:
        """Attribute tokens to this version from now on; returns what the engine then says."""

    @abstractmethod
    async def reset_caches(self, timeout: float) -> None:
        """Drop what was computed with old weights, requests in flight included: they are redone.

        Raises:
            TransferError: it couldn't.
        """

    async def close(self) -> None:
        """Forget the connection."""
