"""Processes that are killed or stand still, of each role and in each phase of a version."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from process_rig import Call, Fleet, RemoteError, WorkerDied, exchange, in_time

MakeFleet = Callable[..., Fleet]

SHORT_LEASE = 1.0
DEADLINE = 4.0

PHASES = {
    "offer": {"sender": ("source.tensors", 0), "receiver": ("receiver.check", 0)},
    "forming": {"sender": ("nccl.form", 0), "receiver": ("nccl.form", 0)},
    "ready": {"sender": ("sender.begin", 0), "receiver": ("receiver.begin", 0)},
    "transfer": {"sender": ("sender.put", 1), "receiver": ("receiver.fetch", 1)},
    "applied": {"sender": ("sender.finish", 0), "receiver": ("target.commit", 0)},
}
EVERY = list(itertools.product(("sender", "receiver"), (0, 1), PHASES))


def outcome(call: Call) -> RemoteError | None:
    """How a survivor's call ended; None if it succeeded."""
    try:
        call.result(DEADLINE * 2 + 5)
    except WorkerDied:
        raise
    except RemoteError as error:
        return error
    return None


def names(role: str, rank: int, phase: str) -> list[str]:
    """What an error says of the lost process: its rank, or its side where that is enough."""
    side = {"sender": "the sender", "receiver": "receiver 'pair' "}[role]
    exact = {"sender": f"sender rank {rank}", "receiver": f"receiver 'pair' rank {rank}"}[role]
    # Rank 0 holds its side's lease; and before there is an offer nobody knows of ranks.
    whole = rank == 0 or phase == "offer"
    return [exact, exact.replace("receiver 'pair'", "pair"), *([side] if whole else [])]


def lose(make_fleet: MakeFleet, fate: str, role: str, rank: int, phase: str) -> None:
    fleet = make_fleet("stepped-nccl")
    options = {"lease_ttl": SHORT_LEASE, "timeout": DEADLINE}
    sender = fleet.sender(ranks=2, min_receivers=2, **options)
    pair, other = fleet.receiver("pair", ranks=2, **options), fleet.receiver("other", **options)
    if phase != "forming":  # which the first version does
        exchange(sender, 1, pair, other)
    side = sender if role == "sender" else pair
    point, after = PHASES[phase][role]
    victim = side.workers[rank]
    victim.arm(point, after=after)
    receiving = [call for r in (pair, other) for call in r.start("receive", minimum=2).calls]
    sending = sender.start("send", version=2, wait="applied").calls
    victim.until_at(point)
    victim.kill() if fate == "killed" else victim.stop()
    took = []
    for call in (*sending, *receiving):
        if call.worker is victim:
            continue
        error = outcome(call)
        if error is None:
            took.append(call.worker)
            continue
        assert "TransferError" in error.kinds, error
        assert in_time(error, DEADLINE), f"{error.seconds:.2f} s: {error}"
        accepted = names(role, rank, phase)
        if (role, phase) == ("receiver", "offer") and call.worker is other.first:
            accepted.append("the sender")  # from which it may not have heard yet
        assert any(name in error.first for name in accepted), error
    # A replica may have all bytes already, on all of its ranks, when the version ends.
    whole = [set(took) & set(each.workers) for each in (pair, other)]
    assert phase == "applied" or not took
    assert not set(took) & set(sender.workers)
    assert all(
        taken in (set(), set(each.workers))
        for taken, each in zip(whole, (pair, other), strict=True)
    )
    for worker in {*pair.workers, *other.workers} - {victim}:
        assert worker.call("version") in ((2,) if worker in took else (1, None))
    # The next version forms a new group, of those that are alive.
    for worker in side.workers:
        if worker is not victim:
            worker.call("close")
    if role == "sender":
        sender = fleet.sender(ranks=2, min_receivers=2)
    else:
        pair = fleet.receiver("pair", ranks=2)
    exchange(sender, 3, pair, other)


@pytest.mark.parametrize("phase", ["ready", "transfer"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("role", ["sender", "receiver"])
def test_a_killed_process_is_named(make_fleet: MakeFleet, role: str, rank: int, phase: str) -> None:
    lose(make_fleet, "killed", role, rank, phase)


@pytest.mark.parametrize(("role", "rank"), [("sender", 1), ("receiver", 1)])
def test_a_stopped_process_is_named(make_fleet: MakeFleet, role: str, rank: int) -> None:
    lose(make_fleet, "stopped", role, rank, "transfer")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_stands_still_while_the_group_is_formed_is_named(
    make_fleet: MakeFleet, rank: int
) -> None:
    """It has come to the roll call; the others are connecting to it when it stops."""
    lose(make_fleet, "stopped", "receiver", rank, "forming")


@pytest.mark.soak
@pytest.mark.parametrize("fate", ["killed", "stopped"])
@pytest.mark.parametrize(("role", "rank", "phase"), EVERY)
def test_a_lost_process_is_named_in_every_phase(
    make_fleet: MakeFleet, fate: str, role: str, rank: int, phase: str
) -> None:
    lose(make_fleet, fate, role, rank, phase)
