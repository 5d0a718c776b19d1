"""Nothing grows, nothing is left; every other scenario is looked at for leavings, too."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from weightwire_conformance.rig import Fleet, Side
from weightwire_conformance.scenario import scenario

__all__: list[str] = []

_RESIDENT_BYTES = 8 << 20
_SETTLE_SECONDS = 5.0  # spent only where something is left


def usage(fleet: Fleet, *sides: Side) -> dict[str, Any]:
    """Of every process, and files; the session's own records are core's to bound."""
    found: dict[str, Any] = {
        f"{side.name} rank {rank}": used
        for side in sides
        for rank, used in enumerate(side.call("usage"))
    }
    records = fleet.directory / "session" / "records"
    found["files"] = sum(
        path.is_file() and not path.is_relative_to(records) for path in fleet.directory.rglob("*")
    )
    return found


def same(before: dict[str, Any], look: Callable[[], dict[str, Any]]) -> None:
    """Fail unless nothing has grown; resident memory by 8 MiB at most.

    What grew is looked at again for a while: a file that is about to be deleted, or a
    lease that is being renewed, is no growth.
    """
    end = time.monotonic() + _SETTLE_SECONDS
    while grown := _grown(before, look()):
        assert time.monotonic() < end, grown[0]


def _grown(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    found = []
    for who, now in after.items():
        if not isinstance(now, dict):
            if now > before[who]:
                found.append(f"{who} grew from {before[who]} to {now}")
            continue
        for what, amount in now.items():
            allowed = _RESIDENT_BYTES if what == "resident" else 0
            if amount > before[who][what] + allowed:
                found.append(f"{what} of {who} grew from {before[who][what]} to {amount}")
    return found


@scenario(soak=True)
def fifty_versions_leave_everything_flat(fleet: Fleet) -> None:
    """Version 50 against version 10: descriptors, threads, mappings, files, memory."""
    sizes = {"count": 4, "width": 2048}
    sender = fleet.sender(sizes=sizes, group_bytes=128 << 10)
    replica = fleet.receiver(sizes=sizes)
    before: dict[str, Any] = {}
    for version in range(1, 51):
        fleet.exchange(sender, version, replica)
        if version == 10:
            before = usage(fleet, sender, replica)
    same(before, lambda: usage(fleet, sender, replica))


@scenario
def a_few_versions_leave_descriptors_flat(fleet: Fleet) -> None:
    """Version 9 against version 5."""
    sender, replica = fleet.sender(), fleet.receiver()
    before: dict[str, Any] = {}
    for version in range(1, 10):
        fleet.exchange(sender, version, replica)
        if version == 5:
            before = usage(fleet, sender, replica)
    same(before, lambda: usage(fleet, sender, replica))


@scenario
def opening_and_closing_leaves_nothing(fleet: Fleet) -> None:
    """Both sides, again and again, in the same processes."""
    sender, replica = fleet.sender(ranks=2), fleet.receiver(ranks=2)
    before: dict[str, Any] = {}
    for turn in range(1, 4):
        fleet.exchange(sender, turn, replica)
        replica.close()
        sender.close()
        if turn == 1:
            before = {**usage(fleet, sender, replica), "files": 1 << 30}
        if turn < 3:
            sender = fleet.sender(workers=sender.workers)
            replica = fleet.receiver(workers=replica.workers)
    same(before, lambda: usage(fleet, sender, replica))


@scenario
def closing_in_the_midst_of_a_version_leaves_nothing(fleet: Fleet) -> None:
    sender, replica = fleet.sender(), fleet.receiver()
    fleet.exchange(sender, 1, replica)
    replica.arm("receiver.fetch", after=1)
    sending = sender.start("send", version=2, wait="applied")
    receiving = replica.start("receive")
    replica.first.until_at("receiver.fetch")
    closing = replica.first.start("close", now=True)
    replica.first.release("receiver.fetch")
    receiving.outcome()
    closing.result()
    sending.outcome()
    sender.close()
