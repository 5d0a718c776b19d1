"""What ``weightwire plan`` promises is what ranks then prepare."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor

import weightwire
from weightwire.cuts import Cuts
from weightwire.planning import rank_plan, trainer_table
from weightwire.routes import Served
from weightwire.table import Region, TensorTable
from weightwire.targets import WeightTarget
from weightwire.topology import parse_trainer

SHAPES = {
    "layers.0.down": (512, 1024),  # read by columns: large enough for blocks
    "layers.0.norm": (5,),
    "layers.0.up": (1024, 256),
    "layers.1.down": (512, 1024),
    "layers.1.norm": (5,),
    "layers.1.bias": (3,),
}
GROUP_BYTES = 2 << 20
TRAINER = "fsdp=2"


class SecondOfTwo(WeightTarget):
    """Rank 1 of two: half of each matrix, and all of each vector."""

    def __init__(self) -> None:
        self.regions: list[Region] = []
        self.arrived: dict[Region, Tensor] = {}
        self.table: TensorTable | None = None

    @property
    def column_slices(self) -> int:
        return 2

    def plan(self, table: TensorTable) -> Sequence[Region]:
        self.table = table
        self.regions = regions_of(table)
        return self.regions

    def write(self, group: int, tensors: Mapping[Region, Tensor]) -> None:
        for region, tensor in tensors.items():
            self.arrived[region] = tensor.clone()

    def rollback(self, error: BaseException) -> bool:
        return False


def regions_of(table: TensorTable) -> list[Region]:
    cuts = Cuts(table)
    found: list[Region] = []
    for i, entry in enumerate(table.tensors):
        offsets, sizes = [0] * len(entry.shape), list(entry.shape)
        if len(sizes) > 1:
            dim = 1 if entry.name.endswith("down") else 0
            sizes[dim] //= 2
            offsets[dim] = sizes[dim]
        for _, piece in cuts.cut(Region(i, tuple(offsets), tuple(sizes))):
            found.extend(cuts.cut_blocks(piece))
    return found


@pytest.mark.parametrize("direction", ["pull", "push"])
def test_descriptors_are_as_many_as_were_planned(tmp_path, direction):
    given = {name: (shape, torch.float32) for name, shape in SHAPES.items()}
    table = trainer_table(
        given,
        {},
        (),
        parse_trainer(TRAINER),
        GROUP_BYTES,
        is_expert=lambda name: False,
        column_slices=2,
    )
    planned = rank_plan(0, Served(table), regions_of(table), {})
    assert max(entry.blocks for entry in table.tensors) > 1

    values = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    url = f"file://{tmp_path / 'session'}"
    backend = {"backend": "nixl", "direction": direction, "column_blocks": True}
    senders = [None, None]

    def send(rank: int) -> None:
        held: dict[str, object] = {}
        for name, value in values.items():
            local = torch.chunk(value, 2)[rank].clone()
            begin = rank * -(-value.shape[0] // 2)
            offsets = (begin, *(0,) * (value.ndim - 1))
            held[name] = weightwire.LocalShard(local, tuple(value.shape), offsets)
        senders[rank] = weightwire.open_sender(
            backend, session=url, source=held, rank=rank, world_size=2, group_bytes=GROUP_BYTES
        )
        for version in (1, 2):
            senders[rank].send(version, timeout=60)

    threads = [threading.Thread(target=send, args=(rank,)) for rank in (0, 1)]
    target = SecondOfTwo()
    try:
        for thread in threads:
            thread.start()
        with weightwire.open_receiver(
            backend, session=url, target=target, receiver_id="r0", timeout=60
        ) as receiver:
            for version in (1, 2):
                receiver.receive(minimum=version)
            for thread in threads:
                thread.join()
            assert target.table == table, "the planner knows another table than the trainer has"
            movers = [receiver] if direction == "pull" else senders
            prepared = sum(mover._transport.counters.descriptors for mover in movers)
            words = len(senders) if direction == "pull" else 0
            assert prepared == planned.descriptors + words
    finally:
        for thread in threads:
            thread.join()
        for sender in senders:
            if sender is not None:
                sender.close()
    for region, tensor in target.arrived.items():
        value = values[table.tensors[region.tensor].name]
        box = tuple(slice(o, o + n) for o, n in zip(region.offsets, region.sizes, strict=True))
        assert torch.equal(tensor, value[box])
