"""Point-to-point and broadcast: who chooses, why, and that the bytes are the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from process_rig import Fleet
from sharded_fleet import exchange, replica, trainer

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
    side = replica(fleet, "other", 1, config=theirs)
    receiving = side.start("receive", version=1)
    sending = sender.start("send", version=1, wait="applied")
    for call in (*sending, *receiving):
        error = call.error()
        assert "TableMismatch" in error.kinds, error
        assert option in error.message
        assert error.seconds < 10
    side.close()
    exchange(sender, 2, replica(fleet, "other", 1, workers=side.workers, config=ours))
