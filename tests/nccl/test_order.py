"""Nobody waits for somebody who waits for him: ranks that end with each other at other times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

import weightwire
from weightwire.placements import LocalShard
from weightwire.table import Region, TensorTable
from weightwire.targets import WeightTarget

ROWS = {"layers.0.w": 1, "layers.1.w": 4}


class HalfOfTheRows(WeightTarget):
    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.held: dict[str, Tensor] = {}

    def plan(self, table: TensorTable) -> Sequence[Region]:
        self._names = {i: entry.name for i, entry in enumerate(table.tensors)}
        regions = []
        for i, entry in enumerate(table.tensors):
            rows, columns = entry.shape
            begin, end = rows * self._rank // 2, rows * (self._rank + 1) // 2
            regions.append(Region(i, (begin, 0), (end - begin, columns)))
        return regions

    def write(self, group: int, tensors: Mapping[Region, Tensor]) -> None:
        self.held.update({self._names[region.tensor]: t.clone() for region, t in tensors.items()})


def test_a_rank_that_is_done_with_one_owner_goes_on_to_the_next(tmp_path: Path) -> None:
    """Owner 0 is done with rank 1 a group before it is with rank 0, which then waits for
    owner 1, which waits for rank 1: that must not wait for owner 0 to take its credit."""
    values = {
        name: torch.arange(rows * 64, dtype=torch.float32).view(rows, 64) + rows
        for name, rows in ROWS.items()
    }
    cuts = {"layers.0.w": (0, 1, 1), "layers.1.w": (0, 1, 4)}

    def held(rank: int) -> dict[str, LocalShard]:
        return {
            name: LocalShard(value[begin:end], tuple(value.shape), (begin, 0))
            for name, value in values.items()
            for begin, end in [cuts[name][rank : rank + 2]]
            if begin < end
        }

    with ThreadPoolExecutor(4) as pool:
        options = {"world_size": 2, "timeout": 20.0}
        url = f"file://{tmp_path}/session"
        opening = [
            pool.submit(
                weightwire.open_sender, "nccl", session=url, source=held(rank), rank=rank,
                group_bytes=1024, **options,
            )
            for rank in range(2)
        ]  # fmt: skip
        senders = [opened.result() for opened in opening]
        targets = [HalfOfTheRows(rank) for rank in range(2)]
        opening = [
            pool.submit(
                weightwire.open_receiver, "nccl", session=url, target=target,
                receiver_id="replica", rank=rank, **options,
            )
            for rank, target in enumerate(targets)
        ]  # fmt: skip
        receivers = [opened.result() for opened in opening]
        try:
            for version in (1, 2):
                calls = [pool.submit(sender.send, version) for sender in senders]
                calls += [pool.submit(receiver.receive) for receiver in receivers]
                for call in calls:
                    call.result()
            for name, value in values.items():
                arrived = torch.cat([target.held[name] for target in targets])
                assert torch.equal(arrived, value)
        finally:
            closing = [pool.submit(handle.close) for handle in (*receivers, *senders)]
            for call in closing:
                call.result()
