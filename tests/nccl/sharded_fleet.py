"""Sides of sharded trainers and slicing replicas, on the rig's workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from process_rig import Call, Fleet, Worker

SCRIPT = str(Path(__file__).with_name("nccl_sharded.py"))


class Ranks:
    """The ranks of a trainer or of a replica."""

    def __init__(self, fleet: Fleet, workers: list[Worker]) -> None:
        self.fleet = fleet
        self.workers = workers

    def start(self, function: str, **args: Any) -> list[Call]:
        return [start(worker, function, **args) for worker in self.workers]

    def call(self, function: str, **args: Any) -> list[Any]:
        return [call.result() for call in self.start(function, **args)]

    def close(self) -> None:
        for call in [worker.start("close") for worker in self.workers]:
            call.result()


def start(worker: Worker, function: str, **args: Any) -> Call:
    return worker.start("run", script=SCRIPT, function=function, **args)


def start_trainer(
    fleet: Fleet, worker: Worker, rank: int, ranks: int, config: dict[str, Any], **options: Any
) -> Call:
    return start(
        worker,
        "open_trainer",
        rank=rank,
        world=ranks,
        session=fleet.url,
        seed=fleet.seed,
        backend=fleet.choice(**config),
        **options,
    )


def trainer(
    fleet: Fleet,
    ranks: int,
    *,
    workers: list[Worker] | None = None,
    config: dict[str, Any] | None = None,
    **options: Any,
) -> Ranks:
    side = Ranks(fleet, workers or [fleet.worker() for _ in range(ranks)])
    fleet._senders.extend(side.workers)
    calls = [
        start_trainer(fleet, worker, rank, ranks, config or {}, **options)
        for rank, worker in enumerate(side.workers)
    ]
    for call in calls:
        fleet.sessions.add(call.result()["session_id"])
    return side


def replica(
    fleet: Fleet,
    receiver_id: str,
    ranks: int,
    *,
    workers: list[Worker] | None = None,
    config: dict[str, Any] | None = None,
    **options: Any,
) -> Ranks:
    side = Ranks(fleet, workers or [fleet.worker() for _ in range(ranks)])
    calls = [
        start(
            worker,
            "open_reader",
            receiver_id=receiver_id,
            rank=rank,
            ranks=ranks,
            session=fleet.url,
            seed=fleet.seed,
            backend=fleet.choice(**(config or {})),
            **options,
        )
        for rank, worker in enumerate(side.workers)
    ]
    for call in calls:
        call.result()
    return side


def exchange(sender: Ranks, version: int, *replicas: Ranks) -> dict[str, Any]:
    """One version; every rank holds its bytes.  Returns what the two sides say of it."""
    receiving = [call for side in replicas for call in side.start("receive", version=version)]
    sending = sender.start("send", version=version, wait="applied")
    received = [call.result() for call in receiving]
    assert [(r["version"], r["wrong"]) for r in received] == [(version, [])] * len(received)
    sent = [call.result() for call in sending]
    return {"sent": sent, "received": received, "path": sent[0]["path"]}
