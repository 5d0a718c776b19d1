"""Ending a Gloo process group whose peers may be gone."""

from __future__ import annotations

import contextlib
import datetime
from typing import Any

import torch

__all__ = ["end_group"]

_NO_TAG = 1 << 30  # nobody sends with it
_AT_ONCE = datetime.timedelta(milliseconds=1)


def end_group(group: Any) -> None:
    """End every operation under way on a ``ProcessGroupGloo``, here and at its peers.

    ``ProcessGroupGloo.abort`` leaves whoever waits for a message waiting.  A receive
    that times out doesn't: Gloo then closes every connection of the group, and each
    wait on one ends in a ``RuntimeError`` within milliseconds.  From any thread.
    """
    for distance in range(1, group.size()):  # a peer that is gone fails at once: no time-out
        nothing = torch.empty(1, dtype=torch.uint8)
        peer = (group.rank() + distance) % group.size()
        with contextlib.suppress(RuntimeError):  # as intended, or it was closed already
            group.recv([nothing], peer, _NO_TAG).wait(_AT_ONCE)
    group.abort()
