"""A failure is told, and doesn't last."""

from __future__ import annotations

import time
from typing import Any

from weightwire_conformance.capabilities import receivers
from weightwire_conformance.rig import Calls, Fleet, RemoteError, Side
from weightwire_conformance.rig.fleet import in_time
from weightwire_conformance.scenario import scenario

__all__: list[str] = []

_SHORT_SECONDS = 3.0
"""Deadline of calls that nothing but it can end: a rank's siblings have no lease of its own."""

_LATE_SECONDS = 1.0
"""A transport that goes on writing for a version that was given up does so by then."""

_SHORT_LEASE_SECONDS = 2.0
"""Of a receiver that is to be missed by its lease alone."""


def told(error: RemoteError) -> None:
    """Fail unless the error is one of weightwire's tree, and no mere passing of time."""
    assert "WeightWireError" in error.kinds, f"not translated: {error}"
    assert "TransferTimeout" not in error.kinds, f"found out by its deadline only: {error}"


def settles(
    fleet: Fleet, replica: Side, receiving: Calls, sender: Side, version: int, *others: Side
) -> None:
    """A replica whose version was aborted ends whole, and takes ``version``, as others do.

    Its call may end in an error, with the version that was under way, or, where it never
    saw that, with the next one.
    """
    sending = sender.start("send", version=version, wait="applied")
    theirs = [other.start("receive", minimum=version) for other in others]
    error = receiving.outcome()
    if error is not None:
        told(error)
    replica.must_be_whole()
    if replica.version != version:
        replica.receive(minimum=version)
    sending.results()
    for calls in theirs:
        calls.results()
    for side in (replica, *others):
        side.must_hold(version)


@scenario(
    cases={
        "fetching": {"point": "receiver.fetched"},
        "writing": {"point": "target.write"},
        "committing": {"point": "target.commit"},
        "a-group-ahead": {"point": "target.write", "overlap": True},
    }
)
def a_receiver_that_fails_part_way_says_so_and_recovers(
    fleet: Fleet, point: str, overlap: bool = False
) -> None:
    """It claims no version that it doesn't hold, until a whole one arrives."""
    sender, replica = fleet.sender(overlap=overlap), fleet.receiver(overlap=overlap)
    fleet.exchange(sender, 1, replica)
    # Nothing is mixed before a group has been written, unless bytes land in place.
    replica.arm(point, "raise", after=0 if point == "target.commit" else 1)
    sending = sender.start("send", version=2, wait="applied")
    error = replica.start("receive").error()
    assert error.kind == "PlannedFailure", f"the engine's own error is hidden: {error}"
    told(sending.error())
    assert replica.version is None, "a mixture is claimed to be a version"
    assert replica.tainted is not None, "a mixture isn't tainted"
    fleet.exchange(sender, 3, replica)
    if point == "receiver.fetched":  # once: it takes a second
        time.sleep(_LATE_SECONDS)
        replica.must_hold(3)
    assert replica.tainted is None


@scenario(
    cases={
        "in-begin": {"side": "receiver", "point": "receiver.begun"},
        "posted": {"side": "receiver", "point": "receiver.posted", "overlap": True},
        "in-the-senders-begin": {"side": "sender", "point": "sender.begun"},
    }
)
def a_version_that_ends_as_it_begins_is_given_up_on_both_sides(
    fleet: Fleet, side: str, point: str, overlap: bool = False
) -> None:
    """``abort`` follows a ``begin`` that raised, and takes back what was posted."""
    sender, replica = fleet.sender(overlap=overlap), fleet.receiver(overlap=overlap)
    fleet.exchange(sender, 1, replica)
    (replica if side == "receiver" else sender).arm(point, "raise")
    deadline = fleet.deadline(_SHORT_SECONDS)
    sending = sender.start("send", version=2, wait="applied", timeout=deadline)
    receiving = replica.start("receive", timeout=deadline)
    errors = {"sender": sending.error(), "receiver": receiving.error()}
    assert errors[side].kind == "PlannedFailure", errors[side]
    replica.must_be_whole()
    fleet.exchange(sender, 3, replica)


@scenario(need=receivers(2))
def one_receivers_failure_doesnt_harm_the_others(fleet: Fleet) -> None:
    sender = fleet.sender(min_receivers=2)
    good, bad = fleet.receiver("good"), fleet.receiver("bad")
    bad.arm("target.write", "raise")
    sending = sender.start("send", version=1, wait="applied")
    receiving = good.start("receive")
    bad.start("receive").error()
    told(sending.error())
    settles(fleet, good, receiving, sender, 2, bad)


