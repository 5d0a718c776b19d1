"""Sides of several ranks act as one, whoever else is there."""

from __future__ import annotations

from weightwire_conformance.capabilities import receivers
from weightwire_conformance.rig import Fleet, RemoteError
from weightwire_conformance.rig.fleet import in_time
from weightwire_conformance.scenario import scenario

__all__: list[str] = []

_SECONDS = 3.0


def ends(error: RemoteError | None, deadline: float) -> None:
    """Fail unless a call ended in an error of weightwire's tree by its deadline."""
    if error is not None:
        assert "WeightWireError" in error.kinds, f"not translated: {error}"
        in_time(error, deadline)


@scenario(need=receivers(2))
def replicas_of_unequal_size_get_every_version(fleet: Fleet) -> None:
    """One rank beside two: each rank holds all that it reads."""
    sender = fleet.sender(ranks=2, min_receivers=2)
    pair, single = fleet.receiver("pair", ranks=2), fleet.receiver("single")
    for version in (1, 2):
        fleet.exchange(sender, version, pair, single)


@scenario(need=receivers(2))
def a_roster_that_changes_with_every_version(fleet: Fleet) -> None:
    """One joins, one leaves, one comes back: those that are there hold the version."""
    sender = fleet.sender(ranks=2)
    first = fleet.receiver("first")
    fleet.exchange(sender, 1, first)
    second = fleet.receiver("second", ranks=2)
    fleet.exchange(sender, 2, first, second)
    first.close()
    fleet.exchange(sender, 3, second)
    again = fleet.receiver("first", workers=first.workers)
    fleet.exchange(sender, 4, again, second)


@scenario(cases={"1": {"rank": 1}, "0": {"rank": 0}})
def a_killed_trainer_rank_holds_nobody(fleet: Fleet, rank: int) -> None:
    """The others' calls end by their deadline, and the next trainer serves the same receivers."""
    sender, replica = fleet.sender(ranks=2), fleet.receiver()
    fleet.exchange(sender, 1, replica)
    deadline = fleet.deadline(_SECONDS)
    sender.workers[rank].arm("sender.put")
    sending = sender.start("send", version=2, wait="applied", timeout=deadline)
    receiving = replica.start("receive", minimum=2, timeout=deadline)
    sender.workers[rank].until_at("sender.put")
    sender.workers[rank].kill()
    ends(sending.calls[1 - rank].error(), deadline)
    ends(receiving.outcome(), deadline)
    replica.must_be_whole()
    sender.workers[1 - rank].call("close")
    fleet.exchange(fleet.sender(ranks=2), 3, replica)


@scenario(cases={"1": {"rank": 1}, "0": {"rank": 0}})
def a_killed_inference_rank_holds_nobody(fleet: Fleet, rank: int) -> None:
    """Its replica doesn't claim the version, and the next replica gets one."""
    sender, replica = fleet.sender(ranks=2), fleet.receiver(ranks=2)
    fleet.exchange(sender, 1, replica)
    deadline = fleet.deadline(_SECONDS)
    replica.workers[rank].arm("receiver.fetch")
    sending = sender.start("send", version=2, wait="applied", timeout=deadline)
    receiving = replica.start("receive", minimum=2, timeout=deadline)
    replica.workers[rank].until_at("receiver.fetch")
    replica.workers[rank].kill()
    survivor = replica.workers[1 - rank]
    ends(receiving.calls[1 - rank].error(), deadline)
    ends(sending.error(), deadline)
    assert survivor.call("version") is None, "a replica that lost a rank claims the version"
    survivor.call("close")
    fleet.exchange(sender, 3, fleet.receiver(ranks=2))
