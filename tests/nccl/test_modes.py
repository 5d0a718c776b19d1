"""Point-to-point and broadcast: who chooses, why, and that the bytes are the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from process_rig import Call, Fleet
from sharded_fleet import Ranks, exchange, replica, start_trainer, trainer

MakeFleet = Callable[..., Fleet]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("mode", ["p2p", "broadcast"])
def test_both_modes_bring_the_same_bytes(make_fleet: MakeFleet, mode: str, overlap: bool) -> None:
    fleet = make_fleet("nccl")
    config = {"mode": mode, "bucket_bytes": 8192}
    sender = trainer(fleet, 2, min_receivers=2, config=config, overlap=overlap)
    sides = [replica(fleet, f"replica-{i}", 2, config=config, overlap=overlap) for i in range(2)]
    for version in (1, 2):
        found = exchange(sender, version, *sides)
        assert f"{mode} over gloo: mode='{mode}'" in found["path"]


def test_auto_broadcasts_to_replicas_that_read_the_same(make_fleet: MakeFleet) -> None:
    fleet = make_fleet("nccl")
    sender = trainer(fleet, 2, min_receivers=2)
    found = exchange(sender, 1, *(replica(fleet, f"replica-{i}", 2) for i in range(2)))
    assert "broadcast over gloo: the replicas read the same bytes" in found["path"]
    assert all(side["path"] for side in found["received"])
    sent = sum(side["sent"] for side in found["sent"])
    assert sent == sum(side["nbytes"] for side in found["received"]) // 2


def test_auto_sends_each_its_own_where_the_replicas_differ(make_fleet: MakeFleet) -> None:
    fleet = make_fleet("nccl")
    sender = trainer(fleet, 2, min_receivers=2)
    found = exchange(sender, 1, replica(fleet, "two", 2), replica(fleet, "one", 1))
    assert "p2p over gloo: the replicas read different bytes" in found["path"]
    sent = sum(side["sent"] for side in found["sent"])
    assert sent == sum(side["nbytes"] for side in found["received"])


def test_one_reader_gets_its_own(make_fleet: MakeFleet) -> None:
    fleet = make_fleet("nccl")
    found = exchange(trainer(fleet, 1), 1, replica(fleet, "one", 1))
    assert "p2p over gloo: one inference rank reads" in found["path"]


def disagree(fleet: Fleet, option: str, *calls: Call) -> None:
    for call in calls:
        error = call.error()
        assert error.kind == "TableMismatch", error
        assert option in error.first
        assert error.seconds < 10


@pytest.mark.parametrize(
    ("ours", "theirs", "option"),
    [
        ({"bucket_bytes": 8192}, {"bucket_bytes": 4096}, "bucket_bytes"),
        ({"library": "gloo"}, {}, "library"),
        ({"mode": "p2p"}, {"mode": "broadcast"}, "mode"),
    ],
)
def test_sides_with_other_options_are_told_which(
    make_fleet: MakeFleet, ours: dict, theirs: dict, option: str
) -> None:
    fleet = make_fleet("nccl")
    sender = trainer(fleet, 2, config=ours)
    side = replica(fleet, "other", 2, config=theirs)
    receiving = side.start("receive", version=1)
    sending = sender.start("send", version=1, wait="applied")
    disagree(fleet, option, *sending, *receiving)
    side.close()
    exchange(sender, 2, replica(fleet, "other", 2, workers=side.workers, config=ours))


def test_trainer_ranks_with_other_options_are_told_which(make_fleet: MakeFleet) -> None:
    fleet = make_fleet("nccl")
    workers = [fleet.worker(), fleet.worker()]
    configs = ({}, {"mode": "p2p"})
    sides = [
        start_trainer(fleet, worker, rank, 2, config)
        for rank, (worker, config) in enumerate(zip(workers, configs, strict=True))
    ]
    for call in sides:
        fleet.sessions.add(call.result()["session_id"])
    fleet._senders.extend(workers)
    side = replica(fleet, "one", 1)
    receiving = side.start("receive", version=1)
    sending = Ranks(fleet, workers).start("send", version=1, wait="applied")
    disagree(fleet, "sender rank 1 has mode='p2p', sender rank 0 'auto'", *sending, *receiving)


@pytest.mark.parametrize("moment", ["before it saw the start", "before it heard the route"])
def test_who_insists_on_another_mode_is_told_however_late_it_comes(
    make_fleet: MakeFleet, moment: str
) -> None:
    """The sender gives the version up meanwhile: its reason is heard as its kind."""
    fleet = make_fleet("stepped-nccl")
    sender = fleet.sender(min_receivers=2)
    slow, other = fleet.receiver("slow", config={"mode": "p2p"}), fleet.receiver("other")
    if moment == "before it heard the route":
        slow.first.arm("receiver.begin")
        other.first.arm("receiver.begin")
    receiving = slow.start("receive")
    sending = sender.start("send", version=1, wait="applied")
    slow.first.until_waiting("started")
    if moment == "before it saw the start":
        slow.first.stop()
    receiving_too = other.start("receive")
    disagree(fleet, "mode='p2p'", *sending.calls)
    if moment == "before it saw the start":
        slow.first.resume()
    else:
        slow.first.release("receiver.begin")
        other.first.release("receiver.begin")
    disagree(fleet, "mode='p2p'", *receiving.calls, *receiving_too.calls)
