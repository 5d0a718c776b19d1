"""A group's small messages go out while the payload of the group before is on its way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gloo_wires import end, form

from weightwire.contract import Policy, Seal
from weightwire.errors import TableMismatch
from weightwire.table import Group, Region, Shard, TensorEntry, TensorTable
from weightwire_nccl.channels import Channel, Owner, Reader, Sent, Wanted, seal_bound
from weightwire_nccl.pieces import ReadPlan, shards_by_owner
from weightwire_nccl.staging import Staging
from weightwire_nccl.wire import Wire, nothing

GROUPS = 3
TENSORS = [torch.arange(i, i + 64, dtype=torch.int32) for i in range(GROUPS)]
TABLE = TensorTable(
    world_size=1,
    tensors=tuple(TensorEntry(f"w{i}", (64,), "int32", (Shard(0, (0,), (64,)),)) for i in range(3)),
    groups=tuple(Group((i,)) for i in range(GROUPS)),
)
REGIONS = [Region.whole(i, entry) for i, entry in enumerate(TABLE.tensors)]


class Place:
    """What an end needs of its group: a real one of two threads."""

    def __init__(self, wire: Wire, rank: int) -> None:
        self.control = self.payload = wire
        self.rank, self.generation, self.device = rank, 1, torch.device("cpu")
        self.members = ("the owner", "the reader")

    @contextlib.contextmanager
    def translated(self, *peers: int) -> Iterator[None]:
        yield

    def complete(self, work: Any, *peers: int, meanwhile: Callable[[], None] = nothing) -> None:
        work.wait(20, meanwhile)


@pytest.fixture
def ends() -> Iterator[SimpleNamespace]:
    wires = form(2, seconds=20.0)
    shards = shards_by_owner(TABLE)[0]
    plan = ReadPlan(TABLE, REGIONS, 1 << 20).channel(shards)
    channel = [Channel(0, (1,), plan, b"\0" * 16)]
    seals = [seal_bound(1)] * GROUPS
    staging = [Staging(torch.device("cpu"), 1 << 20) for _ in (0, 1)]
    owner = Owner(Place(wires[0], 0), staging[0], channel, shards, seals)  # type: ignore[arg-type]
    reader = Reader(Place(wires[1], 1), staging[1], channel, REGIONS, {0: seals})  # type: ignore[arg-type]
    for side in (owner, reader):
        side.start(Policy(1, 1, 1))
    yield SimpleNamespace(owner=owner, reader=reader)
    end(wires)


def on_threads(*works: Callable[[], Any]) -> list[Any]:
    """What each returned or raised; their waits end by themselves."""
    with ThreadPoolExecutor(len(works)) as pool:
        calls = [pool.submit(work) for work in works]
    return [call.exception() or call.result() for call in calls]


def sent(group: int) -> Sent:
    return Sent(group, {group: TENSORS[group]}, Seal({group: 7 + group}, 0), lambda: None)


def wanted(group: int) -> Wanted:
    return Wanted(group, {group: torch.zeros(64, dtype=torch.int32)}, lambda: None)


def test_what_is_given_meanwhile_is_introduced_before_the_group_ends(ends) -> None:
    gives, wants = ([of(group) for group in range(GROUPS)] for of in (sent, wanted))
    sends = [ends.owner.give(give) for give in gives[:2]]
    fetches = [ends.reader.want(want) for want in wants[:2]]
    assert (gives[1].asked, wants[1].framed) == (None, None)
    for group in range(GROUPS):
        if group + 2 < GROUPS:  # comes only now
            sends.append(ends.owner.give(gives[group + 2]))
            fetches.append(ends.reader.want(wants[group + 2]))
        _, seals = on_threads(sends[group], fetches[group])
        assert seals == [Seal({group: 7 + group}, 0)]
        assert torch.equal(wants[group].memory[group], TENSORS[group])
        for later in range(group + 1, min(group + 2, GROUPS)):
            assert gives[later].asked
            assert wants[later].framed
            assert not wants[later].memory[later].any()  # announced, and not sent


def test_ends_that_are_at_different_places_are_told(ends) -> None:
    said = on_threads(ends.owner.give(sent(0)), ends.reader.want(wanted(1)))
    assert [type(error) for error in said] == [TableMismatch, TableMismatch]
    assert "another place" in str(said[0])
