"""``release_buffers``: memory goes between versions, and comes again with the next one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from process_rig import Fleet, Side, exchange

MakeFleet = Callable[..., Fleet]

GROUP = 16 << 20  # all of the model "huge", in any dtype
BACKENDS = ["memory", "filesystem", "nccl", "nixl"]


def released(side: Side) -> list[int]:
    """By rank, the bytes of resident memory that went."""
    found = side.call("release_buffers")
    assert not any(each["left"] for each in found)
    return [each["before"] - each["after"] for each in found]


@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_falls_and_the_next_version_arrives_bit_for_bit(
    make_fleet: MakeFleet, backend: str
) -> None:
    fleet = make_fleet(backend)
    # These send what needs no cast from where it lies, and hold nothing then.
    casts = {"wire_dtype": "bfloat16"} if backend in ("filesystem", "nccl") else {}
    sender = fleet.sender(model="huge-master" if casts else "huge", group_bytes=GROUP, **casts)
    replica = fleet.receiver(model="huge-rounded" if casts else "huge", staged=True)
    exchange(sender, 1, replica)
    assert min(released(sender)) > GROUP * 3 // 4
    exchange(sender, 2, replica)
    # What memory's receivers hold is the sender's.
    if backend != "memory":
        assert min(released(replica)) > GROUP * 3 // 4
    else:
        released(replica)
    exchange(sender, 3, replica)
    released(replica)
    released(sender)
    released(sender)  # nothing is left to go
    exchange(sender, 4, replica)
    exchange(sender, 5, replica)


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_rank_releases_for_itself(make_fleet: MakeFleet, backend: str) -> None:
    fleet = make_fleet(backend)
    sender = fleet.sender(ranks=2)
    early, late = fleet.receiver(ranks=2), fleet.receiver("late", open_now=False)
    sender.workers[0].call("release_buffers")  # before the first version
    exchange(sender, 1, early)
    sender.workers[1].call("release_buffers")
    early.workers[1].call("release_buffers")
    exchange(sender, 2, early)
    sender.workers[0].call("release_buffers")
    exchange(sender, 3, early, late.open())


def test_nccl_gives_its_buckets_back(make_fleet: MakeFleet) -> None:
    fleet = make_fleet("nccl")
    sender, replica = fleet.sender(ranks=2), fleet.receiver()
    exchange(sender, 1, replica)
    found = [each for side in (sender, replica) for each in side.call("release_buffers")]
    assert any(each["staged"] for each in found)
    assert not any(each["left"] for each in found)
    exchange(sender, 2, replica)


@pytest.mark.parametrize("backend", BACKENDS)
def test_amid_a_version_it_is_refused_by_name(make_fleet: MakeFleet, backend: str) -> None:
    fleet = make_fleet(backend)
    sender, replica = fleet.sender(), fleet.receiver()
    sending = sender.start("send", version=1, wait="applied")
    assert replica.call("begin") == [1]
    error = replica.first.start("release_buffers").error()
    assert error.kind == "HandleError"
    assert "amid version 1" in error.first
    assert "commit() or abort() it first" in error.first
    busy = sender.first.start("release_buffers", now=True).error()
    assert busy.kind == "HandleError"
    assert "busy with another call" in busy.first
    replica.call("fetch")
    replica.call("commit")
    sending.results()
    assert replica.holds(1) == 1
    replica.call("release_buffers")
    exchange(sender, 2, replica)
    sender.close()
    assert "closed" in sender.first.start("release_buffers").error().first


def test_pages_that_readers_have_mapped_go_too(make_fleet: MakeFleet) -> None:
    fleet = make_fleet("memory")
    sender, replica = fleet.sender(model="huge", group_bytes=GROUP), fleet.receiver(model="huge")
    exchange(sender, 1, replica)
    before = replica.call("usage")[0]["rss"]
    sender.call("release_buffers")
    assert before - replica.call("usage")[0]["rss"] > GROUP * 3 // 4
    assert len(list(Path("/dev/shm").glob(f"weightwire-{sender.about[0]['session_id']}-s*"))) == 0
    exchange(sender, 2, replica)
