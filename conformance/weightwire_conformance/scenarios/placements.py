"""Trainers whose tensors are cut over their ranks, replicas that hold all or a part of each."""

from __future__ import annotations

from typing import Any

from weightwire_conformance.rig import Fleet
from weightwire_conformance.rig.placements import PRELOAD
from weightwire_conformance.rig.worker import gather
from weightwire_conformance.scenario import scenario

__all__: list[str] = []

_TRAINERS = {
    "rows": (2, 3, 4),
    "columns": (2, 3),
    "replicated": (2, 3),
    "some-plain": (3,),
    "hybrid": (4,),
    "rows-then-columns": (4,),
    "columns-then-rows": (4,),
    "rows-twice": (4,),
}
_REPLICAS: dict[str, dict[str, Any]] = {
    "one-rank": {"ranks": 1},
    "two-ranks": {"ranks": 2},
    "two-ranks-of-rows": {"ranks": 2, "holds": "rows"},
    "two-ranks-of-columns": {"ranks": 2, "holds": "columns"},
}


@scenario(
    imports=PRELOAD,
    cases={
        f"{placement}-of-{trainers}-to-{name}": {
            "placement": placement,
            "trainers": trainers,
            **replica,
        }
        for placement, sizes in _TRAINERS.items()
        for trainers in sizes
        for name, replica in _REPLICAS.items()
    },
)
def uneven_shards_arrive_whole(
    fleet: Fleet, placement: str, trainers: int, ranks: int, holds: str | None = None
) -> None:
    """DTensors over a real process group; each byte is sent by one rank."""
    sender = fleet.sender("uneven", ranks=trainers, placement=placement, group_bytes=256)
    replica = fleet.receiver(model="uneven", ranks=ranks, holds=holds)
    for version in (1, 2):
        sending = sender.start("send", version=version, wait="applied")
        receiving = replica.start("receive", minimum=version)
        reports = gather(sending, receiving)[0]
        replica.must_hold(version)
        assert sum(report["nbytes"] for report in reports) == sum(sender.ask("sizes"))
