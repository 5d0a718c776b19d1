"""An owner and a reader in a group of two over Gloo, each with its own threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from weightwire.contract import Policy
from weightwire.deadline import Deadline, Watch
from weightwire.table import Region, TensorTable
from weightwire_nccl.channels import Channel, Owner, Reader, seal_bound
from weightwire_nccl.epoch import Epoch
from weightwire_nccl.meeting import Server
from weightwire_nccl.pieces import ReadPlan, shards_by_owner
from weightwire_nccl.records import Member, Opening
from weightwire_nccl.staging import Staging

__all__ = ["SECONDS", "TwoEnds", "outcome", "two_ends"]

SECONDS = 20.0
MEMBERS = (
    Member("sender", True, 0, "a" * 16, ""),
    Member("replica-0", False, 0, "b" * 16, "c" * 32),
)


@dataclass
class TwoEnds:
    """Attributes:
    held: set when both end, so that nothing a test holds back outlives it.
    """

    owner: Owner
    reader: Reader
    held: list[threading.Event] = field(default_factory=list)


@contextlib.contextmanager
def two_ends(table: TensorTable, bucket_bytes: int = 1 << 20) -> Iterator[TwoEnds]:
    """The reader wants the whole of every tensor."""
    regions = [Region.whole(i, entry) for i, entry in enumerate(table.tensors)]
    server = Server("127.0.0.1")
    opening = Opening(Policy(1, 1), epoch="group", generation=1, members=MEMBERS)
    epochs = []
    for _ in MEMBERS:
        watch = Watch()
        watch.start(Deadline(SECONDS))
        epochs.append(Epoch(watch, "127.0.0.1", (server.host, server.port), None))
    entering = [
        epoch.submit(partial(epoch.enter, opening, member))
        for epoch, member in zip(epochs, MEMBERS, strict=True)
    ]
    for epoch, job in zip(epochs, entering, strict=True):
        epoch.wait(job, "member")
    shards = shards_by_owner(table)[0]
    channels = [
        Channel(0, (1,), ReadPlan(table, regions, bucket_bytes).channel(shards), b"\0" * 16)
    ]
    seals = [seal_bound(len(held)) for held in shards]
    staging = [Staging(torch.device("cpu"), epoch.join) for epoch in epochs]
    owner = Owner(epochs[0], staging[0], channels, shards, seals)
    reader = Reader(epochs[1], staging[1], channels, regions, {0: seals})
    for end in (owner, reader):
        end.start(opening.policy)
    ends = TwoEnds(owner, reader)
    try:
        yield ends
    finally:
        for go_on in ends.held:
            go_on.set()
        for epoch in epochs:
            epoch.close()
        server.close()


def outcome(job: Any) -> Any:
    """What a job returned, or its error raised."""
    assert job.done.wait(SECONDS)
    return job.outcome()
