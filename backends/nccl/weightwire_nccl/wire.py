"""What the backend needs of a communication library: tagged messages, broadcast, abort."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["Wire", "WireBroken", "WireLate", "Work", "nothing"]


def nothing() -> None:
    """There is nothing to do."""


class WireBroken(Exception):
    """A connection ended, or the library failed."""


class WireLate(WireBroken):
    """An operation wasn't complete in time.  The communicator is of no more use."""


class Work(ABC):
    """An operation under way.  It keeps its tensor alive."""

    @abstractmethod
    def wait(self, seconds: float) -> None:
        """Return when the tensor may be used again (sent), or holds what came.

        From any thread, whoever posted it.

        Raises:
            WireLate: after ``seconds``.
            WireBroken: the peer is gone, or the wire was aborted.
        """

    def follow(self) -> None:
        """Let what the calling thread posts next, on whatever wire, start after this."""


class Wire(ABC):
    """One communicator.  What carries payload is posted on one thread.

    Attributes:
        device: where its tensors lie.
    """

    device: torch.device

    @abstractmethod
    def send(self, tensor: Tensor, peer: int, tag: int) -> Work:
        """Send a contiguous tensor; messages of one tag stay in order."""

    @abstractmethod
    def recv(self, tensor: Tensor, peer: int, tag: int) -> Work:
        """Fill a contiguous tensor with the peer's next message of this tag and size."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, root: int) -> Work:
        """Every rank calls it, in the same order."""

    def together(self, post: Callable[[], Sequence[Work]]) -> Sequence[Work]:
        """Let what ``post`` posts leave as one, where the library can.

        Returns:
            What completes all of it.  A broadcast's ranks all post the same together.
        """
        return post()

    def fence(self) -> Callable[[], None]:
        """Mark what the calling thread has enqueued on its device.

        Returns:
            To be called on the thread that posts, before it touches that memory.
        """
        return nothing

    def flush(self) -> None:
        """Return when the calling thread's own copies are done."""

    @abstractmethod
    def abort(self) -> None:
        """End every operation under way with ``WireBroken``, here and at the peers.

        From any thread; returns at once or within milliseconds.  Idempotent.
        """

    @abstractmethod
    def close(self) -> None:
        """Release connections and threads; nothing is under way, or it was aborted."""
