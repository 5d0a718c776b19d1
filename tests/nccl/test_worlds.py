"""Sharded trainers and slicing replicas of many sizes: every byte arrives, none twice."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
from process_rig import Fleet
from sharded_fleet import exchange, replica, trainer

MakeFleet = Callable[..., Fleet]

WORLDS = [(1, (2,)), (2, (1, 1, 1)), (4, (2, 1))]
EVERY_WORLD = [
    (trainers, (ranks,) * replicas)
    for trainers, replicas, ranks in itertools.product((1, 2, 4), (1, 2, 3), (1, 2))
]


def check_world(fleet: Fleet, trainers: int, replicas: Sequence[int]) -> None:
    config = {"bucket_bytes": 4096}
    sender = trainer(fleet, trainers, min_receivers=len(replicas), config=config)
    sides = [
        replica(fleet, f"replica-{i}", ranks, config=config, staged=bool(i % 2))
        for i, ranks in enumerate(replicas)
    ]
    for version in (1, 2):
        found = exchange(sender, version, *sides)
        sent = sum(side["sent"] for side in found["sent"])
        read = sum(side["nbytes"] for side in found["received"])
        if "p2p" in found["path"]:
            assert sent == read, "point-to-point, just the plan's bytes travel"
        else:
            assert sent == read // len(replicas), "a broadcast sends each byte once"
        for side in (*found["sent"], *found["received"]):
            assert side["staged"] <= 2 * 4096


@pytest.mark.parametrize(("trainers", "replicas"), WORLDS)
def test_every_slice_arrives(
    make_fleet: MakeFleet, trainers: int, replicas: tuple[int, ...]
) -> None:
    check_world(make_fleet("nccl"), trainers, replicas)


@pytest.mark.soak
@pytest.mark.parametrize(("trainers", "replicas"), EVERY_WORLD)
def test_every_slice_arrives_in_every_world(
    make_fleet: MakeFleet, trainers: int, replicas: tuple[int, ...]
) -> None:
    check_world(make_fleet("nccl"), trainers, replicas)
