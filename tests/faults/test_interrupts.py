"""Ctrl-C and asyncio's cancellation in every phase: peers are told, nothing stays behind."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from process_rig import Calls, Fleet, Side, Worker, exchange, until

MakeFleet = Callable[..., Fleet]

SENDER_PHASES = {
    "memory": ["receivers (", "receiver_ready", "credit", "receiver_applied", "sender.put"],
    "filesystem": ["sender.put", "sender.finish", "sender.publish", "receiver_applied"],
}
RECEIVER_PHASES = {
    "memory": ["offer", "started", "announcement", "target.plan", "target.begin", "target.write",
               "target.commit"],
    "filesystem": ["offer", "target.plan", "target.begin", "target.write", "target.commit",
                   "receiver.fetch"],
}  # fmt: skip


def until_phase(worker: Worker, phase: str) -> None:
    if "." in phase:
        worker.until_at(phase)
    else:
        worker.until_waiting(phase)


def threads(side: Side) -> list[list[str]]:
    """Threads by rank, but for the filesystem backend's pool, which lives until close."""
    return [
        [name for name in worker.call("usage")["threads"] if "weightwire-filesystem_" not in name]
        for worker in side.workers
    ]


class Stage:
    """A sender and its receivers, with one of them about to reach a phase."""

    def __init__(self, fleet: Fleet, first: int = 1) -> None:
        self.fleet = fleet
        self.sender = fleet.sender()
        self.replica = fleet.receiver()
        self.first = first

    def sender_at(self, phase: str, do: str, **args: object) -> tuple[Calls, Calls | None]:
        """A send that stands in ``phase``, and the receive that it meets."""
        receiving: Calls | None = None
        if "." in phase:
            self.sender.first.arm(phase)
        if phase == "receivers (":
            self.replica.close()
        elif phase in ("credit", "receiver_applied"):
            self.replica.first.arm("target.write" if phase == "credit" else "target.commit")
        if phase not in ("receivers (", "receiver_ready"):
            receiving = self.replica.start("receive", minimum=self.first, timeout=20.0)
        sending = self.sender.start(do, **args)
        if phase in ("credit", "receiver_applied"):
            self.replica.first.until_at("target.write" if phase == "credit" else "target.commit")
        until_phase(self.sender.first, phase)
        return sending, receiving

    def receiver_at(self, phase: str, do: str, **args: object) -> tuple[Calls, Calls | None]:
        """A receive that stands in ``phase``, and the send that it meets."""
        sending: Calls | None = None
        if phase.startswith(("target", "receiver")):
            self.replica.first.arm(phase)
        if phase == "announcement":
            self.sender.first.arm("sender.put")
        if phase == "started":
            self.idle = self.fleet.receiver("idle")
        receiving = self.replica.start(do, **args)
        if phase != "offer":
            sending = self.sender.start("send", version=self.first, wait="applied", timeout=20.0)
        until_phase(self.replica.first, phase)
        return receiving, sending

    def release_all(self) -> None:
        for side in (self.sender, self.replica):
            for worker in side.workers:
                worker.call("disarm", now=True)

    def finish(self, version: int, phase: str) -> None:
        """The next version works."""
        self.release_all()
        if phase == "receivers (":
            self.replica = self.fleet.receiver(workers=self.replica.workers)
        replicas = [self.replica]
        if phase == "started":
            replicas.append(self.idle)
        exchange(self.sender, version, *replicas)


def outcomes(calls: Calls) -> list[str]:
    return [
        "error" if "error" in call.worker.answers[call.number] else "ok" for call in calls.calls
    ]


SENDER_CASES = [(b, p) for b, phases in SENDER_PHASES.items() for p in phases]
RECEIVER_CASES = [(b, p) for b, phases in RECEIVER_PHASES.items() for p in phases]


