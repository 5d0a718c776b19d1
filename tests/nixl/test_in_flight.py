"""Transfers that are under way when a side stops or dies: they can't be cancelled."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from nixl_rig import WAYS, NixlFleet, Way, exchange
from process_rig import Calls, Side, Worker, WorkerDied, until

MakeFleet = Callable[..., NixlFleet]

LEASE = 1.0
WATCHED_SECONDS = 5.0
TRIES = 6
LARGE = {"model": "big", "group_bytes": 64 << 20}  # one group, tens of milliseconds over TCP
TCP = [way for way in WAYS if way.path == "TCP"]


@dataclass(frozen=True)
class Caught:
    """A version whose bytes are under way; ``mover`` is held at that point."""

    version: int
    sending: Calls
    receiving: Calls
    mover: Worker


def catch(fleet: NixlFleet, sender: Side, replica: Side) -> Caught:
    """Send versions from 2 on, until one doesn't arrive within the call that posts it."""
    mover = (sender if fleet.way.push else replica).first
    mover.arm("transfer.posted")
    for version in range(2, 2 + TRIES):
        before = len(mover.events)
        receiving = replica.start("receive", minimum=version, timeout=20.0)
        sending = sender.start("send", version=version, wait="applied", timeout=20.0)

        def is_held(before: int = before) -> bool:
            return any(event.get("point") == "transfer.posted" for event in mover.events[before:])

        until(
            lambda s=sending, r=receiving, held=is_held: held() or (s.done and r.done),  # type: ignore[misc]
            "bytes are under way, or there",
            40,
        )
        if is_held():
            return Caught(version, sending, receiving, mover)
        sending.results()
        receiving.results()
    raise AssertionError(f"{TRIES} versions arrived within the call that posts them")


def stop_the_sender_in_its_midst(
    make_fleet: MakeFleet, way: Way
) -> tuple[NixlFleet, Side, Side, int]:
    """A receiver that had to set its memory aside, because its sender stopped meanwhile."""
    for _ in range(TRIES):
        fleet = make_fleet(way)
        sender = fleet.sender(lease_ttl=LEASE, **LARGE)
        replica = fleet.receiver(lease_ttl=LEASE, model="big")
        exchange(sender, 1, replica)
        caught = catch(fleet, sender, replica)
        sender.first.stop()
        if caught.mover is replica.first:
            caught.mover.release("transfer.posted")
        until(lambda c=caught.receiving: c.done, "the receiver hears of it", 15)  # type: ignore[misc]
        if replica.version != caught.version and replica.ask("nixl")["aside"]:
            return fleet, sender, replica, caught.version
        sender.kill()
    raise AssertionError(f"no transfer was caught under way in {TRIES} tries")


@pytest.mark.parametrize("way", TCP, ids=str)
def test_a_sender_that_wakes_up_touches_nothing_that_is_in_use(
    make_fleet: MakeFleet, way: Way
) -> None:
    fleet, sender, replica, version = stop_the_sender_in_its_midst(make_fleet, way)
    fresh = fleet.sender(lease_ttl=LEASE, open_timeout=20.0, **LARGE)
    exchange(fresh, version + 1, replica)
    buffers = replica.ask("nixl")["arena"]
    sender.first.resume()
    if way.push:
        sender.first.release("transfer.posted")
    end = time.monotonic() + WATCHED_SECONDS
    while time.monotonic() < end:
        held = replica.holds(*range(1, version + 2))
        assert held == version + 1, "live weights were written to"
        assert replica.ask("nixl")["arena"] == buffers, "the new buffers were written to"
        time.sleep(0.05)
    sender.kill()
    exchange(fresh, version + 2, replica)
    exchange(fresh, version + 3, replica)
    assert replica.ask("nixl")["aside"] == 0, "what is over is still set aside"


def lose_the_receiver_in_its_midst(make_fleet: MakeFleet, way: Way, how: str) -> bool:
    """Whether the sender was aborted by it; else it serves the others."""
    fleet = make_fleet(way)
    sender = fleet.sender(lease_ttl=LEASE, **LARGE)
    lost = fleet.receiver("lost", lease_ttl=LEASE, model="big")
    exchange(sender, 1, lost)
    caught = catch(fleet, sender, lost)
    version, sending, mover = caught.version, caught.sending, caught.mover
    if how == "killed":
        lost.kill()
    else:
        lost.first.stop()
    if mover is sender.first:
        mover.release("transfer.posted")
    try:
        until(lambda: sending.done or sender.first.dead, "the sender hears of it", 20)
        if sending.done and "error" not in sender.first.answers[sending.calls[0].number]:
            return False  # the bytes were faster
        error = sending.error()
    except WorkerDied:
        return True
    assert "TransferError" in error.kinds
    assert "'lost'" in error.first
    other = fleet.receiver("other", lease_ttl=LEASE, model="big")
    exchange(sender, version + 1, other)
    if how == "stopped":
        lost.first.resume()
        if mover is lost.first:
            mover.release("transfer.posted")
        until(lambda: caught.receiving.done, "the sleeper's call ends", 20)
        exchange(sender, version + 2, other, lost)
    exchange(sender, version + 3, other, *([lost] if how == "stopped" else []))
    return False


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_no_sender_dies_of_a_receiver_that_is_lost_in_its_midst(
    make_fleet: MakeFleet, how: str
) -> None:
    assert not lose_the_receiver_in_its_midst(make_fleet, TCP[0], how)


@pytest.mark.soak
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_no_sender_ever_dies_of_a_receiver_that_is_lost_in_its_midst(
    make_fleet: MakeFleet, how: str
) -> None:
    aborts = sum(lose_the_receiver_in_its_midst(make_fleet, TCP[0], how) for _ in range(20))
    assert aborts == 0


@pytest.mark.soak
def test_senders_that_are_aborted_under_forced_pull_over_tcp_are_counted(
    make_fleet: MakeFleet, record_property: Callable[[str, object], None]
) -> None:
    """Why ``unsafe_pull`` is called so: a figure, not a verdict."""
    aborts = sum(lose_the_receiver_in_its_midst(make_fleet, TCP[1], "killed") for _ in range(20))
    record_property("aborted senders of 20", aborts)
