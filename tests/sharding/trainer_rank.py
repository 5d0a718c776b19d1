"""One rank of a real torch.distributed trainer that sends sharded weights; run as a process.

Arguments: rank, world size, directory, backends.  For each of these, and each layout that
fits the world size, it sends two versions in a session of its own and prints one JSON line
a version.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from layouts import full_values, layouts, model
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import weightwire
from weightwire import LocalShard
from weightwire.sources import WeightSource, as_source
from weightwire.streaming import StreamingSource


def shard_all(built: nn.Module, mesh: DeviceMesh, dim: int | None) -> dict[str, torch.Tensor]:
    """Every tensor with ``dim`` sharded along it, the others replicated."""
    placed = {}
    for name, tensor in built.state_dict().items():
        fits = dim is not None and dim < tensor.dim()
        placed[name] = distribute_tensor(tensor, mesh, [Shard(dim) if fits else Replicate()])
    return placed


def declared(built: nn.Module) -> dict[str, torch.Tensor | LocalShard]:
    """Boxes that no placement describes: uneven rows, and what other ranks have left out."""
    rank, world = dist.get_rank(), dist.get_world_size()
    placed: dict[str, torch.Tensor | LocalShard] = {}
    for number, (name, tensor) in enumerate(built.state_dict().items()):
        if tensor.dim() == 2 and tensor.shape[0] > world:
            edges = [0, 1, 3, tensor.shape[0]]
            begin, end = edges[rank], edges[rank + 1]
            placed[name] = LocalShard(tensor[begin:end], tuple(tensor.shape), (begin, 0))
        elif number % world == rank:
            placed[name] = tensor
    return placed


def fully_sharded(built: nn.Module, mesh: DeviceMesh | None) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in built:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **({} if mesh is None else {"mesh": mesh}))
    return built


def tensor_parallel(built: nn.Module, mesh: DeviceMesh) -> nn.Module:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    return parallelize_module(built, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


class Current(WeightSource):
    """A trainer that makes its sharded model anew for each version."""

    def __init__(self) -> None:
        self.built: nn.Module | dict[str, torch.Tensor | LocalShard] = {}

    def tensors(self) -> Mapping[str, torch.Tensor | LocalShard]:
        return as_source(self.built).tensors()


class Exported:
    """A trainer whose export is a collective: each tensor comes from the rank that holds it."""

    def __init__(self) -> None:
        self.version = 0

    def __call__(self) -> Iterator[tuple[str, torch.Tensor]]:
        buffer = torch.empty(4096, dtype=torch.uint8)  # reused: what was yielded goes stale
        for number, (name, value) in enumerate(full_values(self.version).items()):
            shape, source = value.shape, number % dist.get_world_size()
            raw = buffer[: value.nbytes]
            if dist.get_rank() == source:
                raw.copy_(value.reshape(-1).view(torch.uint8))
            dist.broadcast(raw, source)
            yield name, raw.view(value.dtype).view(shape)
            raw.fill_(0xFF)


def build(layout: str, version: int) -> nn.Module | dict[str, torch.Tensor | LocalShard]:
    world = dist.get_world_size()
    flat = DeviceMesh("cpu", list(range(world)))
    built = model()
    built.load_state_dict(full_values(version))
    match layout:
        case "plain":
            return built
        case "fsdp":
            return fully_sharded(built, None)
        case "rows":
            return shard_all(built, flat, 0)
        case "columns":
            return shard_all(built, flat, 1)
        case "resharded":  # another layout each time
            return shard_all(built, flat, version % 2)
        case "boxes":
            return declared(built)
        case "replicated":
            return shard_all(built, flat, None)
        case "hsdp":
            mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("replicate", "shard"))
            return fully_sharded(built, mesh)
        case "fsdp x tp":
            mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("fsdp", "tp"))
            return fully_sharded(tensor_parallel(built, mesh["tp"]), mesh["fsdp"])
    raise AssertionError(layout)


def send(backend: str, layout: str, directory: Path) -> None:
    current, exported = Current(), Exported()
    source = StreamingSource(exported) if layout == "streamed" else current
    with weightwire.open_sender(
        backend,
        session=(directory / f"{backend} {layout}").as_uri(),
        source=source,
        group=dist.group.WORLD,
        verify="full",
        group_bytes=300,  # less than the largest tensor: it is cut
        timeout=60,
    ) as sender:
        for version in (1, 2):
            exported.version = version
            if layout != "streamed":
                current.built = build(layout, version)
            report = sender.send(version)
            line = {"backend": backend, "layout": layout, "nbytes": report.nbytes}
            print(json.dumps(line), flush=True)


def main() -> None:
    rank, world, directory = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{directory / 'trainer'}", rank=rank, world_size=world
    )
    for backend in sys.argv[4:]:
        for layout in layouts(world, backend):
            send(backend, layout, directory)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
