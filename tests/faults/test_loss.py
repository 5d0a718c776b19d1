"""Processes that die or stand still, in every phase of a version, on either side."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from process_rig import Fleet, Side, WorkerDied, exchange, in_time, until

MakeFleet = Callable[..., Fleet]

RECEIVER_POINTS = ["target.plan", "target.begin", "target.write", "target.commit"]
SHORT_LEASE = 1.0


def assert_honest(replica: Side, *versions: int) -> None:
    """A replica never names a version that it doesn't wholly hold."""
    for worker in replica.workers:
        named = worker.call("version")
        held = worker.call("holds", versions=list(versions))
        if named is not None:
            assert held == named
        elif held == "mixed":
            assert worker.call("tainted") is not None


def arm(replica: Side, point: str) -> None:
    replica.first.arm(point, after=2 if point == "target.write" else 0)


# ---------------------------------------------------------------------- dead receivers


@pytest.mark.parametrize("point", ["idle", *RECEIVER_POINTS])
def test_a_killed_receiver_fails_the_version_and_comes_back(
    make_fleet: MakeFleet, backend: str, point: str
) -> None:
    fleet = make_fleet(backend)
    sender = fleet.sender(min_receivers=2)
    lost, other = fleet.receiver("lost"), fleet.receiver("other")
    if point != "idle":
        arm(lost, point)
    sending = sender.start("send", version=1, wait="applied", timeout=20.0)
    others = other.start("receive", timeout=20.0)
    if point == "idle":
        sender.first.until_waiting("receiver_")
    else:
        lost.start("receive")
        lost.first.until_at(point)
    lost.kill()
    error = sending.error()
    assert error.kind == "PeerLost"
    assert "'lost'" in error.first
    assert error.seconds < 10
    again = fleet.receiver("lost")
    assert again.incarnation == 2
    if others.done or point == "target.commit":
        until(lambda: others.done, "the other is done")
        assert_honest(other, 1)
        exchange(sender, 2, again, other)
        return
    receiving = again.start("receive", minimum=2)
    second = sender.start("send", version=2, wait="applied")
    # The other was part of the failed version; or it never heard of it, and gets this one.
    until(lambda: others.done, "the other's call ends", 20)
    assert_honest(other, 1, 2)
    if other.version != 2:
        assert others.error().kind == "PeerLost"
        other.receive(minimum=2)
    receiving.results()
    second.results()
    assert (again.holds(2), other.holds(2)) == (2, 2)


@pytest.mark.parametrize("point", ["idle", *RECEIVER_POINTS])
def test_with_continue_the_version_goes_on_without_a_killed_receiver(
    make_fleet: MakeFleet, backend: str, point: str
) -> None:
    fleet = make_fleet(backend)
    sender = fleet.sender(min_receivers=2, on_receiver_loss="continue", lease_ttl=SHORT_LEASE)
    lost, other = fleet.receiver("lost"), fleet.receiver("other")
    if point != "idle":
        arm(lost, point)
    others = other.start("receive", timeout=20.0)
    sending = sender.start("send", version=1, wait="applied", timeout=20.0)
    if point == "idle":
        sender.first.until_waiting("receiver_")
    else:
        lost.start("receive")
        lost.first.until_at(point)
    lost.kill()
    assert others.results()[0]["version"] == 1
    assert sending.results()[0]["version"] == 1
    assert other.holds(1) == 1
    exchange(sender, 2, other, fleet.receiver("lost"))


@pytest.mark.parametrize("point", RECEIVER_POINTS[1:])
def test_with_continue_the_version_goes_on_without_a_receiver_that_failed(
    make_fleet: MakeFleet, backend: str, point: str
) -> None:
    fleet = make_fleet(backend)
    sender = fleet.sender(min_receivers=2, on_receiver_loss="continue", lease_ttl=SHORT_LEASE)
    failing, other = fleet.receiver("failing"), fleet.receiver("other")
    failing.first.arm(point, "raise", after=2 if point == "target.write" else 0)
    others = other.start("receive", timeout=20.0)
    failed = failing.start("receive", timeout=20.0)
    sending = sender.start("send", version=1, wait="applied", timeout=20.0)
    assert failed.error().kind == "Planned"
    assert others.results()[0]["version"] == 1
    assert sending.results()[0]["version"] == 1
    assert other.holds(1) == 1
    assert_honest(failing, 1)
    exchange(sender, 2, other, failing)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("point", ["target.write", "target.commit"])
def test_a_killed_rank_of_a_replica_ends_in_errors_by_the_deadline(
    make_fleet: MakeFleet, backend: str, rank: int, point: str
) -> None:
    fleet = make_fleet(backend)
    sender, replica = fleet.sender(), fleet.receiver(ranks=2)
    replica.workers[rank].arm(point)
    sending = sender.start("send", version=1, wait="applied", timeout=1.5)
    receiving = replica.start("receive", timeout=1.5)
    replica.workers[rank].until_at(point)
    replica.workers[rank].kill()
    error = receiving.calls[1 - rank].error()
    assert "TransferError" in error.kinds
    assert in_time(error, 1.5)
    assert in_time(sending.error(), 1.5)
    survivor = replica.workers[1 - rank]
    assert survivor.call("version") is None
    survivor.call("close")
    again = fleet.receiver(ranks=2)
    exchange(sender, 2, again)


