"""What both sides do with the other side's metadata."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from weightwire.contract import Context
from weightwire.errors import ConfigError, PeerLost
from weightwire.session import process
from weightwire_nixl.wire import ReaderInfo, SenderInfo

__all__ = ["check_alike", "least_pause", "naps"]

_LEAST_PAUSE = 0.0001
_LEAST_BESIDE_GPU = 0.00002
"""Where a GPU moves the bytes, its time is what is waited for, and no peer needs the core."""
_SHARE = 50


def naps(device: torch.device) -> Callable[[float], None]:
    """How ``Watch.until`` rests between two looks while bytes move: its ``rest``.

    Pauses are a fiftieth of the wait so far: what takes milliseconds is noticed within
    tenths of one, and a long wait costs next to nothing.  It always sleeps, because the
    peer may need the core.

    Args:
        device: of this rank's slots.
    """
    least = least_pause(device)
    began = time.monotonic()

    def rest(most: float) -> None:
        waited = time.monotonic() - began
        time.sleep(min(most, max(least, waited / _SHARE)))

    return rest


def least_pause(device: torch.device) -> float:
    """Seconds between two looks while bytes move to or from a rank's slots on ``device``."""
    return _LEAST_BESIDE_GPU if device.type == "cuda" else _LEAST_PAUSE


def check_alike(
    context: Context,
    ours: SenderInfo | ReaderInfo,
    theirs: SenderInfo | ReaderInfo,
    who: str,
) -> None:
    """Refuse metadata of another session, of a dead process, or with other options.

    Raises:
        PeerLost: the peer is of another session, or gone.
        ConfigError: the two sides were opened with different options.
    """
    if theirs.session != context.session_id:
        raise PeerLost(
            f"{who} describes itself as of session {theirs.session!r}, this is "
            f"{context.session_id!r}: restart it"
        )
    if process.is_gone(theirs.process):
        raise PeerLost(f"{who} is gone: restart it, and send again")
    for option in ("direction", "unsafe_pull"):
        here, there = getattr(ours, option), getattr(theirs, option)
        if here != there:
            raise ConfigError(
                f"nixl option {option!r} is {here!r} here and {there!r} at {who}: give both sides "
                "the same"
            )
