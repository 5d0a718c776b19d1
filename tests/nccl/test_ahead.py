"""A group is announced, checked and posted while the payload of the one before travels."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weightwire.contract import Policy, Seal
from weightwire.deadline import Deadline, Watch
from weightwire.errors import PeerLost, TableMismatch, TransferError
from weightwire.table import Group, Region, Shard, TensorEntry, TensorTable
from weightwire_nccl.channels import Channel, Owner, Reader, seal_bound
from weightwire_nccl.epoch import Epoch
from weightwire_nccl.meeting import Server
from weightwire_nccl.pieces import ReadPlan, shards_by_owner
from weightwire_nccl.records import Member, Opening
from weightwire_nccl.staging import Staging
from weightwire_nccl.wire import nothing

GROUPS = 4
TENSORS = [torch.arange(i, i + 64, dtype=torch.int32) for i in range(GROUPS)]
TABLE = TensorTable(
    world_size=1,
    tensors=tuple(
        TensorEntry(f"w{i}", (64,), "int32", (Shard(0, (0,), (64,)),)) for i in range(GROUPS)
    ),
    groups=tuple(Group((i,)) for i in range(GROUPS)),
)
REGIONS = [Region.whole(i, entry) for i, entry in enumerate(TABLE.tensors)]
MEMBERS = (
    Member("sender", True, 0, "a" * 16, ""),
    Member("replica-0", False, 0, "b" * 16, "c" * 32),
)
SECONDS = 20.0


@pytest.fixture
def ends() -> Iterator[SimpleNamespace]:
    """An owner and a reader in a group of two, each with its own threads."""
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
    shards = shards_by_owner(TABLE)[0]
    plan = ReadPlan(TABLE, REGIONS, 1 << 20).channel(shards)
    channels = [Channel(0, (1,), plan, b"\0" * 16)]
    seals = [seal_bound(1)] * GROUPS
    staging = [Staging(torch.device("cpu"), epoch.join) for epoch in epochs]
    owner = Owner(epochs[0], staging[0], channels, shards, seals)
    reader = Reader(epochs[1], staging[1], channels, REGIONS, {0: seals})
    for end in (owner, reader):
        end.start(opening.policy)
    yield SimpleNamespace(owner=owner, reader=reader)
    for epoch in epochs:
        epoch.close()
    server.close()


def send(end: Owner, group: int, tensor: torch.Tensor) -> Any:
    seal = Seal({group: 7 + group}, 0)
    return end.epoch.submit(partial(end.send_group, group, {group: tensor}, seal, nothing))


def fetch(end: Reader, group: int, memory: torch.Tensor) -> Any:
    return end.epoch.submit(partial(end.fetch_group, group, {group: memory}, nothing))


def outcome(job: Any) -> Any:
    assert job.done.wait(SECONDS)
    return job.outcome()


def held_back(end: Owner | Reader) -> Callable[[], None]:
    """Nothing that this end posts from now on is seen to arrive until the result is called."""
    go_on = threading.Event()
    end.epoch.settle_later(lambda: go_on.wait(SECONDS))
    return go_on.set


def test_groups_are_posted_before_those_ahead_of_them_have_arrived(ends) -> None:
    go_on = held_back(ends.reader), held_back(ends.owner)
    memory = [torch.zeros(64, dtype=torch.int32) for _ in range(GROUPS)]
    sends = [send(ends.owner, group, TENSORS[group]) for group in range(GROUPS)]
    fetches = [fetch(ends.reader, group, memory[group]) for group in range(GROUPS)]
    ending = [outcome(job) for job in (*sends, *fetches)]  # posted, each of them
    assert not any(job.done.is_set() for job in ending)
    for let in go_on:
        let()
    assert [outcome(job) for job in ending[GROUPS:]] == [
        [Seal({group: 7 + group}, 0)] for group in range(GROUPS)
    ]
    assert [outcome(job) for job in ending[:GROUPS]] == [None] * GROUPS
    for arrived, sent in zip(memory, TENSORS, strict=True):
        assert torch.equal(arrived, sent)


def test_a_bucket_isnt_packed_again_before_what_it_held_has_left(ends) -> None:
    """Tensors that can't travel as they lie: two groups have a bucket each, the third waits."""
    columns = [torch.stack([tensor, tensor], 1)[:, 0] for tensor in TENSORS]
    memory = [torch.zeros(64, 2, dtype=torch.int32)[:, 1] for _ in range(GROUPS)]
    go_on = held_back(ends.owner)
    sends = [send(ends.owner, group, columns[group]) for group in range(GROUPS)]
    fetches = [fetch(ends.reader, group, memory[group]) for group in range(GROUPS)]
    for job in sends[:2]:
        outcome(job)
    for group in range(2):
        outcome(outcome(fetches[group]))
    assert not sends[2].done.wait(0.1)
    go_on()
    for job in (*sends, *fetches):
        outcome(outcome(job))
    for arrived, sent in zip(memory, TENSORS, strict=True):
        assert torch.equal(arrived, sent)


def test_ends_that_are_at_different_places_are_told(ends) -> None:
    memory = torch.zeros(64, dtype=torch.int32)
    jobs = [send(ends.owner, 0, TENSORS[0]), fetch(ends.reader, 1, memory)]
    for job in jobs:  # whoever sees it first says so to the other
        with pytest.raises((TableMismatch, PeerLost), match="another place"):
            outcome(job)
    with pytest.raises((TableMismatch, PeerLost)):  # the group is of no more use
        outcome(fetch(ends.reader, 0, memory))
    assert not memory.any()


def test_what_fails_to_arrive_ends_what_waits_to_be_posted(ends) -> None:
    """The other side is gone while this one waits for both a payload and an announcement."""
    memory = torch.zeros(64, dtype=torch.int32)
    arriving = fetch(ends.reader, 0, memory)
    ends.owner.epoch.give_up(TransferError("the trainer has had enough"))
    with pytest.raises(TransferError, match="had enough"):
        outcome(arriving)
    with pytest.raises(TransferError, match="had enough"):
        outcome(ends.reader.epoch.settle_later(nothing))