# ---------------------------------------------------------------------- dead senders


@pytest.mark.parametrize(
    "phase", ["receivers", "receiver_ready", "sender.put", "sender.finish", "receiver_applied"]
)
def test_a_killed_live_sender_frees_its_receivers_and_the_next_one_serves_them(
    make_fleet: MakeFleet, scheme: str, phase: str
) -> None:
    if scheme == "tcp" and phase in ("sender.finish", "receiver_applied"):
        pytest.skip("a store that is gone is waited for: sender.put covers it over tcp")
    fleet = make_fleet("stepped-memory", scheme)
    sender, replica = fleet.sender(min_receivers=1), fleet.receiver(timeout=20.0)
    exchange(sender, 1, replica)
    receiving = None
    if phase == "receivers":
        replica.close()
        sender.start("send", version=2)
        sender.first.until_waiting("receivers (0")
        sender.kill()
        fresh = fleet.sender()
        exchange(fresh, 3, fleet.receiver(workers=replica.workers))
        return
    if phase == "receiver_ready":
        sender.start("send", version=2)
        sender.first.until_waiting("receiver_ready")
        sender.kill()
        assert replica.version == 1
    else:
        at_sender = phase.startswith("sender")
        if at_sender:
            sender.first.arm(phase, after=2 if phase == "sender.put" else 0)
        else:
            replica.first.arm("target.commit")
        receiving = replica.start("receive", minimum=2)
        sender.start("send", version=2)
        if at_sender:
            sender.first.until_at(phase)
        else:
            replica.first.until_at("target.commit")
            sender.first.until_waiting("receiver_applied")
        sender.kill()
        if not at_sender:
            replica.first.release("target.commit")
        until(lambda: receiving.done, "the receiver hears of it", 19)
        assert_honest(replica, 1, 2)
        if phase == "sender.put":
            error = receiving.error()
            assert {"PeerLost", "SessionError"} & set(error.kinds)
            assert "sender" in error.first
            assert replica.version is None
            assert replica.tainted is not None
    fresh = fleet.sender()
    exchange(fresh, 3, replica)
    assert replica.tainted is None


@pytest.mark.parametrize("phase", ["sender.put", "sender.finish", "sender.publish"])
def test_a_sender_killed_while_it_stores_a_version_harms_no_earlier_one(
    make_fleet: MakeFleet, phase: str
) -> None:
    fleet = make_fleet("stepped-filesystem")
    sender, replica = fleet.sender(ranks=2), fleet.receiver()
    exchange(sender, 1, replica)
    waiting = replica.start("receive")
    sender.first.arm(phase, "kill", after=1 if phase == "sender.put" else 0)
    calls = sender.start("send", version=2, timeout=2.0).calls
    with pytest.raises(WorkerDied):
        calls[0].result()
    error = calls[1].error()
    assert "TransferError" in error.kinds
    assert in_time(error, 2.0)
    sender.workers[1].call("close")
    late = fleet.receiver("late")
    assert late.ask("poll") == 1
    fresh = fleet.sender(ranks=2, resume_from=1)
    assert late.receive()[0]["version"] == 1
    assert late.holds(1, 2) == 1
    assert not list(fleet.versions_directory().glob(".staging-*"))
    fresh.send(2)
    assert waiting.results()[0]["version"] == 2
    assert replica.holds(1, 2) == 2


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("phase", ["sender.put", "sender.finish"])
def test_a_killed_trainer_rank_ends_the_version_for_everybody(
    make_fleet: MakeFleet, rank: int, phase: str
) -> None:
    fleet = make_fleet("stepped-memory")
    sender, replica = fleet.sender(ranks=2), fleet.receiver(lease_ttl=SHORT_LEASE)
    exchange(sender, 1, replica)
    sender.workers[rank].arm(phase, "kill")
    receiving = replica.start("receive", minimum=2, timeout=8.0)
    calls = sender.start("send", version=2, timeout=4.0).calls
    with pytest.raises(WorkerDied):
        calls[rank].result()
    error = calls[1 - rank].error()
    assert "TransferError" in error.kinds
    assert in_time(error, 4.0)
    until(lambda: receiving.done, "the receiver hears of it")
    assert_honest(replica, 1, 2)
    sender.workers[1 - rank].call("close")
    exchange(fleet.sender(ranks=2), 3, replica)


# ---------------------------------------------------------------------- stopped processes


