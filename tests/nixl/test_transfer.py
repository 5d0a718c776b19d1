"""What the backend does when nothing goes wrong: paths, preparation, signals, elasticity."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from nixl_rig import WAYS, NixlFleet, Way, exchange, ucx_took
from process_rig import Side

MakeFleet = Callable[..., NixlFleet]


def prepared(*sides: Side) -> list[list[int]]:
    return [found["prepared"] for side in sides for found in side.call("nixl")]


def test_the_path_that_ucx_takes_is_the_one_reported(make_fleet: MakeFleet, way: Way) -> None:
    fleet = make_fleet(way)
    sender = fleet.sender(model="big", group_bytes=1 << 20)
    replica = fleet.receiver(model="big")
    receiving = replica.start("receive")
    sent = sender.send(1, wait="applied")[0]
    received = receiving.results()[0]
    assert replica.holds(1) == 1
    expected = f"{'push' if way.push else 'pull'} over {way.path}: "
    assert expected in sent["path"]
    assert expected in received["path"]
    mover = sender if way.push else replica
    took = ucx_took(mover.first, way.push)
    assert took, "UCX says nothing about the operation: was another one used?"
    wanted = "cma" if way.path == "CMA" else "tcp"
    assert all(wanted in transport for transport in took), took


def exchange_among(fleet: NixlFleet, trainers: int, replicas: int, ranks: int) -> None:
    sender = fleet.sender(ranks=trainers, min_receivers=replicas)
    receivers = [fleet.receiver(f"replica-{i}", ranks=ranks) for i in range(replicas)]
    for version in (1, 2):
        exchange(sender, version, *receivers)


@pytest.mark.parametrize(("trainers", "replicas", "ranks"), [(2, 2, 2), (4, 1, 1)])
@pytest.mark.parametrize("way", [WAYS[0], WAYS[1]], ids=str)
def test_trainers_and_replicas_of_any_size(
    make_fleet: MakeFleet, way: Way, trainers: int, replicas: int, ranks: int
) -> None:
    exchange_among(make_fleet(way), trainers, replicas, ranks)


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("trainers", [1, 2, 3, 4])
def test_every_size_of_trainers_and_replicas(
    make_fleet: MakeFleet, way: Way, trainers: int, replicas: int, ranks: int
) -> None:
    exchange_among(make_fleet(way), trainers, replicas, ranks)


def test_the_data_path_asks_the_store_for_nothing(make_fleet: MakeFleet, way: Way) -> None:
    fleet = make_fleet(way)
    sender, replica = fleet.sender(), fleet.receiver()
    for side in (sender, replica):
        side.call("watch_store")
    for version in (1, 2, 3):
        exchange(sender, version, replica)
    assert sender.ask("store_operations") == []
    assert replica.ask("store_operations") == []


def stays_prepared(fleet: NixlFleet, versions: int, overlap: bool) -> None:
    sender, early = fleet.sender(overlap=overlap), fleet.receiver("early", overlap=overlap)
    for version in (1, 2):
        exchange(sender, version, early)
    before, senders = prepared(early), prepared(sender)
    for version in range(3, versions + 1):
        exchange(sender, version, early)
    assert prepared(early) == before
    assert prepared(sender) == senders
    joins = fleet.receiver("joins", overlap=overlap)
    for version in (versions + 1, versions + 2):
        exchange(sender, version, early, joins)
    assert prepared(early) == before, "a join changed what the others had prepared"


@pytest.mark.parametrize("overlap", [False, True], ids=["one-slot", "two-slots"])
@pytest.mark.parametrize("way", [WAYS[0], WAYS[1]], ids=str)
def test_preparation_is_done_once_and_joins_leave_it_alone(
    make_fleet: MakeFleet, way: Way, overlap: bool
) -> None:
    stays_prepared(make_fleet(way), 8, overlap)


@pytest.mark.soak
@pytest.mark.parametrize("overlap", [False, True], ids=["one-slot", "two-slots"])
def test_preparation_is_constant_over_fifty_versions(
    make_fleet: MakeFleet, way: Way, overlap: bool
) -> None:
    stays_prepared(make_fleet(way), 50, overlap)


@pytest.mark.parametrize("way", [WAYS[0], WAYS[1]], ids=str)
def test_live_tensors_are_served_without_staging(make_fleet: MakeFleet, way: Way) -> None:
    fleet = make_fleet(way)
    fleet.backend = "nixl"  # the stepped one copies what it hands on
    config = {"zero_copy": True}
    sender, replica = fleet.sender(config=config), fleet.receiver(config=config)
    for version in (1, 2):
        exchange(sender, version, replica)
    before = prepared(sender, replica)
    exchange(sender, 3, replica)
    assert prepared(sender, replica) == before
    sender.call("replace_storage", version=4)  # the trainer's tensors moved
    exchange(sender, 4, replica)
    exchange(sender, 5, replica)


def test_an_owner_that_nobody_reads_from_waits_for_nobody(make_fleet: MakeFleet, way: Way) -> None:
    """More trainer ranks than tensors: some serve nothing, and some nothing of a group."""
    fleet = make_fleet(way)
    sender = fleet.sender(ranks=3, model="scalars")
    replica = fleet.receiver(model="scalars")
    exchange(sender, 1, replica)
    exchange(sender, 2, replica)


def comes_and_goes(fleet: NixlFleet, joins: int) -> None:
    sender, stays = fleet.sender(), fleet.receiver("stays")
    exchange(sender, 1, stays)
    comes = None
    before = None
    kept = None
    for turn in range(joins):
        workers = comes.workers if comes is not None else ()
        comes = fleet.receiver("comes", workers=workers)
        exchange(sender, turn + 2, stays, comes)
        comes.close()
        if turn == joins // 5:
            before = sender.ask("usage"), sender.ask("nixl")["peers"]
            kept = prepared(stays)
    assert before is not None
    after = sender.ask("usage"), sender.ask("nixl")["peers"]
    assert after[1] == before[1]
    assert len(after[0]["threads"]) == len(before[0]["threads"])
    assert after[0]["fds"] <= before[0]["fds"]
    assert after[0]["rss"] <= before[0]["rss"] + (8 << 20)
    assert prepared(stays) == kept


def test_receivers_that_come_and_go_leave_nothing(make_fleet: MakeFleet) -> None:
    comes_and_goes(make_fleet(), 6)


@pytest.mark.soak
def test_fifty_joins_and_leaves_leave_nothing(make_fleet: MakeFleet, way: Way) -> None:
    comes_and_goes(make_fleet(way), 50)
