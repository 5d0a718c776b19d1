"""Moonshot's checkpoint-engine on the same work, for comparison: its broadcast update.

Each version is registered from the trainer's GPU (it is copied into pinned memory, in a pool
that is kept), the ranks' metadata are gathered, and buckets are broadcast to both GPUs, where
a process of its own copies them into the engine's tensors through an IPC handle.  Its process
group is kept over versions.  The trainer's GPU takes part as checkpoint-engine wants it to:
its copy is handed over there, and dropped.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from gpu_children import Child, Role, processes
from gpu_models import MODELS, State

__all__ = ["ROLES", "measure"]

PATIENCE = 60.0


class ParameterServer(Role):
    """Rank 0 has the trainer's tensors, rank 1 is on the engine's GPU."""

    def open(self, rank: int, port: int) -> None:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "PS_MAX_BUCKET_SIZE_GB": "4"}
        from checkpoint_engine.ps import ParameterServer as Server

        self.rank = rank
        self.server = Server(auto_pg=False, master_addr="127.0.0.1", master_port=port)
        self.server.init_process_group()
        if rank == 0:
            self.state = State(MODELS[self.setup["model"]](), torch.bfloat16, self.device)

    def change(self, seed: int) -> int:
        self.state.change(seed)
        return self.state.digest()

    def update(self, name: str) -> float:
        self.server.store_based_barrier()
        self.sync()
        began = time.perf_counter()
        if self.rank == 0:
            self.server.register_checkpoint(
                name, named_tensors=dict(self.state.tensors), use_shared_memory_pool=True
            )
        else:
            self.server.register_checkpoint(name)
        self.server.gather_metas(name)
        self.server.update(name, self._tell(name))
        seconds = time.perf_counter() - began
        self.server.unregister_checkpoint(name)
        return seconds

    def _tell(self, name: str) -> Callable[[list[tuple[str, str]]], None]:
        """What tells this GPU's engine where its buckets come from."""

        def tell(paths: list[tuple[str, str]]) -> None:
            place = Path(f"{self.setup['store']}-{name}-{self.rank}")
            place.with_suffix(".new").write_text(json.dumps(paths[self.rank][1]))
            place.with_suffix(".new").rename(place)

        return tell


class Worker(Role):
    """What takes the buckets on one GPU; rank 1's is the engine."""

    def open(self, rank: int) -> None:
        self.rank = rank
        if rank == 1:
            self.state = State(MODELS[self.setup["model"]](), torch.bfloat16, self.device)

    def take(self, name: str) -> None:
        import zmq
        from checkpoint_engine.worker import update_weights_from_ipc

        place = Path(f"{self.setup['store']}-{name}-{self.rank}")
        end = time.monotonic() + PATIENCE
        while not place.exists():
            if time.monotonic() > end:
                raise RuntimeError(f"no handle for {name} within {PATIENCE:g} s")
            time.sleep(0.0005)
        handle = json.loads(place.read_text())
        update_weights_from_ipc(zmq.Context.instance(), handle, self.device.index, run=self._load)

    def _load(self, arrived: list[tuple[str, torch.Tensor]]) -> None:
        if self.rank == 1:
            for name, tensor in arrived:
                self.state.tensors[name].copy_(tensor)

    def digest(self) -> int:
        return self.state.digest()


ROLES: dict[str, type[Role]] = {"ps": ParameterServer, "ps_worker": Worker}


def measure(devices: list[str], model: str, repeats: int, work: Path) -> list[float]:
    """Seconds of each update, by the slower rank's clock; the bytes are compared."""
    setup = {"model": model, "store": str(work / "checkpoint-engine")}
    with processes([*devices, *devices], ("ps", "ps", "ps_worker", "ps_worker"), setup) as ranks:
        for rank in (0, 1):
            ranks[rank].start("open", rank=rank, port=23_457)
            ranks[2 + rank].start("open", rank=rank)
        for process in ranks:
            process.answer()
        return [_update(ranks, number) for number in range(repeats + 2)][2:]


def _update(ranks: list[Child], number: int) -> float:
    name = f"version-{number}"
    wanted = ranks[0].ask("change", seed=2000 + number)
    for process in ranks[2:]:
        process.start("take", name=name)
    for process in ranks[:2]:
        process.start("update", name=name)
    seconds = max(float(process.answer()) for process in ranks[:2])
    for process in ranks[2:]:
        process.answer()
    if ranks[3].ask("digest") != wanted:
        raise RuntimeError("checkpoint-engine: the engine holds other bits than were sent")
    return seconds
