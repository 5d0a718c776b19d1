"""A pool gets a version in waves, and within its bounds."""

from __future__ import annotations

from weightwire_conformance.capabilities import LIVE_RECEIVERS_GET_OFFERS, option, receivers
from weightwire_conformance.rig import Fleet
from weightwire_conformance.rig.fleet import wait_done
from weightwire_conformance.rig.worker import gather
from weightwire_conformance.scenario import scenario

__all__: list[str] = []

_LONG_ENOUGH = 1.0
"""Seconds in which what mustn't happen would have happened."""


@scenario(
    cases={"one-trainer-rank": {"ranks": 1}, "two-trainer-ranks": {"ranks": 2}}, need=receivers(2)
)
def a_pool_is_updated_one_by_one(fleet: Fleet, ranks: int) -> None:
    """While one receiver installs a version, the other one still serves the version before."""
    sender = fleet.sender(ranks=ranks, min_receivers=2, max_unavailable=1)
    first, second = fleet.receiver("first"), fleet.receiver("second")
    fleet.exchange(sender, 1, first, second)
    first.arm("receiver.fetched")
    sending = sender.start("send", version=2, wait="applied")
    updating = first.start("receive", minimum=2)
    first.first.until_at("receiver.fetched")
    waiting = second.start("receive", minimum=2)
    second.first.until_waiting("turn to be out of service" if fleet.stores else "offer")
    assert not wait_done(waiting, _LONG_ENOUGH), "both were out of service at once"
    assert second.ask("version", now=True) == 1
    first.first.release("receiver.fetched")
    gather(updating, waiting, sending)
    first.must_hold(2)
    second.must_hold(2)
    fleet.exchange(sender, 3, first, second)


@scenario(need=receivers(2))
def a_receiver_that_isnt_ready_may_fall_behind(fleet: Fleet) -> None:
    """So far as the sender allows; then it is waited for."""
    busy, ready = fleet.receiver("busy"), fleet.receiver("ready")
    sender = fleet.sender(max_version_lag=1, ready_within=fleet.deadline(2.0))
    fleet.exchange(sender, 1, busy, ready)
    last = 3 if fleet.stores else 2
    for version in range(2, last + 1):
        sending = sender.start("send", version=version, wait="published")
        ready.receive(minimum=version)
        sending.results()
        ready.must_hold(version)
        busy.must_hold(1)
    sending = sender.start("send", version=last + 1, wait="published")
    assert not wait_done(sending, _LONG_ENOUGH), "it fell further behind than it may"
    others = [ready.start("receive", minimum=last + 1)]
    taken = busy.receive()[0]["version"]
    gather(*others, sending)
    busy.must_hold(taken)
    ready.must_hold(last + 1)


@scenario(need=LIVE_RECEIVERS_GET_OFFERS)
def a_full_pool_takes_another_when_one_leaves(fleet: Fleet) -> None:
    sender = fleet.sender(max_receivers=1)
    first = fleet.receiver("first")
    second = fleet.receiver("also")
    fleet.exchange(sender, 1, first)
    second.must_be_pristine()
    sending = sender.start("send", version=2, wait="applied")
    waiting = second.start("receive")
    first.receive(minimum=2)
    sending.results()
    assert second.ask("version", now=True) is None
    first.close()
    sender.send(3, wait="applied")
    waiting.results()
    second.must_hold(3)


@scenario(
    cases={"one-rank-each": {"ranks": 1}, "two-ranks-each": {"ranks": 2}},
    need=LIVE_RECEIVERS_GET_OFFERS,
)
def a_late_receiver_catches_up_through_another_backend(fleet: Fleet, ranks: int) -> None:
    """It gets what was stored for it at once, and the next version with the others."""
    sender = fleet.sender(ranks=ranks, catch_up="filesystem")
    early = fleet.receiver("early", catch_up="filesystem")
    for version in (1, 2):
        fleet.exchange(sender, version, early)
    late = fleet.receiver("late", ranks=ranks, catch_up="filesystem")
    late.must_be_pristine()
    caught_up = late.receive()[0]
    assert caught_up["version"] == 2
    assert caught_up["backend"] == "filesystem"
    late.must_hold(2)
    fleet.exchange(sender, 3, early, late)
    sender.kill()
    after_it = fleet.receiver("after-its-end", catch_up="filesystem")
    assert after_it.receive()[0]["version"] == 3
    after_it.must_hold(3)
    sender = fleet.sender(ranks=ranks, catch_up="filesystem")
    fleet.exchange(sender, 4, early, late, after_it)


@scenario(
    cases={"one-rank-each": {"ranks": 1}, "two-ranks-each": {"ranks": 2}}, need=option("snapshot")
)
def a_late_receiver_is_served_from_a_snapshot(fleet: Fleet, ranks: int) -> None:
    """By the trainer's copies, without a call of it; one that dies reading holds nobody."""
    fleet.options["snapshot"] = "host"
    sender, early = fleet.sender(ranks=ranks), fleet.receiver("early")
    for version in (1, 2):
        fleet.exchange(sender, version, early)
    late = fleet.receiver("late", ranks=ranks)
    late.must_be_pristine()
    assert late.receive()[0]["version"] == 2
    late.must_hold(2)
    dies = fleet.receiver("dies")
    dies.arm("receiver.fetch")
    dies.start("receive")
    dies.first.until_at("receiver.fetch")
    dies.kill()
    fleet.exchange(sender, 3, early, late)
    after_it = fleet.receiver("after-it")
    assert after_it.receive()[0]["version"] == 3
    after_it.must_hold(3)
    fleet.exchange(sender, 4, early, late, after_it)
