"""Members that die or stop in the midst of a version, over every path and direction."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from nixl_rig import WAYS, NixlFleet, Way, exchange
from process_rig import Side, until

MakeFleet = Callable[..., NixlFleet]

LEASES = {"stopped": 3.0, "killed": 10.0}
"""A stopped process is missed by its lease, a killed one at once: no need to be short of time."""
REPEATED_LEASES = {"stopped": 4.0, "killed": 10.0}
"""Where many of these run beside each other, each has less of a core."""

RECEIVER_PHASES = [
    "receiver.begin",
    "receiver.post",
    "receiver.fetch",
    "receiver.fetched",
    "target.write",
    "receiver.finish",
    "target.commit",
]
SENDER_PHASES = ["sender.begin", "sender.put", "sender.finish"]
PHASES = [*RECEIVER_PHASES, *SENDER_PHASES]
ONCE = [
    pytest.param(
        WAYS[(i + turn) % len(WAYS)], phase, how, id=f"{phase}-{how}-{WAYS[(i + turn) % 4]}"
    )
    for i, phase in enumerate(PHASES)
    for how, turn in (("killed", 0), ("stopped", 3))
]
"""Each role in each phase, once over shared memory and once over TCP, by all ways in turns."""
REPEATS = 20


def after(phase: str) -> int:
    """The second group: the first has shown that everything is connected."""
    return int(phase in ("receiver.post", "receiver.fetch", "receiver.fetched", "sender.put"))


def assert_honest(replica: Side, *versions: int) -> None:
    """A replica never names a version that it doesn't wholly hold."""
    named = replica.version
    if named is not None:
        assert replica.holds(*versions) == named


def lose_a_receiver(fleet: NixlFleet, phase: str, how: str, lease: float) -> None:
    sender = fleet.sender(lease_ttl=lease, min_receivers=2)
    lost, other = (fleet.receiver(name, lease_ttl=lease) for name in ("lost", "other"))
    exchange(sender, 1, lost, other)
    lost.first.arm(phase, after=after(phase))
    receiving = lost.start("receive", timeout=40.0)
    others = other.start("receive", timeout=20.0)
    sending = sender.start("send", version=2, wait="applied", timeout=20.0)
    lost.first.until_at(phase)
    if how == "killed":
        lost.first.kill()
    else:
        lost.first.stop()
    error = sending.error()
    assert "TransferError" in error.kinds
    assert "'lost'" in error.first
    assert error.seconds < 12
    until(lambda: others.done, "the other's call ends", 20)
    assert_honest(other, 1, 2)
    if how == "killed":
        back = fleet.receiver("lost", lease_ttl=lease)
        exchange(sender, 3, back, other)
        return
    # The others go on while it sleeps; then it wakes up in the midst of what is long over.
    third = fleet.receiver("third", lease_ttl=lease)
    exchange(sender, 3, other, third)
    exchange(sender, 4, other, third)
    lost.first.resume()
    fleet.await_renewals("receivers/lost/000001", 2)
    lost.first.release(phase)
    rest = [each.start("receive", minimum=5) for each in (other, third)]
    sending = sender.start("send", version=5, timeout=20.0)
    until(lambda: receiving.done, "the sleeper's call ends", 20)
    assert_honest(lost, 1, 2, 3, 4, 5)
    if lost.version != 5:
        lost.receive(minimum=5)
    for calls in rest:
        calls.results()
    sending.results()
    assert lost.holds(5) == 5
    exchange(sender, 6, lost, other, third)


def lose_the_sender(fleet: NixlFleet, phase: str, how: str, lease: float, watched: float) -> None:
    sender = fleet.sender(lease_ttl=lease)
    replica = fleet.receiver(lease_ttl=lease)
    exchange(sender, 1, replica)
    sender.first.arm(phase, after=after(phase))
    receiving = replica.start("receive", minimum=2, timeout=20.0)
    sending = sender.start("send", version=2, timeout=60.0)
    sender.first.until_at(phase)
    if how == "killed":
        sender.first.kill()
    else:
        sender.first.stop()
    until(lambda: receiving.done, "the receiver hears of it", 15)
    assert_honest(replica, 1, 2)
    if replica.version != 2:
        error = receiving.error()
        assert "PeerLost" in error.kinds
        assert "sender" in error.first
    fresh = fleet.sender(lease_ttl=lease, open_timeout=20.0)
    exchange(fresh, 3, replica)
    if how == "stopped":
        sender.first.resume()
        sender.first.release(phase)
        stale = sending.error()
        assert {"SessionError", "TransferError"} & set(stale.kinds)
        end = time.monotonic() + watched
        while time.monotonic() < end:
            assert replica.holds(1, 2, 3) == 3, "a sender that was replaced wrote to live weights"
            time.sleep(0.1)
        assert replica.version == 3
    exchange(fresh, 4, replica)


def lose(fleet: NixlFleet, phase: str, how: str, lease: float, watched: float) -> None:
    if phase.startswith("sender"):
        lose_the_sender(fleet, phase, how, lease, watched)
    else:
        lose_a_receiver(fleet, phase, how, lease)


@pytest.mark.parametrize(("way", "phase", "how"), ONCE)
def test_the_survivors_go_on(make_fleet: MakeFleet, way: Way, phase: str, how: str) -> None:
    lose(make_fleet(way), phase, how, LEASES[how], watched=0.5)


@pytest.mark.soak
@pytest.mark.parametrize("how", ["killed", "stopped"])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("turn", range(REPEATS), ids="turn{}".format)
def test_the_survivors_go_on_each_time(
    make_fleet: MakeFleet, way: Way, phase: str, how: str, turn: int
) -> None:
    del turn  # only names the repetition
    lose(make_fleet(way), phase, how, REPEATED_LEASES[how], watched=5.0)


def restarts_five_times(fleet: NixlFleet, versions: int) -> None:
    sender, stays = fleet.sender(), fleet.receiver("stays")
    restarts = fleet.receiver("restarts")
    every = max(1, versions // 6)
    done = 0
    for version in range(versions + 1):
        if version and version % every == 0 and done < 5:
            restarts.first.kill()
            restarts = fleet.receiver("restarts")
            assert restarts.version is None
            done += 1
        exchange(sender, version, stays, restarts)
    assert done == 5


def test_a_replica_that_restarts_five_times_is_served_each_time(make_fleet: MakeFleet) -> None:
    restarts_five_times(make_fleet(WAYS[1]), 6)


@pytest.mark.soak
def test_fifty_versions_with_a_replica_that_restarts_five_times(
    make_fleet: MakeFleet, way: Way
) -> None:
    restarts_five_times(make_fleet(way), 50)