@scenario(
    cases={
        "fetching": {"point": "receiver.fetch", "after": 1},
        "planning": {"point": "target.plan"},
        "beginning": {"point": "receiver.begin"},
        "posting": {"point": "receiver.posted"},
        "writing": {"point": "target.write"},
        "a-group-ahead": {"point": "target.write", "overlap": True},
        "finishing": {"point": "receiver.finish"},
        "committing": {"point": "target.commit"},
    }
)
def a_killed_receiver_is_missed(
    fleet: Fleet, point: str, after: int = 0, overlap: bool = False
) -> None:
    """The sender is told long before its deadline, and serves the next one."""
    sender, replica = fleet.sender(overlap=overlap), fleet.receiver(overlap=overlap)
    replica.arm(point, after=after)
    sending = sender.start("send", version=1, wait="applied")
    replica.start("receive")
    replica.first.until_at(point)
    replica.kill()
    told(sending.error())
    replaced = fleet.receiver()
    fleet.exchange(sender, 2, replaced)


@scenario(
    cases={
        "sending": {"point": "sender.put", "after": 1},
        "offering": {"point": "source.tensors"},
        "beginning": {"point": "sender.begin"},
        "finishing": {"point": "sender.finish"},
        "publishing": {"point": "sender.publish"},
    }
)
def a_killed_sender_is_missed(fleet: Fleet, point: str, after: int = 0) -> None:
    """Its receivers are told long before their deadline, and take the next one's version."""
    sender, replica = fleet.sender(), fleet.receiver()
    fleet.exchange(sender, 1, replica)
    sender.arm(point, after=after)
    sender.start("send", version=2)
    receiving = replica.start("receive")
    sender.first.until_at(point)
    sender.kill()
    settles(fleet, replica, receiving, fleet.sender(), 3)


def ends_with_its_rank(side: Side, calls: Calls, victim: int, deadline: float) -> None:
    """The siblings of a killed rank are told by their deadline, and can close."""
    for rank, call in enumerate(calls.calls):
        if rank != victim:
            error = call.error()
            assert "TransferError" in error.kinds, f"not translated: {error}"
            in_time(error, deadline)
            side.workers[rank].call("close")


_INFERENCE_PHASES: dict[str, dict[str, Any]] = {
    "fetching": {"point": "receiver.fetch", "after": 1},
    "planning": {"point": "target.plan"},
    "beginning": {"point": "receiver.begin"},
    "writing": {"point": "target.write"},
    "finishing": {"point": "receiver.finish"},
    "committing": {"point": "target.commit"},
}
_TRAINER_PHASES: dict[str, dict[str, Any]] = {
    "sending": {"point": "sender.put"},
    "offering": {"point": "source.tensors"},
    "beginning": {"point": "sender.begin"},
    "finishing": {"point": "sender.finish"},
}


@scenario(
    cases={
        f"{phase}-rank-{rank}": {"victim": rank, **where}
        for phase, where in _INFERENCE_PHASES.items()
        for rank in (1, 0)
    }
)
def a_killed_inference_rank_ends_the_version_for_its_replica(
    fleet: Fleet, victim: int, point: str, after: int = 0
) -> None:
    """Its sibling and the sender hear of it by their deadline; the next replica is served."""
    sender, replica = fleet.sender(), fleet.receiver(ranks=2)
    dies, lives = replica.workers[victim], replica.workers[1 - victim]
    deadline = fleet.deadline(_SHORT_SECONDS)
    dies.arm(point, after=after)
    sending = sender.start("send", version=1, wait="applied", timeout=deadline)
    receiving = replica.start("receive", timeout=deadline)
    dies.until_at(point)
    dies.kill()
    error = sending.error()
    assert "TransferError" in error.kinds, error
    in_time(error, deadline)
    ends_with_its_rank(replica, receiving, victim, deadline)
    assert lives.call("version") is None, "a version that a rank doesn't hold is claimed"
    fleet.exchange(sender, 2, fleet.receiver(ranks=2))


@scenario(
    cases={
        f"{phase}-rank-{rank}": {"victim": rank, **where}
        for phase, where in _TRAINER_PHASES.items()
        for rank in (1, 0)
    }
)
def a_killed_trainer_rank_ends_the_version_for_everybody(
    fleet: Fleet, victim: int, point: str
) -> None:
    """Its sibling and the receivers hear of it; the next trainer is followed."""
    sender, replica = fleet.sender(ranks=2), fleet.receiver()
    fleet.exchange(sender, 1, replica)
    dies = sender.workers[victim]
    deadline = fleet.deadline(_SHORT_SECONDS)
    dies.arm(point)
    sending = sender.start("send", version=2, timeout=deadline)
    receiving = replica.start("receive")
    dies.until_at(point)
    dies.kill()
    ends_with_its_rank(sender, sending, victim, deadline)
    settles(fleet, replica, receiving, fleet.sender(ranks=2), 3)