@pytest.mark.parametrize("point", ["idle", *RECEIVER_POINTS])
def test_a_receiver_stopped_past_its_lease_is_lost_and_later_whole_again(
    make_fleet: MakeFleet, backend: str, point: str
) -> None:
    fleet = make_fleet(backend)
    sender = fleet.sender(lease_ttl=SHORT_LEASE)
    replica = fleet.receiver("sleeper", lease_ttl=SHORT_LEASE)
    receiving = None
    if point != "idle":
        arm(replica, point)
        receiving = replica.start("receive", timeout=60.0)
    sending = sender.start("send", version=1, wait="applied", timeout=20.0)
    if point == "idle":
        sender.first.until_waiting("receiver_")
    else:
        replica.first.until_at(point)
    replica.first.stop()
    error = sending.error()
    assert error.kind == "PeerLost"
    assert "'sleeper'" in error.first
    assert error.seconds < 10
    # The others go on, and overwrite what the sleeper was reading.
    other = fleet.receiver("other")
    exchange(sender, 2, other)
    exchange(sender, 3, other)
    replica.first.resume()
    fleet.await_renewals("receivers/sleeper/000001", 2)
    if receiving is not None:
        replica.first.release(point)
    second = sender.start("send", version=4, timeout=20.0)
    others = other.start("receive", minimum=4)
    if receiving is not None:
        # It fails, or has the old version in time after all, or goes on to the newest.
        until(lambda: receiving.done, "the sleeper's call ends", 20)
        assert_honest(replica, 1, 2, 3, 4)
    if replica.version != 4:
        replica.receive(minimum=4)
    others.results()
    second.results()
    assert replica.holds(1, 2, 3, 4) == 4
    exchange(sender, 5, other, replica)
    assert replica.tainted is None


@pytest.mark.parametrize("phase", ["receiver_ready", "sender.put", "receiver_applied"])
def test_a_sender_stopped_past_its_lease_is_replaced_and_does_no_harm_when_it_wakes(
    make_fleet: MakeFleet, phase: str
) -> None:
    fleet = make_fleet("stepped-memory")
    sender = fleet.sender(lease_ttl=SHORT_LEASE)
    replica = fleet.receiver(lease_ttl=SHORT_LEASE)
    exchange(sender, 1, replica)
    receiving = None
    if phase == "receiver_ready":
        replica.first.arm("target.begin")  # of the next version
        sending = sender.start("send", version=2, timeout=60.0)
        sender.first.until_waiting("receiver_ready")
        replica.call("disarm")
    else:
        if phase == "sender.put":
            sender.first.arm(phase, after=2)
        else:
            replica.first.arm("target.commit")
        receiving = replica.start("receive", minimum=2, timeout=20.0)
        sending = sender.start("send", version=2, timeout=60.0)
        if phase == "sender.put":
            sender.first.until_at(phase)
        else:
            replica.first.until_at("target.commit")
            sender.first.until_waiting("receiver_applied")
    sender.first.stop()
    if phase == "sender.put":
        error = receiving.error()
        assert error.kind == "PeerLost"
        assert "sender" in error.first
        assert error.seconds < 10
        assert replica.version is None
    fresh = fleet.sender(open_timeout=20.0)
    assert fresh.incarnation == 2
    if phase == "receiver_applied":
        replica.first.release("target.commit")
        until(lambda: receiving.done, "the receiver is done")
    assert_honest(replica, 1, 2)
    exchange(fresh, 7, replica)
    sender.first.resume()
    if phase == "sender.put":
        sender.first.release(phase)
    stale = sending.error()
    assert {"SessionError", "TransferError"} & set(stale.kinds)
    assert replica.holds(1, 2, 7) == 7
    assert replica.version == 7
    again = sender.start("send", version=8).error()
    assert again.kind == "SessionError"
    assert "taken over" in again.first
    exchange(fresh, 8, replica)


def test_a_stopped_server_of_a_tcp_session_holds_nobody_past_its_deadline(
    make_fleet: MakeFleet, backend: str
) -> None:
    fleet = make_fleet(backend, "tcp")
    sender, replica = fleet.sender(), fleet.receiver()
    exchange(sender, 1, replica)
    receiving = replica.start("receive", timeout=2.0)
    replica.first.until_waiting("offer")
    sender.first.stop()
    error = receiving.error()
    assert {"SessionError", "TransferTimeout"} & set(error.kinds)
    assert in_time(error, 2.0)
    error = replica.start("receive", timeout=1.0).error()
    assert {"SessionError", "TransferTimeout"} & set(error.kinds)
    assert in_time(error, 1.0)
    assert replica.version == 1
    assert replica.holds(1) == 1
    sender.first.resume()
    exchange(sender, 2, replica)


def test_a_server_of_a_tcp_session_that_is_gone_holds_nobody_past_its_deadline(
    make_fleet: MakeFleet, backend: str
) -> None:
    fleet = make_fleet(backend, "tcp")
    sender, replica = fleet.sender(), fleet.receiver()
    exchange(sender, 1, replica)
    sender.kill()
    for seconds in (1.0, 2.0):
        error = replica.start("receive", timeout=seconds).error()
        assert {"SessionError", "TransferTimeout"} & set(error.kinds)
        assert "sender" in error.first
        assert in_time(error, seconds)
    assert replica.version == 1
    exchange(fleet.sender(), 2, replica)
