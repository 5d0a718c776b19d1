"""Waves, turns, replicas that stay behind, and pools that are full; see ``lifecycle_world``."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import lifecycle_world as sim
import pytest

from weightwire.contract import Policy
from weightwire.errors import TransferError, TransferTimeout
from weightwire.lifecycle.rollout import Replica, Rollout
from weightwire.session.records import ErrorInfo, Status


def opened(world: sim.World, kind: type, *names: str) -> list[sim.Process]:
    processes = [kind(world, name) for name in names]
    for process in processes:
        while not process.idle:
            process.step()
    return processes


def work(world: sim.World, sender: sim.Sender, *receivers: sim.Receiver, rounds: int = 400) -> None:
    """Run the sender's call to its end; whoever is idle receives."""
    for turn in range(rounds):
        if sender.steps is None:
            return
        for receiver in receivers:
            if receiver.idle:
                receiver.receive()
        for process in (sender, *receivers):
            process.step()
        if turn % 8 == 7:
            world.tick(sim.LEASE / 16)
        world.check()
    raise AssertionError(f"the sender waits for {sender.waits_for}")


def settle(world: sim.World, *receivers: sim.Receiver) -> None:
    """Let everybody take what is there; then nobody waits for an offer any more."""
    for _ in range(60):
        for receiver in receivers:
            if receiver.idle and receiver.machine.newest_offer() is not None:
                receiver.receive()
            receiver.step()
    for receiver in receivers:
        receiver.interrupt(TransferTimeout("no more versions"))


def send(world: sim.World, sender: sim.Sender, *receivers: sim.Receiver) -> None:
    sender.send("applied", "fail")
    work(world, sender, *receivers)
    assert sender.error is None, sender.error


def attempts(world: sim.World, version: int) -> list[list[str]]:
    return [world.roster(policy) for policy in sorted(world.outcomes) if policy.version == version]


def serving(*receivers: sim.Receiver) -> list[int | None]:
    return [r.machine.serving.version if r.machine.serving else None for r in receivers]


@pytest.mark.parametrize(
    ("most", "waves"),
    [
        (1, [["a"], ["b"], ["c"]]),
        (2, [["a", "b"], ["c"]]),
        (3, [["a", "b", "c"]]),
        (None, [["a", "b", "c"]]),
    ],
)
def test_a_version_reaches_a_serving_pool_in_waves(session_directory: Path, most, waves):
    world = sim.World(session_directory / "session", "pull", max_unavailable=most)
    (sender,) = opened(world, sim.Sender, "sender")
    receivers = opened(world, sim.Receiver, "a", "b", "c")
    send(world, sender, *receivers)
    assert attempts(world, 1) == [["a", "b", "c"]]  # nobody served anything: nobody waits
    send(world, sender, *receivers)
    assert attempts(world, 2) == waves
    assert serving(*receivers) == [2, 2, 2]
    assert world.most_out == len(waves[0])
    assert sender.machine.next_policy(3).attempt == 1


@pytest.mark.parametrize("most", [1, 2, None])
def test_readers_of_a_stored_version_take_turns(session_directory: Path, most):
    world = sim.World(session_directory / "session", "store", max_unavailable=most)
    (sender,) = opened(world, sim.Sender, "sender")
    receivers = opened(world, sim.Receiver, "a", "b", "c")
    for version in (1, 2, 3):
        send(world, sender, *receivers)
        assert serving(*receivers) == [version] * 3
    assert world.most_out == (most or 3)


def test_a_turn_ends_with_its_holder(session_directory: Path):
    world = sim.World(session_directory / "session", "store", max_unavailable=1)
    (sender,) = opened(world, sim.Sender, "sender")
    first, second = opened(world, sim.Receiver, "a", "b")
    send(world, sender, first, second)
    sender.send("published", "fail")
    work(world, sender)
    first.interrupt(TransferTimeout("it waited for an offer"))
    second.interrupt(TransferTimeout("it waited for an offer"))
    first.receive()
    while first.reading is None:
        first.step()
    second.receive()
    for _ in range(30):
        second.step()
    assert second.reading is None
    assert second.waits_for == ("receiver 'a', whose turn it is",)
    first.crash()
    for _ in range(8):
        world.tick()
        second.step()
    while second.steps is not None:
        second.step()
    assert serving(second) == [2]


def test_one_that_waits_for_its_turn_goes_on_to_a_newer_version(session_directory: Path):
    world = sim.World(session_directory / "session", "store", max_unavailable=1)
    (sender,) = opened(world, sim.Sender, "sender")
    first, second = opened(world, sim.Receiver, "a", "b")
    send(world, sender, first, second)
    settle(world, first, second)
    sender.send("published", "fail")
    work(world, sender)
    first.receive()
    while first.reading is None:
        first.step()
    second.receive()
    for _ in range(30):
        second.step()
    sender.send("published", "fail")
    work(world, sender)
    settle(world, first, second)
    assert serving(second) == [3]


@pytest.mark.parametrize("flow", ["pull", "store"])
def test_a_pool_stops_at_a_replica_that_fails(session_directory: Path, flow):
    """It serves nothing any more: taking out another one would be one too many."""
    world = sim.World(session_directory / "session", flow, max_unavailable=1)
    (sender,) = opened(world, sim.Sender, "sender")
    first, second = opened(world, sim.Receiver, "a", "b")
    send(world, sender, first, second)
    settle(world, first, second)
    first.fault, first.restores = "commit", False
    sender.send("applied", "continue")
    for _ in range(60):
        for process in (sender, first, second):
            process.step()
        if first.idle and first.machine.tainted is None:
            first.receive()
        if second.idle:
            second.receive()
    assert first.machine.tainted is not None
    assert serving(second) == [1]
    if flow == "pull":
        assert isinstance(sender.error, TransferError)
        assert str(sender.error).startswith("receiver 'a' failed")
    else:
        assert second.waits_for == ("receiver 'a', whose turn it is",)
    first.receive()  # a full sync heals it
    if sender.idle:
        sender.send("applied", "continue")
    work(world, sender, first, second)
    settle(world, first, second)
    assert serving(first, second) == [2, 2]


