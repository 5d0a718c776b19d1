"""One owner is read, another one writes: each has groups of its own."""

from __future__ import annotations

import threading

import pytest
import torch
from nixl_transports import Transports, offer
from process_rig import until

from weightwire.contract import Seal
from weightwire.table import Group, Shard, TensorEntry, TensorTable
from weightwire_nixl.receiver import NixlReceiver
from weightwire_nixl.sender import NixlSender

OWNERS = (0, 1, 1, 0, 1)
"""Of each group, which is one tensor."""
NUMBERS = 64
TABLE = TensorTable(
    world_size=2,
    tensors=tuple(
        TensorEntry(f"w{i}", (NUMBERS,), "float32", (Shard(owner, (0,), (NUMBERS,)),))
        for i, owner in enumerate(OWNERS)
    ),
    groups=tuple(Group((i,)) for i in range(len(OWNERS))),
)


@pytest.fixture
def ends(
    transports: Transports, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[NixlSender], NixlReceiver]:
    """Rank 0 over shared memory, rank 1 over TCP; a receiver with two slots."""
    senders = [transports.sender(TABLE, rank=0)]
    with monkeypatch.context() as patched:
        patched.setenv("UCX_TLS", "tcp")
        senders.append(transports.sender(TABLE, rank=1))
    return senders, transports.receiver(TABLE, overlap=True)


def values(group: int) -> torch.Tensor:
    return torch.arange(group, group + NUMBERS, dtype=torch.float32)


def serve(sender: NixlSender, rank: int) -> None:
    for group in [i for i, owner in enumerate(OWNERS) if owner == rank]:
        slot = sender.slot(group, 4 * NUMBERS)
        assert slot is not None
        held = slot.view(torch.float32)[:NUMBERS]
        held.copy_(values(group))
        sender.put(group, {group: held}, Seal({}, rank))
    sender.finish()


def test_each_groups_owner_is_looked_after(ends: tuple[list[NixlSender], NixlReceiver]) -> None:
    senders, receiver = ends
    version = offer(TABLE, *(sender.describe() for sender in senders))
    for sender in senders:
        sender.begin(version, {"r0": [receiver.describe()]})
    receiver.begin(version)
    assert "pull over CMA" in receiver.path
    assert "push over TCP" in receiver.path
    serving = [
        threading.Thread(target=serve, args=(sender, rank)) for rank, sender in enumerate(senders)
    ]
    for thread in serving:
        thread.start()
    memory: dict[int, torch.Tensor] = {}

    def post(group: int) -> None:
        memory[group] = receiver.slot(group, 4 * NUMBERS).view(torch.float32)[:NUMBERS]
        receiver.post(group, {group: memory[group]})

    post(0)
    post(1)
    for group in range(len(OWNERS)):
        # The thread that pulls rests once all that was posted is there.
        until(lambda: all(receiver.landed(g) for g in list(receiver._flights)), "all landed", 20)
        seals = receiver.fetch(group, {group: memory[group]})
        assert [seal.owner for seal in seals] == [OWNERS[group]]
        assert torch.equal(memory[group], values(group))
        if group + 2 < len(OWNERS):
            post(group + 2)
    receiver.finish()
    for thread in serving:
        thread.join(20)
        assert not thread.is_alive()
