"""Trainer ranks that hold shards and inference ranks that read slices; runs in the rig's workers.

Shards are DTensors on a mesh without process groups: nothing here has a default group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import process_worker
import seeded_models as models
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import weightwire
from weightwire.layout import cut_out
from weightwire.sources import WeightSource
from weightwire.table import Region, TensorTable
from weightwire.targets import WeightTarget

SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "embed": ((13, 8), torch.bfloat16),
    "layers.0.wide": ((300, 129), torch.float32),  # 154,800 bytes: many of the smallest buckets
    "layers.0.bias": ((7,), torch.float32),
    "layers.1.columns": ((5, 31), torch.bfloat16),
    "layers.1.scale": ((), torch.float32),
    "layers.2.flat": ((9, 4, 6), torch.float8_e4m3fn),
    "layers.2.steps": ((3,), torch.int64),
    "layers.2.mask": ((11,), torch.bool),
    "nothing": ((0, 4), torch.float32),
}


def full(name: str, version: int, seed: int) -> Tensor:
    shape, dtype = SHAPES[name]
    return models.random_bits(name, version, seed, shape, dtype)


class Sharded(WeightSource):
    """Row shards, column shards and replicas, by turns; uneven, and empty on some ranks."""

    def __init__(self, rank: int, world: int, seed: int) -> None:
        self._mesh = DeviceMesh("cpu", list(range(world)), _init_backend=False, _rank=rank)
        self._rank, self._world, self._seed = rank, world, seed
        self.version = 0

    def tensors(self) -> Mapping[str, Tensor]:
        return {name: self._shard(i, name) for i, name in enumerate(SHAPES)}

    def _shard(self, i: int, name: str) -> Tensor:
        whole = full(name, self.version, self._seed)
        dim = (0, 1, None)[i % 3]
        if self._world == 1 or dim is None or dim >= whole.dim():
            local, placement = whole, Replicate()
        else:
            chunks = whole.view(torch.uint8 if whole.dtype.itemsize == 1 else whole.dtype)
            parts = [part.view(whole.dtype) for part in chunks.chunk(self._world, dim)]
            empty = [0 if d == dim else n for d, n in enumerate(whole.shape)]
            mine = self._rank < len(parts)
            local = parts[self._rank].contiguous() if mine else torch.empty(empty).to(whole.dtype)
            placement = Shard(dim)
        return DTensor.from_local(
            local,
            self._mesh,
            [placement],
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )


class Slices(WeightTarget):
    """One rank of a replica: a slice of each tensor along a dimension, small ones whole."""

    def __init__(self, rank: int, ranks: int, staged: bool) -> None:
        self._rank, self._ranks, self._staged = rank, ranks, staged
        self.held: dict[Region, Tensor] = {}
        self.names: dict[Region, str] = {}

    def plan(self, table: TensorTable) -> Sequence[Region]:
        self.held, self.names = {}, {}
        for i, entry in enumerate(table.tensors):
            dim = i % 2
            begin, end = 0, entry.shape[dim] if dim < len(entry.shape) else 0
            offsets, sizes = [0] * len(entry.shape), list(entry.shape)
            if self._ranks > 1 and dim < len(entry.shape) and len(entry.shape) > 1:
                begin, end = end * self._rank // self._ranks, end * (self._rank + 1) // self._ranks
                offsets[dim], sizes[dim] = begin, end - begin
            region = Region(i, tuple(offsets), tuple(sizes))
            self.held[region] = torch.zeros(sizes, dtype=entry.torch_dtype)
            self.names[region] = entry.name
        return list(self.held)

    takes_pieces = True

    def landing(self, region: Region) -> Tensor | None:
        return None if self._staged else self._view(region)

    def _view(self, region: Region) -> Tensor:
        """Where a piece of one of the planned regions belongs."""
        mine = next(r for r in self.held if r.tensor == region.tensor)
        return cut_out(self.held[mine], region.offsets, region.sizes, mine.offsets)

    def write(self, group: int, tensors: Mapping[Region, Tensor]) -> None:
        process_worker.reach("target.write")
        for region, tensor in tensors.items():
            place = self._view(region)
            if tensor.data_ptr() != place.data_ptr():
                place.copy_(tensor)

    def wrong(self, version: int, seed: int) -> list[str]:
        """Names of the tensors of which this rank doesn't hold its slice, byte for byte."""
        found = []
        for region, tensor in self.held.items():
            cut = full(self.names[region], version, seed)
            for dim, (at, size) in enumerate(zip(region.offsets, region.sizes, strict=True)):
                cut = cut.narrow(dim, at, size)
            if models.raw(cut) != models.raw(tensor):
                found.append(self.names[region])
        return found

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.held.values())


def open_trainer(
    rank: int, world: int, session: str, seed: int, backend: Any, **options: Any
) -> dict[str, Any]:
    source = Sharded(rank, world, seed)
    handle = weightwire.open_sender(
        backend,
        session=session,
        source=source,
        rank=rank,
        world_size=world,
        verify="full",
        **{"group_bytes": 4096, "timeout": 30.0, **options},
    )
    process_worker.MEMBERS["main"] = process_worker.Member(handle, "", source, seed)
    return process_worker._about(handle)


def open_reader(
    receiver_id: str,
    rank: int,
    ranks: int,
    session: str,
    seed: int,
    backend: Any,
    staged: bool = False,
    **options: Any,
) -> dict[str, Any]:
    target = Slices(rank, ranks, staged)
    handle = weightwire.open_receiver(
        backend,
        session=session,
        target=target,
        receiver_id=receiver_id,
        rank=rank,
        world_size=ranks,
        **{"timeout": 30.0, **options},
    )
    process_worker.MEMBERS["main"] = process_worker.Member(handle, "", target, seed)
    return process_worker._about(handle)


def send(version: int, **options: Any) -> dict[str, Any]:
    member = process_worker.MEMBERS["main"]
    member.model.version = version
    with process_worker.timed():
        report = member.handle.send(version, **options)
    transport = member.handle._transport
    return {"path": report.path, "sent": transport.sent_nbytes, "staged": transport.staged_nbytes}


def receive(version: int, **options: Any) -> dict[str, Any]:
    member = process_worker.MEMBERS["main"]
    with process_worker.timed():
        report = member.handle.receive(minimum=version, **options)
    return {
        "version": report.version,
        "path": report.path,
        "wrong": member.model.wrong(version, member.seed),
        "nbytes": member.model.nbytes,
        "staged": member.handle._transport.staged_nbytes,
    }


# ------------------------------------------------------------------ torch's default group


def join_default_group(directory: str, rank: int, world: int) -> None:
    store = Path(directory) / "default"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)


def use_default_group() -> float:
    """What an all-reduce over it gives: the world size, if it is as it was."""
    value = torch.ones(1)
    dist.all_reduce(value)
    return float(value)


def default_group() -> dict[str, Any]:
    """What torch knows of groups."""
    ready = dist.is_initialized()
    return {
        "initialized": ready,
        "size": dist.get_world_size() if ready else 0,
        "backend": dist.get_backend() if ready else "",
        "groups": len(dist.distributed_c10d._world.pg_map),
    }


def leave_default_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