def test_a_wave_goes_on_without_the_one_that_failed_until_no_other_may_be_out(
    session_directory: Path,
):
    world = sim.World(session_directory / "session", "pull", max_unavailable=2)
    (sender,) = opened(world, sim.Sender, "sender")
    receivers = opened(world, sim.Receiver, "a", "b", "c", "d", "e")
    send(world, sender, *receivers)
    for failing in (receivers[0], receivers[2]):
        failing.fault, failing.restores = "commit", False
    sender.send("applied", "continue")
    work(world, sender, *receivers)
    assert str(sender.error).startswith("receiver 'c' failed")
    assert attempts(world, 2) == [["a", "b"], ["c"]]
    assert serving(*receivers) == [None, 2, None, 1, 1]


def test_a_rollout_stops_when_as_many_are_out_as_may_be():
    def replica(name: str, status: Status | None) -> Replica:
        return Replica(SimpleNamespace(incarnation=1, member_id=name), status)

    serving = Status("serving", Policy(1, 1, 1))
    broken = Status("tainted", None, ErrorInfo("PeerLost", "the trainer died"))
    pool = {"a": replica("a", serving), "b": replica("b", broken), "c": replica("c", serving)}
    rollout = Rollout(done={"a": 1, "b": 1})
    with pytest.raises(TransferError) as caught:
        rollout.next_wave(2, pool, 1)
    assert str(caught.value) == (
        "version 2 stopped after 2 of 3 receivers: 'b' serves nothing any more "
        "(the trainer died), and max_unavailable=1: repair or close them, then send it again"
    )
    assert rollout.next_wave(2, pool, 2).keys() == {"c"}


def test_one_that_joins_during_a_wave_gets_the_version_in_the_next(session_directory: Path):
    world = sim.World(session_directory / "session", "pull", max_unavailable=1)
    (sender,) = opened(world, sim.Sender, "sender")
    pool = opened(world, sim.Receiver, "a", "b")
    send(world, sender, *pool)
    sender.send("applied", "fail")
    for _ in range(4):
        sender.step()
    pool += opened(world, sim.Receiver, "c")
    work(world, sender, *pool)
    assert serving(*pool) == [2, 2, 2]


def test_one_that_leaves_during_a_wave_ends_the_rollout_well(session_directory: Path):
    world = sim.World(session_directory / "session", "pull", max_unavailable=1)
    (sender,) = opened(world, sim.Sender, "sender")
    first, second = opened(world, sim.Receiver, "a", "b")
    send(world, sender, first, second)
    settle(world, first, second)
    sender.send("applied", "fail")
    first.receive()
    while not sender.machine.more:
        sender.step()
        first.step()
    second.leave()
    work(world, sender, first)
    assert sender.error is None
    assert sender.machine.next_policy(3).attempt == 1
    send(world, sender, first)


@pytest.mark.parametrize("most", [0, 1, 3])
def test_one_that_isnt_ready_may_fall_behind_so_far(session_directory: Path, most):
    world = sim.World(session_directory / "session", "pull", max_version_lag=most)
    (sender,) = opened(world, sim.Sender, "sender")
    busy, ready = opened(world, sim.Receiver, "busy", "ready")
    send(world, sender, busy, ready)
    settle(world, busy, ready)
    for _ in range(most):
        send(world, sender, ready)
    assert serving(busy, ready) == [1, 1 + most]
    sender.send("applied", "fail")
    for _ in range(100):
        sender.step()
        ready.step()
        if ready.idle:
            ready.receive()
    assert sender.waits_for == ("receiver 'busy'",)
    work(world, sender, busy, ready)
    assert serving(busy, ready) == [2 + most, 2 + most]


@pytest.mark.parametrize("most", [0, 2])
def test_a_stored_version_waits_for_those_that_are_too_far_behind(session_directory: Path, most):
    world = sim.World(session_directory / "session", "store", max_version_lag=most)
    (sender,) = opened(world, sim.Sender, "sender")
    busy, ready = opened(world, sim.Receiver, "busy", "ready")
    send(world, sender, busy, ready)
    settle(world, busy, ready)
    for _ in range(1 + most):
        sender.send("published", "fail")
        work(world, sender)
        settle(world, ready)
    assert serving(busy, ready) == [1, 2 + most]
    sender.send("published", "fail")
    for _ in range(30):
        sender.step()
    assert sender.waits_for == (f"receiver 'busy' (serves 1, {1 + most} behind)",)
    settle(world, busy)
    work(world, sender)
    assert sender.error is None


def test_a_full_pool_keeps_whom_it_has_and_tells_the_others(session_directory: Path):
    world = sim.World(session_directory / "session", "pull", max_receivers=2)
    (sender,) = opened(world, sim.Sender, "sender")
    one, two, three = opened(world, sim.Receiver, "z", "y", "a")
    for version in (1, 2):
        send(world, sender, one, two, three)
        assert serving(one, two, three) == [version, version, None]
    three.step()
    assert three.waits_for == ("the sender, whose max_receivers=2 are y, z",)
    settle(world, one, two)
    two.leave()
    send(world, sender, one, three)
    assert serving(one, three) == [3, 3]
