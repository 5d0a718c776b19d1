"""Gloo's waits end when the group is ended, here and at the peer."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch.distributed import HashStore

from weightwire_nccl.gloo import GlooWire
from weightwire_nccl.wire import Wire, WireBroken, WireLate


def form(size: int, seconds: float) -> dict[int, Wire]:
    """All ends of a group, in one process."""
    store = HashStore()
    wires: dict[int, Wire] = {}

    def come(rank: int) -> None:
        wires[rank] = GlooWire(store, rank, size, "127.0.0.1", seconds)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wires


def end(wires: dict[int, Wire]) -> None:
    for wire in wires.values():
        wire.abort()
        wire.close()


@pytest.fixture
def pair():
    wires = form(2, seconds=20.0)
    yield wires[0], wires[1]
    end(wires)


def test_messages_of_a_tag_stay_in_order(pair):
    left, right = pair
    sent = [left.send(torch.full((8,), i, dtype=torch.uint8), 1, 3) for i in range(4)]
    for i in range(4):
        got = torch.empty(8, dtype=torch.uint8)
        right.recv(got, 0, 3).wait(10)
        assert got.tolist() == [i] * 8
    for work in sent:
        work.wait(10)


@pytest.mark.parametrize("operation", ["recv", "send", "broadcast"])
def test_an_abort_ends_what_waits_on_both_sides(pair, operation):
    left, right = pair
    large = torch.zeros(32 << 20, dtype=torch.uint8)  # more than the kernel takes at once
    waits = {
        "recv": lambda: left.recv(large, 1, 1),
        "send": lambda: left.send(large, 1, 1),
        "broadcast": lambda: left.broadcast(large, 0),
    }
    errors: list[BaseException] = []

    def wait(work, seconds: float) -> None:
        try:
            work.wait(seconds)
        except WireBroken as error:
            errors.append(error)

    theirs = right.recv(torch.empty(1, dtype=torch.uint8), 0, 7)
    threads = [
        threading.Thread(target=wait, args=(waits[operation](), 100)),
        threading.Thread(target=wait, args=(theirs, 100)),
    ]
    for thread in threads:
        thread.start()
    threads[0].join(0.2)
    assert threads[0].is_alive()
    left.abort()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert len(errors) == 2
    assert not any(isinstance(error, WireLate) for error in errors)
    with pytest.raises(WireBroken):
        left.send(large, 1, 1)


def test_a_broadcast_waits_longer_than_forming_may_take() -> None:
    wires = form(2, seconds=1.0)
    try:
        works = [wires[0].broadcast(torch.full((1 << 20,), 7, dtype=torch.uint8), 0)]
        time.sleep(1.5)
        got = torch.zeros(1 << 20, dtype=torch.uint8)
        works.append(wires[1].broadcast(got, 0))
        for work in works:
            work.wait(10)
        assert int(got.min()) == 7
    finally:
        end(wires)


def test_an_abort_ends_what_waits_for_the_living_beside_one_that_is_gone() -> None:
    wires = form(3, seconds=20.0)
    try:
        waiting = wires[0].recv(torch.empty(1, dtype=torch.uint8), 2, 1)
        wires[1].abort()
        with pytest.raises(WireBroken):
            wires[0].recv(torch.empty(1, dtype=torch.uint8), 1, 1).wait(10)
        wires[0].abort()
        began = time.monotonic()
        with pytest.raises(WireBroken):
            waiting.wait(10)
        assert time.monotonic() - began < 5
    finally:
        end(wires)


def test_nothing_in_time_is_late(pair):
    left, _ = pair
    with pytest.raises(WireLate):
        left.recv(torch.empty(1, dtype=torch.uint8), 1, 1).wait(0.05)
