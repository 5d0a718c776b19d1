"""A failure is told, and doesn't last."""

from __future__ import annotations

from weightwire_conformance.capabilities import receivers
from weightwire_conformance.rig import Calls, Fleet, RemoteError, Side
from weightwire_conformance.scenario import scenario

__all__: list[str] = []


def told(error: RemoteError) -> None:
    """Fail unless the error is one of weightwire's tree, and no mere passing of time."""
    assert "WeightWireError" in error.kinds, f"not translated: {error}"
    assert "TransferTimeout" not in error.kinds, f"found out by its deadline only: {error}"


def settles(fleet: Fleet, replica: Side, receiving: Calls, sender: Side, version: int) -> None:
    """A replica whose sender is gone ends whole, and takes ``version`` from the next one.

    Its call may end in an error, with the version that was under way, or with
    the next sender's.
    """
    sending = sender.start("send", version=version, wait="applied")
    error = receiving.outcome()
    if error is not None:
        told(error)
    replica.must_be_whole()
    if replica.version != version:
        replica.receive(minimum=version)
    sending.results()
    replica.must_hold(version)


@scenario(
    cases={
        "fetching": {"point": "receiver.fetched"},
        "writing": {"point": "target.write"},
        "committing": {"point": "target.commit"},
    }
)
def a_receiver_that_fails_part_way_says_so_and_recovers(fleet: Fleet, point: str) -> None:
    """It claims no version that it doesn't hold, until a whole one arrives."""
    sender, replica = fleet.sender(), fleet.receiver()
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
    assert replica.tainted is None


@scenario(need=receivers(2))
def one_receivers_failure_doesnt_harm_the_others(fleet: Fleet) -> None:
    sender = fleet.sender(min_receivers=2)
    good, bad = fleet.receiver("good"), fleet.receiver("bad")
    bad.arm("target.write", "raise")
    sending = sender.start("send", version=1, wait="applied")
    receiving = good.start("receive")
    bad.start("receive").error()
    told(sending.error())
    error = receiving.outcome()
    if error is not None:
        told(error)
    good.must_be_whole()
    fleet.exchange(sender, 2, good, bad)


@scenario(
    cases={
        "fetching": {"point": "receiver.fetch", "after": 1},
        "planning": {"point": "target.plan"},
        "beginning": {"point": "receiver.begin"},
        "writing": {"point": "target.write"},
        "finishing": {"point": "receiver.finish"},
        "committing": {"point": "target.commit"},
    }
)
def a_killed_receiver_is_missed(fleet: Fleet, point: str, after: int = 0) -> None:
    """The sender is told long before its deadline, and serves the next one."""
    sender, replica = fleet.sender(), fleet.receiver()
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


@scenario(need=receivers(2))
def the_others_go_on_without_a_lost_receiver(fleet: Fleet) -> None:
    """With ``on_receiver_loss="continue"``; a collective backend needs a new attempt."""
    sender = fleet.sender(min_receivers=2, on_receiver_loss="continue")
    stays, dies = fleet.receiver("stays"), fleet.receiver("dies")
    dies.arm("receiver.fetch", after=1)
    sending = sender.start("send", version=1, wait="applied")
    receiving = stays.start("receive")
    dies.start("receive")
    dies.first.until_at("receiver.fetch")
    dies.kill()
    if fleet.capabilities["flow"] == "collective":
        told(sending.error())
        receiving.outcome()
        return
    sending.results()
    assert receiving.results()[0]["version"] == 1
    stays.must_hold(1)


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
