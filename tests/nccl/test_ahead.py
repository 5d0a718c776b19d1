"""A group is announced, checked and posted while the payload of the one before travels."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from ends_of_two import SECONDS, TwoEnds, outcome, two_ends

from weightwire.contract import Seal
from weightwire.errors import PeerLost, TableMismatch, TransferError
from weightwire.table import Group, Shard, TensorEntry, TensorTable
from weightwire_nccl.channels import Owner, Reader
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


@pytest.fixture
def ends() -> Iterator[TwoEnds]:
    with two_ends(TABLE) as ends:
        yield ends


def send(end: Owner, group: int, tensor: torch.Tensor) -> Any:
    seal = Seal({group: 7 + group}, 0)
    return end.epoch.submit(partial(end.send_group, group, {group: tensor}, seal, nothing))


def fetch(end: Reader, group: int, memory: torch.Tensor) -> Any:
    return end.epoch.submit(partial(end.fetch_group, group, {group: memory}, nothing))


def held_back(ends: TwoEnds, *which: str) -> Callable[[], None]:
    """Nothing that these ends post from now on is seen to arrive until the result is called."""
    go_on = threading.Event()
    ends.held.append(go_on)
    for end in which:
        is_held = threading.Event()

        def hold(is_held: threading.Event = is_held) -> None:
            is_held.set()
            go_on.wait(SECONDS)

        getattr(ends, end).epoch.settle_later(hold)
        assert is_held.wait(SECONDS)
    return go_on.set


def test_groups_are_posted_before_those_ahead_of_them_have_arrived(ends) -> None:
    go_on = held_back(ends, "owner", "reader")
    memory = [torch.zeros(64, dtype=torch.int32) for _ in range(GROUPS)]
    sends = [send(ends.owner, group, TENSORS[group]) for group in range(GROUPS)]
    fetches = [fetch(ends.reader, group, memory[group]) for group in range(GROUPS)]
    ending = [outcome(job) for job in (*sends, *fetches)]  # posted, each of them
    assert not any(job.done.is_set() for job in ending)
    go_on()
    assert [outcome(job) for job in ending[GROUPS:]] == [
        [Seal({group: 7 + group}, 0)] for group in range(GROUPS)
    ]
    assert [outcome(job) for job in ending[:GROUPS]] == [None] * GROUPS
    for arrived, sent in zip(memory, TENSORS, strict=True):
        assert torch.equal(arrived, sent)


def strided(memory: bool = False) -> list[torch.Tensor]:
    """Columns, which can't travel as they lie: the values, or memory for them."""
    if memory:
        return [torch.zeros(64, 2, dtype=torch.int32)[:, 1] for _ in range(GROUPS)]
    return [torch.stack([tensor, tensor], 1)[:, 0] for tensor in TENSORS]


@pytest.mark.parametrize("which", ["owner", "reader"])
def test_a_bucket_isnt_used_again_before_what_it_held_is_through(ends, which) -> None:
    """Two groups have a bucket each; the third waits where nothing is seen to settle."""
    memory = strided(memory=True)
    go_on = held_back(ends, which)
    sends = [send(ends.owner, group, tensor) for group, tensor in enumerate(strided())]
    fetches = [fetch(ends.reader, group, memory[group]) for group in range(GROUPS)]
    held, free = (sends, fetches) if which == "owner" else (fetches, sends)
    for job in held[:2]:
        outcome(job)
    for job in free[:2]:
        outcome(outcome(job))
    assert not held[2].done.wait(0.1)
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
    """One thread waits for a payload that fails, the other for an announcement."""
    first, second = (torch.zeros(64, dtype=torch.int32) for _ in range(2))
    held_back(ends, "owner")
    send(ends.owner, 0, TENSORS[0])
    outcome(outcome(fetch(ends.reader, 0, first)))
    waiting = fetch(ends.reader, 1, second)

    def fail() -> None:
        raise TransferError("it didn't arrive")

    with pytest.raises(TransferError, match="didn't arrive"):
        outcome(ends.reader.epoch.settle_later(fail))
    with pytest.raises(TransferError, match="didn't arrive"):
        outcome(waiting)


def test_who_gives_up_is_heard_though_its_other_thread_is_busy(ends) -> None:
    held_back(ends, "reader")
    sending = send(ends.owner, 0, TENSORS[0])
    ends.reader.epoch.give_up(TransferError("the engine has had enough"))
    with pytest.raises(PeerLost, match="had enough"):
        outcome(sending)


def test_closing_with_work_under_way_ends_both_threads(ends) -> None:
    """One has nothing to post, and the other waits for a message that never comes."""
    epoch = ends.reader.epoch
    taken = torch.empty(8, dtype=torch.uint8)
    work = outcome(epoch.submit(lambda: epoch.control.recv(taken, 0, 77)))
    waiting = epoch.settle_later(partial(epoch.complete, work, 0))
    assert not waiting.done.wait(0.1)
    epoch.close()
    with pytest.raises((TransferError, PeerLost), match="closed its end"):
        outcome(waiting)
    assert epoch._posting.join(SECONDS)
    assert epoch._arriving.join(SECONDS)
    ends.owner.epoch.close()  # nothing is under way there
    assert ends.owner.epoch._posting.join(SECONDS)
    assert ends.owner.epoch._arriving.join(SECONDS)


def test_an_error_that_cant_be_told_is_an_error_still(ends) -> None:
    def fail() -> None:
        raise TransferError("a name with a surrogate: \ud800")

    job = ends.reader.epoch.submit(fail)
    with pytest.raises(TransferError, match="surrogate"):
        outcome(job)
