"""Gloo's waits end when the group is ended, here and at the peer."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.distributed import HashStore

from weightwire_nccl.gloo import GlooWire
from weightwire_nccl.wire import Wire, WireBroken, WireLate


@pytest.fixture
def pair():
    """Both ends of a group of two, in one process."""
    store = HashStore()
    wires: dict[int, Wire] = {}

    def form(rank: int) -> None:
        wires[rank] = GlooWire(store, rank, 2, "127.0.0.1", 20.0)

    other = threading.Thread(target=form, args=(1,))
    other.start()
    form(0)
    other.join()
    yield wires[0], wires[1]
    for wire in wires.values():
        wire.abort()
        wire.close()


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


def test_nothing_in_time_is_late(pair):
    left, _ = pair
    with pytest.raises(WireLate):
        left.recv(torch.empty(1, dtype=torch.uint8), 1, 1).wait(0.05)
