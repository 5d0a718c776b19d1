"""The group is the backend's own: torch's default group is neither used nor disturbed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from process_rig import Fleet
from sharded_fleet import Ranks, exchange, replica, start, trainer

MakeFleet = Callable[..., Fleet]


def join(ranks: Ranks, directory: str) -> None:
    world = len(ranks.workers)
    calls = [
        start(worker, "join_default_group", directory=directory, rank=rank, world=world)
        for rank, worker in enumerate(ranks.workers)
    ]
    for call in calls:
        call.result()


@pytest.mark.parametrize("situation", ["without", "with", "after"])
def test_the_default_group_is_left_alone(make_fleet: MakeFleet, situation: str) -> None:
    """Without a default group, with one in each world, and after their destruction."""
    fleet = make_fleet("nccl")
    trainers = Ranks(fleet, [fleet.worker() for _ in range(2)])
    engines = Ranks(fleet, [fleet.worker() for _ in range(2)])
    if situation != "without":
        for name, ranks in (("trainers", trainers), ("engines", engines)):
            directory = fleet.directory / name
            directory.mkdir()
            join(ranks, str(directory))
    if situation == "after":
        trainers.call("leave_default_group")
        engines.call("leave_default_group")
    before = [trainers.call("default_group"), engines.call("default_group")]
    assert {known["initialized"] for side in before for known in side} == {situation == "with"}
    sender = trainer(fleet, 2, workers=trainers.workers)
    side = replica(fleet, "replica-0", 2, workers=engines.workers)
    for version in (1, 2):
        exchange(sender, version, side)
        if situation == "with":
            assert trainers.call("use_default_group") == [2.0, 2.0]
            assert engines.call("use_default_group") == [2.0, 2.0]
    assert [trainers.call("default_group"), engines.call("default_group")] == before
    side.close()
    sender.close()
    assert [trainers.call("default_group"), engines.call("default_group")] == before
    trainers.call("leave_default_group")
    engines.call("leave_default_group")


def test_the_group_lasts_while_its_members_do(make_fleet: MakeFleet) -> None:
    """It is formed when the roster has changed, and the report says what that cost."""
    fleet = make_fleet("nccl")
    sender = trainer(fleet, 2)
    first = replica(fleet, "first", 1)
    assert "group of 3 formed in" in exchange(sender, 1, first)["path"]
    assert "group of 3 kept" in exchange(sender, 2, first)["path"]
    second = replica(fleet, "second", 2)
    found = exchange(sender, 3, first, second)
    assert "group of 5 formed in" in found["path"]
    assert all("group of 5 formed in" in side["path"] for side in found["received"])
    assert "group of 5 kept" in exchange(sender, 4, first, second)["path"]
    first.close()
    assert "group of 4 formed in" in exchange(sender, 5, second)["path"]
    again = replica(fleet, "first", 1, workers=first.workers)
    assert "group of 5 formed in" in exchange(sender, 6, again, second)["path"]


@pytest.mark.soak
def test_a_group_formed_anew_fifty_times_leaves_nothing(make_fleet: MakeFleet) -> None:
    fleet = make_fleet("nccl")
    sender = trainer(fleet, 2)
    stays = replica(fleet, "stays", 1)
    workers = [fleet.worker()]
    before: list[dict] = []
    for version in range(1, 51):
        comes = replica(fleet, "comes", 1, workers=workers)
        exchange(sender, version, stays, comes)
        comes.close()
        if version == 10:
            before = [worker.call("usage") for worker in (*sender.workers, *stays.workers)]
    after = [worker.call("usage") for worker in (*sender.workers, *stays.workers)]
    for then, now in zip(before, after, strict=True):
        assert (now["threads"], now["fds"]) == (then["threads"], then["fds"])
        assert now["rss"] - then["rss"] < 8 << 20