@pytest.mark.parametrize(("name", "phase"), SENDER_CASES)
def test_interrupting_a_send_tells_the_receivers_and_the_next_version_works(
    make_fleet: MakeFleet, name: str, phase: str
) -> None:
    stage = Stage(make_fleet(f"stepped-{name}"))
    before = threads(stage.sender)
    sending, receiving = stage.sender_at(phase, "send", version=1, wait="applied", timeout=20.0)
    stage.sender.first.interrupt()
    error = sending.error()
    assert error.kind == "KeyboardInterrupt"
    assert threads(stage.sender) == before
    stage.release_all()
    if receiving is not None and name == "memory":
        until(lambda: receiving.done, "the receiver is told")
        assert stage.replica.holds(1) in ("pristine", "mixed", 1)
        if stage.replica.version is not None:
            assert stage.replica.holds(1) == 1
        elif stage.replica.holds(1) == "mixed":
            assert stage.replica.tainted is not None
    elif receiving is not None:
        if phase != "receiver_applied":  # nothing was to be seen: it goes on waiting
            assert stage.replica.ask("version", now=True) is None
            assert not receiving.done
            stage.sender.send(2)
            assert receiving.results()[0]["version"] == 2
            assert stage.replica.holds(1, 2) == 2
        else:
            assert receiving.results()[0]["version"] == 1
            assert stage.replica.holds(1) == 1
    stage.finish(3, phase)
    assert threads(stage.sender) == before


@pytest.mark.parametrize(("name", "phase"), RECEIVER_CASES)
def test_interrupting_a_receive_tells_the_sender_and_the_next_version_works(
    make_fleet: MakeFleet, name: str, phase: str
) -> None:
    stage = Stage(make_fleet(f"stepped-{name}"))
    before = threads(stage.replica)
    if phase == "started":
        stage.sender.close()
        stage.sender = stage.fleet.sender(workers=stage.sender.workers, min_receivers=2)
    receiving, sending = stage.receiver_at(phase, "receive", timeout=20.0)
    stage.replica.first.interrupt()
    error = receiving.error()
    assert error.kind == "KeyboardInterrupt"
    assert threads(stage.replica) == before
    assert stage.replica.version is None
    stage.release_all()
    if sending is not None:
        sent = sending.error()
        assert sent.kind == "PeerLost"
        assert "'replica-0'" in sent.first
        assert sent.seconds < 10
    stage.finish(2, phase)
    assert threads(stage.replica) == before


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("point", ["target.plan", "target.write", "target.commit"])
def test_interrupting_one_inference_rank_ends_the_version_on_all(
    make_fleet: MakeFleet, backend: str, rank: int, point: str
) -> None:
    fleet = make_fleet(backend)
    sender, replica = fleet.sender(lease_ttl=1.0), fleet.receiver(ranks=2)
    before = threads(replica)
    replica.workers[rank].arm(point)
    sending = sender.start("send", version=1, wait="applied", timeout=20.0)
    receiving = replica.start("receive", timeout=20.0)
    replica.workers[rank].until_at(point)
    replica.workers[rank].interrupt()
    errors = receiving.errors()
    assert errors[rank].kind == "KeyboardInterrupt"
    assert "TransferError" in errors[1 - rank].kinds
    assert all(error.seconds < 10 for error in errors)
    assert sending.error().seconds < 10
    assert replica.version is None
    exchange(sender, 2, replica)
    assert threads(replica) == before


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("point", ["source.tensors", "sender.put", "sender.finish"])
def test_interrupting_one_trainer_rank_ends_the_version_on_all(
    make_fleet: MakeFleet, backend: str, rank: int, point: str
) -> None:
    fleet = make_fleet(f"stepped-{backend}")
    sender, replica = fleet.sender(ranks=2), fleet.receiver()
    before = threads(sender)
    sender.workers[rank].arm(point)
    receiving = replica.start("receive", timeout=20.0)
    sending = sender.start("send", version=1, wait="applied", timeout=20.0)
    sender.workers[rank].until_at(point)
    sender.workers[rank].interrupt()
    errors = sending.errors()
    assert errors[rank].kind == "KeyboardInterrupt"
    assert "TransferError" in errors[1 - rank].kinds
    assert all(error.seconds < 10 for error in errors)
    if fleet.stores or point == "source.tensors":
        sender.send(2)
        assert receiving.results()[0]["version"] == 2
    else:
        until(lambda: receiving.done, "the receiver is told")
    exchange(sender, 3, replica)
    assert threads(sender) == before


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("wait", ["receiver_ready", "offer"])
def test_interrupting_a_rank_that_waits_for_the_other_side_frees_its_siblings(
    make_fleet: MakeFleet, rank: int, wait: str
) -> None:
    fleet = make_fleet("memory")
    sender, replica = fleet.sender(ranks=2), fleet.receiver(ranks=2)
    side = sender if wait == "receiver_ready" else replica
    if wait == "offer":
        calls = side.start("receive", timeout=4.0)
        side.workers[0].until_waiting("offer")
        side.workers[1].until_waiting("agreement 'round'")
    else:
        calls = side.start("send", version=1, timeout=4.0)
        side.workers[0].until_waiting("receiver_ready")
        side.workers[1].until_waiting("agreement 'start'")
    side.workers[rank].interrupt()
    errors = calls.errors()
    assert errors[rank].kind == "KeyboardInterrupt"
    assert "TransferError" in errors[1 - rank].kinds
    assert errors[1 - rank].seconds < 4.9
    exchange(sender, 2, replica)


