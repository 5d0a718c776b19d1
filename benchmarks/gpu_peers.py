"""How others bring a model from one GPU to another, for comparison.

* ``per_tensor``: a broadcast by torch's NCCL for each tensor into a fresh tensor, which is
  then copied into the engine's, as TRL and OpenRLHF update vLLM.
* ``vllm_packed``: vLLM's own packed producer and consumer, from its file
  ``vllm/distributed/weight_transfer/packed_tensor.py``, over torch's NCCL; what arrives is
  copied into the engine's tensors.

Neither sends names, agrees on anything or verifies; requests over HTTP or Ray, which they
need for each tensor or update, aren't counted.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from gpu_children import Role
from gpu_models import MODELS, State

__all__ = ["ROLES", "measure"]

_PACKED = "distributed/weight_transfer/packed_tensor.py"


def _packed_tensor_file() -> Path | None:
    """vLLM's file, where vLLM is installed; vLLM itself isn't imported."""
    found = importlib.util.find_spec("vllm")
    places = found.submodule_search_locations if found is not None else None
    files = [Path(place) / _PACKED for place in places or ()]
    return next((file for file in files if file.is_file()), None)


def _packed_tensor() -> ModuleType:
    file = _packed_tensor_file()
    if file is None:
        raise RuntimeError("vLLM isn't installed: its packed engine can't be measured")
    spec = importlib.util.spec_from_file_location("packed_tensor", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Group:
    """torch's default group as vLLM's communicator."""

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        dist.broadcast(tensor, src)


class Peer(Role):
    """A trainer (rank 0) or an engine (rank 1)."""

    def open(self, rank: int) -> None:
        store = dist.FileStore(self.setup["store"], 2)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=2)
        self.rank = rank
        self.state = State(MODELS[self.setup["model"]](), torch.bfloat16, self.device)

    def change(self, seed: int) -> int:
        self.state.change(seed)
        return self.state.digest()

    def digest(self) -> int:
        return self.state.digest()

    def update(self, how: str) -> float:
        """Seconds by this side's clock."""
        dist.barrier()
        self.sync()
        began = time.perf_counter()
        getattr(self, f"_{how}")()
        self.sync()
        return time.perf_counter() - began

    def _per_tensor(self) -> None:
        with torch.no_grad():
            for tensor in self.state.tensors.values():
                if self.rank == 0:
                    dist.broadcast(tensor, 0)
                else:
                    fresh = torch.empty_like(tensor)
                    dist.broadcast(fresh, 0)
                    tensor.copy_(fresh)

    def _vllm_packed(self) -> None:
        packed = _packed_tensor()
        if self.rank == 0:
            packed.packed_nccl_broadcast_producer(
                iter(self.state.tensors.items()), _Group(), 0, lambda item: item[1]
            )
        else:
            packed.packed_nccl_broadcast_consumer(
                self._described(), _Group(), 0, self._load, device=self.device
            )

    def _described(self) -> Iterator[tuple[str, tuple[list[int], torch.dtype]]]:
        for name, tensor in self.state.tensors.items():
            yield name, (list(tensor.shape), tensor.dtype)

    def _load(self, arrived: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in arrived:
            self.state.tensors[name].copy_(tensor)

    def close(self) -> None:
        dist.destroy_process_group()


ROLES: dict[str, type[Role]] = {"peer": Peer}


def measure(children: Any, how: str, repeats: int) -> list[float]:
    """Seconds of each update, by the slower side's clock; the bytes are compared."""
    times = []
    for number in range(repeats + 2):
        wanted = children[0].ask("change", seed=1000 + number)
        for child in children:
            child.start("update", how=how)
        times.append(max(child.answer() for child in children))
        if children[1].ask("digest") != wanted:
            raise RuntimeError(f"{how}: the engine holds other bits than were sent")
    return times[2:]