def goes_on(fleet: Fleet, sending: Calls, stays: Side, receiving: Calls) -> None:
    """Who stays gets version 1 without the lost one; a collective backend says why it can't."""
    if fleet.capabilities["flow"] == "collective":
        told(sending.error())
        receiving.outcome()
    else:
        sending.results()
        assert receiving.results()[0]["version"] == 1
        stays.must_hold(1)


@scenario(
    need=receivers(2),
    cases={
        "fetching": {"point": "receiver.fetch", "after": 1},
        "beginning": {"point": "receiver.begin"},
        "writing": {"point": "target.write"},
        "committing": {"point": "target.commit"},
    },
)
def the_others_go_on_without_a_lost_receiver(fleet: Fleet, point: str, after: int = 0) -> None:
    """With ``on_receiver_loss="continue"``; a collective backend needs a new attempt."""
    sender = fleet.sender(min_receivers=2, on_receiver_loss="continue")
    stays, dies = fleet.receiver("stays"), fleet.receiver("dies")
    dies.arm(point, after=after)
    sending = sender.start("send", version=1, wait="applied")
    receiving = stays.start("receive")
    dies.start("receive")
    dies.first.until_at(point)
    dies.kill()
    goes_on(fleet, sending, stays, receiving)
    fleet.exchange(sender, 2, stays, fleet.receiver("dies"))


@scenario(
    need=receivers(2),
    cases={
        "fetching": {"point": "receiver.fetch", "after": 1},
        "writing": {"point": "target.write"},
    },
    long=True,
)
def the_others_go_on_without_a_receiver_that_stands_still(
    fleet: Fleet, point: str, after: int = 0
) -> None:
    """No connection breaks: its lease alone tells.  When it goes on, it takes the next one."""
    sender = fleet.sender(
        "twins", group_bytes=2 << 10, min_receivers=2, on_receiver_loss="continue"
    )
    # One name begins with the other.
    stays = fleet.receiver("r-10", "twins")
    stands = fleet.receiver("r-1", "twins", lease_ttl=_SHORT_LEASE_SECONDS)
    stays.arm("receiver.fetch", "slow")
    stands.arm(point, after=after)
    sending = sender.start("send", version=1, wait="applied")
    receiving = stays.start("receive")
    standing = stands.start("receive", timeout=fleet.deadline(2 * _SHORT_LEASE_SECONDS))
    stands.first.until_at(point)
    stands.first.suspend()
    goes_on(fleet, sending, stays, receiving)
    stands.first.resume()
    stands.first.release(point)
    standing.outcome()
    stands.must_be_whole()
    fleet.exchange(sender, 2, stays, stands)


@scenario(
    need=receivers(2),
    cases={"fail": {"on_loss": "fail"}, "continue": {"on_loss": "continue"}},
)
def a_receiver_that_dies_before_it_says_so_hasnt_applied_the_version(
    fleet: Fleet, on_loss: str
) -> None:
    """Killed between its commit and its acknowledgement: it is missed by name, the others go on."""
    sender = fleet.sender(min_receivers=2, on_receiver_loss=on_loss)
    stays, dies = fleet.receiver("stays"), fleet.receiver("dies")
    dies.arm("target.committed")
    sending = sender.start("send", version=1, wait="applied")
    receiving = stays.start("receive")
    dies.start("receive")
    dies.first.until_at("target.committed")
    dies.kill()
    if on_loss == "fail" or fleet.capabilities["flow"] == "collective":
        error = sending.error()
        told(error)
        assert "'dies'" in error.first, f"doesn't name who is missing: {error}"
    else:
        sending.results()
    receiving.outcome()
    stays.must_be_whole()
    fleet.exchange(sender, 2, stays, fleet.receiver("dies"))


@scenario
def an_interrupted_receiver_tells_its_sender(fleet: Fleet) -> None:
    """Ctrl-C in the midst of a version."""
    sender, replica = fleet.sender(), fleet.receiver()
    replica.arm("receiver.fetch", after=1)
    sending = sender.start("send", version=1, wait="applied")
    receiving = replica.start("receive")
    replica.first.until_at("receiver.fetch")
    replica.first.interrupt()
    assert receiving.error().kind == "KeyboardInterrupt"
    told(sending.error())
    replica.must_be_whole()
    fleet.exchange(sender, 2, replica)


@scenario
def an_interrupted_sender_tells_its_receivers(fleet: Fleet) -> None:
    """Ctrl-C in the midst of a version."""
    sender, replica = fleet.sender(), fleet.receiver()
    sender.arm("sender.put", after=1)
    sending = sender.start("send", version=1)
    receiving = replica.start("receive")
    sender.first.until_at("sender.put")
    sender.first.interrupt()
    assert sending.error().kind == "KeyboardInterrupt"
    settles(fleet, replica, receiving, sender, 2)