# ---------------------------------------------------------------------- asyncio


def assert_loop_went_on(answer: dict[str, object]) -> None:
    assert answer["ticks"] > 3
    assert answer["gap"] < 1.0  # a held loop would show the whole wait


def test_async_calls_move_versions_and_leave_no_thread(fleet: Fleet) -> None:
    sender, replica = fleet.sender(), fleet.receiver()
    before = threads(sender), threads(replica)
    for version in (1, 2):
        receiving = replica.start("async", call="areceive", minimum=version)
        replica.first.until_waiting("offer")
        sending = sender.start("async", call="asend", version=version, wait="applied")
        for calls in (receiving, sending):
            answer = calls.results()[0]
            assert answer["cancelled"] is False
            assert answer["report"]["version"] == version
        assert replica.holds(1, 2) == version
    assert (threads(sender), threads(replica)) == before


@pytest.mark.parametrize(("name", "phase"), SENDER_CASES)
def test_cancelling_asend_is_like_interrupting_and_never_holds_the_loop(
    make_fleet: MakeFleet, name: str, phase: str
) -> None:
    stage = Stage(make_fleet(f"stepped-{name}"))
    before = threads(stage.sender)
    sending, receiving = stage.sender_at(
        phase, "async", call="asend", cancellable=True, version=1, wait="applied", timeout=20.0
    )
    stage.sender.ask("cancel", now=True)
    stage.release_all()  # what runs in the engine's own code ends there first
    answer = sending.results()[0]
    assert answer["gap"] < 1.0
    if "." not in phase:
        assert answer["cancelled"] is True
    assert threads(stage.sender) == before
    if receiving is not None and name == "memory":
        until(lambda: receiving.done, "the receiver is told")
    elif receiving is not None and not receiving.done:
        stage.sender.send(2)
        until(lambda: receiving.done, "the receiver has a version")
    stage.finish(3, phase)
    assert threads(stage.sender) == before


@pytest.mark.parametrize(("name", "phase"), RECEIVER_CASES)
def test_cancelling_areceive_is_like_interrupting_and_never_holds_the_loop(
    make_fleet: MakeFleet, name: str, phase: str
) -> None:
    stage = Stage(make_fleet(f"stepped-{name}"))
    before = threads(stage.replica)
    if phase == "started":
        stage.sender.close()
        stage.sender = stage.fleet.sender(workers=stage.sender.workers, min_receivers=2)
    receiving, sending = stage.receiver_at(
        phase, "async", call="areceive", cancellable=True, timeout=20.0
    )
    stage.replica.ask("cancel", now=True)
    if phase != "announcement":
        stage.release_all()
    answer = receiving.results()[0]
    stage.release_all()
    assert answer["gap"] < 1.0
    if "." not in phase:
        assert answer["cancelled"] is True
    assert threads(stage.replica) == before
    held, named = stage.replica.holds(1), stage.replica.version
    assert named is None or held == named
    if sending is not None:
        until(lambda: sending.done, "the sender is told")
    stage.finish(2, phase)
    assert threads(stage.replica) == before


def test_the_loop_goes_on_while_a_receive_waits(fleet: Fleet) -> None:
    fleet.sender()
    replica = fleet.receiver()
    receiving = replica.start("async", call="areceive", cancellable=True)
    replica.first.until_waiting("offer")
    error = replica.first.start("receive", now=True, timeout=1.0).error()
    assert error.kind == "HandleError"
    replica.ask("cancel", now=True)
    answer = receiving.results()[0]
    assert answer["cancelled"] is True
    assert answer["gap"] < 1.0
