"""Who comes and goes: late receivers, leavers, and senders that start again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from process_rig import Fleet, Side, exchange

MakeFleet = Callable[..., Fleet]


def restart(fleet: Fleet, sender: Side, how: str, **options: object) -> Side:
    if how == "closed":
        sender.close()
        return fleet.sender(workers=sender.workers, **options)
    sender.kill()
    return fleet.sender(ranks=len(sender.workers), **options)


# ---------------------------------------------------------------------- receivers


def test_a_late_receiver_of_stored_versions_catches_up_at_once(
    make_fleet: MakeFleet, scheme: str
) -> None:
    fleet = make_fleet("filesystem", scheme)
    sender = fleet.sender()
    sender.send(1)
    sender.send(2)
    late = fleet.receiver()
    assert late.ask("poll") == 2
    assert late.receive()[0]["version"] == 2
    assert late.holds(1, 2) == 2
    assert late.ask("poll") is None


def test_a_late_receiver_of_live_versions_waits_for_the_next_offer(
    make_fleet: MakeFleet, scheme: str
) -> None:
    fleet = make_fleet("memory", scheme)
    sender = fleet.sender()
    early = fleet.receiver("early")
    exchange(sender, 1, early)
    late = fleet.receiver("late")
    assert late.ask("poll") is None
    receiving = late.start("receive")
    late.first.until_waiting("offer")
    sending = sender.start("send", version=2)
    early.receive()
    assert receiving.results()[0]["version"] == 2
    sending.results()
    assert late.holds(1, 2) == 2


def test_a_version_already_under_way_isnt_given_to_a_receiver_that_joins(
    make_fleet: MakeFleet,
) -> None:
    fleet = make_fleet("memory")
    sender = fleet.sender()
    early = fleet.receiver("early")
    early.first.arm("target.write")
    sending = sender.start("send", version=1)
    receiving = early.start("receive")
    early.first.until_at("target.write")
    late = fleet.receiver("late")
    assert late.ask("poll") is None
    early.first.release("target.write")
    receiving.results()
    assert sending.results()[0]["roster"] == ["early"]
    assert late.holds(1) == "pristine"
    assert late.version is None


def test_a_receiver_that_is_behind_takes_the_newest_and_skips_the_rest(
    make_fleet: MakeFleet, scheme: str
) -> None:
    fleet = make_fleet("filesystem", scheme)
    sender = fleet.sender(config={"keep": 5})
    sender.send(1)
    replica = fleet.receiver()
    assert replica.receive()[0]["version"] == 1
    for version in (2, 3, 7):
        sender.send(version)
    assert replica.receive()[0]["version"] == 7
    assert replica.holds(1, 2, 3, 7) == 7


def test_a_receiver_whose_version_was_replaced_by_a_newer_attempt_takes_that(
    make_fleet: MakeFleet,
) -> None:
    """One receiver is ready, the other never answers: the next version reaches both."""
    fleet = make_fleet("memory")
    sender = fleet.sender(min_receivers=2)
    ready, absent = fleet.receiver("ready"), fleet.receiver("absent")
    receiving = ready.start("receive")
    sending = sender.start("send", version=1, timeout=1.0)
    ready.first.until_waiting("started")
    assert "replica" not in sending.error().first
    second = sender.start("send", version=2)
    absent.receive()
    assert receiving.results()[0]["version"] == 2
    second.results()
    assert (ready.holds(1, 2), absent.holds(1, 2)) == (2, 2)


def test_a_receiver_that_ran_out_of_time_before_the_start_may_call_again_for_the_same_offer(
    make_fleet: MakeFleet,
) -> None:
    fleet = make_fleet("memory")
    sender = fleet.sender(min_receivers=2)
    eager, late = fleet.receiver("eager"), fleet.receiver("late")
    sending = sender.start("send", version=1)
    assert eager.start("receive", timeout=0.5).error().kind == "TransferTimeout"
    receiving = [side.start("receive") for side in (eager, late)]
    assert [calls.results()[0]["version"] for calls in receiving] == [1, 1]
    assert sending.results()[0]["attempt"] == 1
    assert (eager.holds(1), late.holds(1)) == (1, 1)


def test_a_receiver_leaves_and_comes_back_and_the_others_go_on(
    make_fleet: MakeFleet, backend: str, scheme: str
) -> None:
    fleet = make_fleet(backend, scheme)
    sender = fleet.sender()
    stays, leaves = fleet.receiver("stays"), fleet.receiver("leaves")
    exchange(sender, 1, stays, leaves)
    leaves.close()
    exchange(sender, 2, stays)
    assert leaves.incarnation == 1
    back = fleet.receiver("leaves", workers=leaves.workers)
    assert back.incarnation == 2
    assert back.version is None
    exchange(sender, 3, stays, back)


def test_a_receiver_that_has_applied_may_leave_before_the_others_are_done(
    make_fleet: MakeFleet, backend: str
) -> None:
    fleet = make_fleet(backend)
    sender = fleet.sender(min_receivers=2, lease_ttl=0.4)
    quick, slow = fleet.receiver("quick"), fleet.receiver("slow")
    slow.first.arm("target.commit")
    sending = sender.start("send", version=1, wait="applied")
    receiving = slow.start("receive")
    quick.receive()
    slow.first.until_at("target.commit")
    quick.close()
    # The sender looks around at each renewal of its lease: let it do so a few times.
    fleet.await_renewals("senders/000001")
    slow.first.release("target.commit")
    receiving.results()
    assert sending.results()[0]["version"] == 1


def test_a_sender_that_needs_only_publication_may_leave_while_receivers_commit(
    make_fleet: MakeFleet, backend: str
) -> None:
    fleet = make_fleet(backend)
    sender = fleet.sender()
    replica = fleet.receiver(ranks=2, lease_ttl=0.4)
    replica.workers[1].arm("target.commit")
    sending = sender.start("send", version=1, wait="published")
    receiving = replica.start("receive")
    replica.workers[1].until_at("target.commit")
    sending.results()
    sender.close()
    fleet.await_renewals("receivers/replica-0/000001")
    replica.workers[1].release("target.commit")
    assert [report["version"] for report in receiving.results()] == [1, 1]
    assert replica.holds(1) == 1
    assert replica.version == 1


# ---------------------------------------------------------------------- senders


@pytest.mark.parametrize("how", ["closed", "killed"])
def test_a_restarted_sender_reaches_receivers_that_werent_restarted(
    make_fleet: MakeFleet, backend: str, scheme: str, how: str
) -> None:
    fleet = make_fleet(backend, scheme)
    sender = fleet.sender()
    replica = fleet.receiver()
    exchange(sender, 1, replica)
    exchange(sender, 2, replica)
    again = restart(fleet, sender, how)
    assert again.incarnation == (2 if scheme == "file" else 1)
    exchange(again, 3, replica)
    exchange(again, 4, replica)


def test_a_restarted_sender_may_count_from_the_beginning_again(
    make_fleet: MakeFleet, backend: str, scheme: str
) -> None:
    fleet = make_fleet(backend, scheme)
    sender = fleet.sender()
    replica = fleet.receiver()
    exchange(sender, 1, replica)
    exchange(sender, 2, replica)
    again = restart(fleet, sender, "closed")
    if (backend, scheme) == ("filesystem", "tcp"):
        # A tcp session ends with its sender: this is another run in the first one's directory.
        error = again.start("send", version=1).error()
        assert error.kind == "TransferError"
        assert "give each run a directory of its own" in error.first
        exchange(again, 3, replica)
        assert replica.holds(1, 2, 3) == 3
        return
    exchange(again, 1, replica)
    assert replica.holds(1, 2) == 1
    assert replica.version == 1


@pytest.mark.parametrize("how", ["closed", "killed"])
def test_a_receiver_waiting_for_an_offer_gets_the_restarted_senders(
    make_fleet: MakeFleet, backend: str, scheme: str, how: str
) -> None:
    fleet = make_fleet(backend, scheme)
    sender = fleet.sender()
    replica = fleet.receiver()
    exchange(sender, 1, replica)
    receiving = replica.start("receive")
    replica.first.until_waiting("offer")
    again = restart(fleet, sender, how)
    again.start("send", version=4, wait="applied").results()
    assert receiving.results()[0]["version"] == 4
    assert replica.holds(1, 4) == 4


def test_resume_from_keeps_versions_up_to_it_readable_and_voids_later_ones(
    make_fleet: MakeFleet,
) -> None:
    fleet = make_fleet("filesystem")
    sender = fleet.sender(config={"keep": 5})
    for version in (1, 2, 3):
        sender.send(version)
    sender.close()
    resumed = fleet.sender(workers=sender.workers, config={"keep": 5}, resume_from=2)
    late = fleet.receiver("late")
    assert late.receive()[0]["version"] == 2
    assert late.holds(1, 2, 3) == 2
    assert resumed.start("send", version=2).error().kind == "ConfigError"
    resumed.send(3)
    assert late.receive()[0]["version"] == 3
    assert late.holds(2, 3) == 3


def test_resume_from_is_refused_where_the_session_ends_with_its_sender(
    make_fleet: MakeFleet,
) -> None:
    fleet = make_fleet("filesystem", "tcp")
    sender = fleet.sender()
    sender.send(1)
    sender.close()
    error = sender.workers[0].start("open_sender", **sender.opening, resume_from=1).error()
    assert error.kind == "ConfigError"
    assert "resume_from=1: session tcp://" in error.first
    assert "file:///" in error.first


def test_without_resume_from_no_version_of_an_earlier_run_is_followed(
    make_fleet: MakeFleet,
) -> None:
    fleet = make_fleet("filesystem")
    sender = fleet.sender(config={"keep": 5})
    sender.send(7)
    sender.close()
    fleet.sender(workers=sender.workers, config={"keep": 5})
    late = fleet.receiver("late")
    assert late.ask("poll") is None
    error = late.start("receive", timeout=0.5).error()
    assert error.kind == "TransferTimeout"
    assert late.holds(7) == "pristine"


def test_a_receiver_ahead_of_a_resumed_run_goes_back_to_its_version(
    make_fleet: MakeFleet,
) -> None:
    """Version 3 of the first run is void; the receiver that holds it takes 2 again."""
    fleet = make_fleet("filesystem")
    sender = fleet.sender(config={"keep": 5})
    replica = fleet.receiver()
    sender.send(2)
    replica.receive()
    sender.send(3)
    replica.receive()
    sender.close()
    fleet.sender(workers=sender.workers, config={"keep": 5}, resume_from=2)
    assert replica.ask("poll") == 2
    assert replica.receive()[0]["version"] == 2
    assert replica.holds(2, 3) == 2


# ---------------------------------------------------------------------- order and attempts


@pytest.mark.parametrize("version", [2, 1, 0])
def test_a_version_that_doesnt_rise_is_refused_and_nothing_is_lost(
    fleet: Fleet, version: int
) -> None:
    sender, replica = fleet.sender(), fleet.receiver()
    exchange(sender, 2, replica)
    error = sender.start("send", version=version).error()
    assert error.kind == "ConfigError"
    assert f"version {version}" in error.first
    assert "send 3" in error.first
    assert replica.version == 2
    exchange(sender, 3, replica)


@pytest.mark.parametrize("version", [-1, 1.5, "3", None, True, 10**12])
def test_a_version_that_is_no_version_is_refused(fleet: Fleet, version: object) -> None:
    sender, replica = fleet.sender(), fleet.receiver()
    error = sender.start("send", version=version, fill=False).error()
    assert error.kind == "ConfigError"
    assert repr(version) in error.first
    exchange(sender, 1, replica)


def test_an_aborted_version_may_be_sent_again_as_the_next_attempt(fleet: Fleet) -> None:
    sender, replica = fleet.sender(), fleet.receiver()
    exchange(sender, 1, replica)
    replica.first.arm("target.commit", "raise")
    sending = sender.start("send", version=2, wait="applied")
    receiving = replica.start("receive")
    assert receiving.error().kind == "Planned"
    error = sending.error()
    assert error.kind == "PeerLost"
    assert "replica-0" in error.first
    assert "planned failure" in error.message
    assert replica.version is None
    assert "planned failure" in replica.tainted
    second = sender.start("send", version=2, wait="applied")
    report = replica.receive(minimum=2)[0]
    assert (report["version"], report["attempt"]) == (2, 2)
    assert second.results()[0]["attempt"] == 2
    assert replica.holds(1, 2) == 2
    assert replica.tainted is None
    exchange(sender, 3, replica)


def test_a_receiver_that_applied_an_aborted_attempt_applies_the_next_one(
    make_fleet: MakeFleet, backend: str
) -> None:
    fleet = make_fleet(backend)
    sender = fleet.sender(min_receivers=2)
    good, bad = fleet.receiver("good"), fleet.receiver("bad")
    bad.first.arm("target.commit", "raise")
    sending = sender.start("send", version=1, wait="applied")
    receiving = bad.start("receive")
    good.receive()
    receiving.error()
    sending.error()
    assert good.holds(1) == 1
    second = sender.start("send", version=1, wait="applied")
    calls = [side.start("receive") for side in (good, bad)]
    assert [call.results()[0]["attempt"] for call in calls] == [2, 2]
    second.results()
    assert (good.holds(1), bad.holds(1)) == (1, 1)


@pytest.mark.parametrize("role", ["sender", "receiver"])
@pytest.mark.parametrize("moment", ["before the offer", "while it runs"])
def test_the_other_ranks_hear_by_its_lease_that_their_rank_0_stands_still(
    make_fleet: MakeFleet, role: str, moment: str
) -> None:
    fleet = make_fleet("stepped-memory")
    sender = fleet.sender(ranks=2, lease_ttl=1.0)
    pair = fleet.receiver("pair", ranks=2, lease_ttl=1.0)
    side, name = (sender, "sender") if role == "sender" else (pair, "pair")
    if moment == "before the offer":
        side.first.stop()
        call = {"sender": ("send", {"version": 1}), "receiver": ("receive", {})}[role]
        waiting = side.workers[1].start(call[0], **call[1])
    else:
        point = {"sender": "source.tensors", "receiver": "target.commit"}[role]
        side.first.arm(point)
        waiting = sender.start("send", version=1).calls[1]
        if role == "receiver":
            waiting = pair.start("receive").calls[1]
        side.first.until_at(point)
        side.first.stop()
    error = waiting.error()
    assert error.kind == "PeerLost", error
    assert name in error.first
    assert error.seconds < 10  # of 30


@pytest.mark.parametrize("role", ["sender", "receiver"])
def test_everybody_hears_by_its_lease_that_another_rank_stands_still(
    make_fleet: MakeFleet, role: str
) -> None:
    fleet = make_fleet("stepped-memory")
    sender = fleet.sender(ranks=2, lease_ttl=1.0)
    pair = fleet.receiver("pair", ranks=2, lease_ttl=1.0)
    side, point, name = {
        "sender": (sender, "sender.put", "sender rank 1"),
        "receiver": (pair, "target.commit", "pair rank 1"),
    }[role]
    victim = side.workers[1]
    victim.arm(point)
    calls = [*sender.start("send", version=1).calls, *pair.start("receive").calls]
    victim.until_at(point)
    victim.stop()
    for call in calls:
        if call.worker is not victim:
            error = call.error()
            assert error.kind == "PeerLost", error
            assert name in error.first
            assert error.seconds < 15  # of 30
