"""What the machines ask their drivers to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weightwire.contract import Offer
from weightwire.waiting import Act

__all__ = ["Commit", "Fetch", "Install", "Prepare", "Rollback", "Transfer"]


@dataclass(frozen=True)
class Transfer(Act):
    """Sender: move the bytes of every rank, and return when they are safe.

    Attributes:
        readers: for each receiver that is ready, its ranks' transport descriptions.
    """

    offer: Offer
    readers: Mapping[str, Sequence[bytes]]


@dataclass(frozen=True)
class Prepare(Act):
    """Receiver: plan, size buffers; the result is each rank's transport description."""

    offer: Offer


@dataclass(frozen=True)
class Install(Act):
    """Receiver: the transfer has started; the engine pauses now."""

    offer: Offer


@dataclass(frozen=True)
class Fetch(Act):
    """Receiver: bring and write every group."""

    offer: Offer


@dataclass(frozen=True)
class Commit(Act):
    """Receiver: finish the target; the result is an ``Applied`` record."""

    offer: Offer


@dataclass(frozen=True)
class Rollback(Act):
    """Receiver: undo after a failure; the result is True when the target is as it was before."""

    error: BaseException
