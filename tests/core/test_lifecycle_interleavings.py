"""Every way in which two processes can meet, tried one by one.

Where ``test_lifecycle_stateful`` looks at random for what nobody thought of, these
go through all positions of one crash, or of one or two switches between processes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import lifecycle_world as sim
import pytest

from weightwire.errors import PeerLost, SessionError, TransferTimeout
from weightwire.session import keys
from weightwire.session.records import Retired

WRITES = 12
"""More than any process writes in one of these histories."""
OPERATIONS = 70
"""More than the store operations of one call."""


@pytest.fixture
def world(session_directory: Path) -> Callable[[str], sim.World]:
    count = iter(range(10**6))
    return lambda flow: sim.World(session_directory / f"session-{next(count)}", flow)


def finish(*processes: sim.Process) -> None:
    """Run calls to their ends, side by side."""
    for _ in range(200):
        for process in processes:
            process.step()
        if all(process.steps is None for process in processes):
            return
    raise AssertionError("a call doesn't end")


def opened(kind: type, world: sim.World, name: str) -> sim.Process:
    process = kind(world, name)
    for _ in range(10):
        process.step()
        if process.member is None:
            world.tick()  # a predecessor's lease runs out
    assert process.idle
    return process


def exchange(world: sim.World, sender: sim.Sender, receiver: sim.Receiver) -> None:
    """One version that everybody applies."""
    sender.send("applied", "fail")
    while sender.steps is not None:
        if receiver.idle:
            receiver.receive()
        sender.step()
        receiver.step()
    assert sender.error is None
    if receiver.steps is not None:
        receiver.interrupt(TransferTimeout("no more versions"))
    assert receiver.machine.serving == sender.machine.last
    world.check()


@pytest.mark.parametrize("operation", range(OPERATIONS))
def test_a_version_is_never_dropped_under_a_reader_that_is_about_to_begin(world, operation):
    world = world("store")
    sender, receiver = opened(sim.Sender, world, "sender"), opened(sim.Receiver, world, "a")
    sender.send("published", "fail")
    finish(sender)
    receiver.receive()
    first = sender.machine.last

    class NextVersion:
        """The next version comes, whole, and the first one goes."""

        def step(self) -> None:
            sender.send("published", "fail")
            finish(sender)

    world.run(receiver, 200, [(operation, NextVersion(), 1)])
    finish(receiver)
    assert receiver.error is None
    assert receiver.machine.serving in (first, sender.machine.last)
    world.check()


@pytest.mark.parametrize("operation", range(OPERATIONS))
@pytest.mark.parametrize("by", ["its sender", "the next sender"])
def test_a_version_is_never_dropped_under_a_reader_that_begins_meanwhile(world, by, operation):
    world = world("store")
    sender, receiver = opened(sim.Sender, world, "sender"), opened(sim.Receiver, world, "a")
    sender.send("published", "fail")
    finish(sender)
    if by == "the next sender":
        sender.crash()
        sender = opened(partial(sim.Sender, resume_from=1), world, "sender")
    receiver.receive()
    for _ in range(2):
        receiver.step()  # planned; its next step says that it reads, and looks for the mark
    assert receiver.reading is None
    sender.send("published", "fail")
    world.run(sender, 200, [(operation, receiver, 1)])
    assert sender.error is None
    finish(receiver)
    assert receiver.error is None
    world.check()


@pytest.mark.parametrize("writes", range(WRITES))
@pytest.mark.parametrize("flow", ["store", "pull"])
def test_after_a_sender_crashed_at_any_write_its_successor_is_received(world, flow, writes):
    world = world(flow)
    sender, receiver = opened(sim.Sender, world, "sender"), opened(sim.Receiver, world, "a")
    exchange(world, sender, receiver)
    sender.writes_left = writes
    sender.send("applied", "fail")
    for _ in range(60):
        if receiver.idle:
            receiver.receive()
        sender.step()
        receiver.step()
        world.check()
    sender.crash()
    successor = opened(sim.Sender, world, "sender")
    assert successor.member.incarnation == 2
    receiver.interrupt(PeerLost("the sender is gone"))
    finish(receiver)
    exchange(world, successor, receiver)
    assert receiver.machine.serving.incarnation == 2


@pytest.mark.parametrize("writes", range(WRITES))
@pytest.mark.parametrize("flow", ["store", "pull"])
def test_after_a_receiver_crashed_at_any_write_its_successor_gets_everything(world, flow, writes):
    world = world(flow)
    sender, receiver = opened(sim.Sender, world, "sender"), opened(sim.Receiver, world, "a")
    exchange(world, sender, receiver)
    receiver.writes_left = writes
    receiver.receive()
    sender.send("applied", "fail")
    for _ in range(60):
        sender.step()
        receiver.step()
        world.check()
    receiver.crash()
    successor = opened(sim.Receiver, world, "a")
    finish(sender)
    exchange(world, sender, successor)


@pytest.mark.parametrize("flow", ["store", "pull"])
def test_a_receiver_that_was_replaced_while_stopped_says_so_and_harms_nobody(world, flow):
    world = world(flow)
    sender, stopped = opened(sim.Sender, world, "sender"), opened(sim.Receiver, world, "a")
    exchange(world, sender, stopped)
    stopped.stopped = True
    for _ in range(8):
        world.tick()
    successor = opened(sim.Receiver, world, "a")
    stopped.stopped = False
    stopped.receive()
    finish(stopped)
    assert isinstance(stopped.error, SessionError)
    assert "receiver 'a' was taken over by process" in str(stopped.error)
    assert str(stopped.error).endswith(": close this receiver")
    exchange(world, sender, successor)


@pytest.mark.parametrize("steps", range(1, 5))
@pytest.mark.parametrize("wait", ["published", "applied"])
def test_a_sender_that_was_replaced_while_stopped_finishes_nothing(world, wait, steps):
    world = world("store")
    sender, receiver = opened(sim.Sender, world, "sender"), opened(sim.Receiver, world, "a")
    receiver.receive()
    sender.send(wait, "fail")
    for _ in range(steps):
        sender.step()
    if wait == "applied":
        while receiver.steps is not None:
            sender.step()
            receiver.step()
        assert sender.steps is not None
    sender.stopped = True
    for _ in range(8):
        world.tick()
    opened(sim.Sender, world, "sender")
    sender.stopped = False
    finish(sender)
    assert isinstance(sender.error, SessionError)
    assert "was taken over by process" in str(sender.error)
    assert list(world.outcomes.values()) == [False]


def test_a_receiver_that_restarted_after_the_start_waits_for_the_next_version(world):
    """It would wait for groups that nobody announces to it."""
    world = world("pull")
    sender, other = opened(sim.Sender, world, "sender"), opened(sim.Receiver, world, "b")
    receiver = opened(sim.Receiver, world, "a")
    receiver.receive()
    other.receive()
    sender.send("applied", "continue")
    while receiver.reading is None:
        for process in (sender, receiver, other):
            process.step()
    receiver.crash()
    successor = opened(sim.Receiver, world, "a")
    successor.receive()
    for _ in range(20):
        successor.step()
        assert successor.reading is None
    for _ in range(30):
        for process in (sender, successor, other):
            process.step()
    assert world.outcomes[sender.machine.last] is True
    assert other.machine.serving == sender.machine.last


@pytest.mark.parametrize("on_loss", ["fail", "continue"])
def test_a_version_that_every_receiver_failed_to_apply_is_aborted(world, on_loss):
    world = world("pull")
    sender, receiver = opened(sim.Sender, world, "sender"), opened(sim.Receiver, world, "a")
    receiver.fault = "commit"
    receiver.receive()
    sender.send("applied", on_loss)
    finish(sender, receiver)
    assert world.outcomes == {sender.machine.last: False}
    assert str(sender.error) == "receiver 'a' failed: RuntimeError: injected failure of commit"


def test_a_version_interrupted_just_after_its_outcome_is_finished_and_not_sent_twice(world):
    world = world("store")
    sender = opened(sim.Sender, world, "sender")
    create, store = sender.session.store.create, sender.session.store

    def interrupted(key: str, value: bytes) -> bool:
        made = create(key, value)
        if made and key.endswith("/outcome"):
            raise TransferTimeout("the signal came here")
        return made

    store.create = interrupted
    sender.send("published", "fail")
    finish(sender)
    assert isinstance(sender.error, TransferTimeout)
    assert sender.machine.next_policy(2).attempt == 1
    with pytest.raises(ValueError, match="version 1 doesn't rise above 1, the last one sent"):
        sender.machine.next_policy(1)


def test_what_was_dropped_before_its_late_outcome_hides_nothing_older(world):
    """A stopped sender's outcome may come when its successor has already dropped the version."""
    world = world("store")
    sender, receiver = opened(sim.Sender, world, "sender"), opened(sim.Receiver, world, "a")
    sender.send("published", "fail")
    finish(sender)
    older = sender.machine.last
    sender.send("published", "fail")
    finish(sender)
    newer = sender.machine.last
    # As if only the newer one had been dropped, before its outcome was there.
    sender.session.delete(keys.retired(older))
    sender.session.write(keys.retired(newer), Retired())
    world.disk[older] = dict.fromkeys(range(sim.GROUPS), older)
    sender.crash()
    successor = sim.Sender(world, "sender", resume_from=newer.version)
    for _ in range(10):
        successor.step()
        world.tick()
    assert successor.idle
    receiver.receive()
    finish(receiver)
    assert receiver.machine.serving == older
