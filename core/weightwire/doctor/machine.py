"""torch on this machine: tensors, GPUs, Gloo."""

from __future__ import annotations

import datetime
import shutil
from pathlib import Path

import torch

from weightwire.doctor.check import CheckOptions, Verdict
from weightwire.doctor.children import Step, together

__all__ = ["broadcast", "broadcasts_arrive", "cuda", "gloo", "tensors"]

_NUMBERS = 1 << 18
_MOST_RANKS = 2


def tensors(_: CheckOptions) -> Verdict:
    """Casts are torch's own, and what they give is known."""
    master = torch.arange(-300, 301, dtype=torch.float32) / 7
    wire = master.bfloat16()
    bits = master.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF  # to nearest, ties to even
    same = torch.equal(wire.view(torch.int16).to(torch.int64) & 0xFFFF, rounded)
    details = {
        "torch": str(torch.__version__),
        "cuda_build": torch.version.cuda,
        "threads": torch.get_num_threads(),
    }
    if not same:
        return Verdict.failed(
            "a cast from float32 to bfloat16 rounds otherwise than to nearest",
            "reinstall torch: what it casts would be wrong on the wire",
            **details,
        )
    build = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for CPUs"
    return Verdict.ok(f"torch {torch.__version__}, built {build}", **details)


def cuda(_: CheckOptions) -> Verdict:
    """Each GPU: allocate, copy there and back, compute."""
    seen = shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia/version").exists()
    if torch.version.cuda is None:
        if seen:
            return Verdict.failed(
                "this machine has an NVIDIA driver, and torch is built for CPUs",
                "install a CUDA build of torch: https://pytorch.org/get-started/locally",
            )
        return Verdict.absent(
            "torch is built for CPUs", "nothing, unless weights lie on GPUs: install a CUDA build"
        )
    if not torch.cuda.is_available():
        what = "the NVIDIA driver is there, and torch can't use it" if seen else "there is no GPU"
        remedy = "run nvidia-smi; pass GPUs to the container (--gpus all); see CUDA_VISIBLE_DEVICES"
        return (Verdict.failed if seen else Verdict.absent)(what, remedy)
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        numbers = torch.arange(_NUMBERS, dtype=torch.int64)
        there = numbers.to(f"cuda:{index}")
        if int(there.sum()) != int(numbers.sum()) or not torch.equal(there.cpu(), numbers):
            return Verdict.failed(
                f"GPU {index} ({properties.name}) gives back other numbers than it was given",
                "look for Xid errors in dmesg; take the GPU out of service",
            )
        found.append({"name": properties.name, "memory_bytes": properties.total_memory})
    names = ", ".join(f"{index}: {gpu['name']}" for index, gpu in enumerate(found))
    return Verdict.ok(f"{len(found)} GPUs work ({names})", gpus=found)


def gloo(options: CheckOptions) -> Verdict:
    """Rank 0's random bytes arrive at rank 1."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        return Verdict.failed(
            "torch is built without Gloo",
            "install torch from https://pytorch.org: sharded trainers and the nccl backend need it",
        )
    if not broadcasts_arrive("gloo", _MOST_RANKS, options):
        return Verdict.failed(
            "a broadcast arrived with other bytes than were sent", "replace this build of torch"
        )
    return Verdict.ok(f"{_NUMBERS * 8 >> 20} MiB broadcast between two processes")


def broadcasts_arrive(library: str, ranks: int, options: CheckOptions) -> bool:
    """Whether rank 0's bytes arrive at all ranks as they were sent; a process each."""
    steps = [
        Step("weightwire.doctor.machine:broadcast", [library, rank, ranks, options.scratch])
        for rank in range(ranks)
    ]
    return len(set(together(steps, options.scratch, options.seconds - 5))) == 1


def broadcast(library: str, rank: int, world_size: int, scratch: str) -> str:
    """One rank: a sum of what it holds after rank 0's broadcast."""
    from torch import distributed

    device = torch.device("cuda", rank) if library == "nccl" else torch.device("cpu")
    if library == "nccl":
        torch.cuda.set_device(device)
    distributed.init_process_group(
        library,
        init_method=f"file://{scratch}/meeting",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=60),
    )
    numbers = torch.randint(-(1 << 40), 1 << 40, (_NUMBERS,), dtype=torch.int64)
    numbers = numbers.to(device) if rank == 0 else torch.zeros_like(numbers, device=device)
    distributed.broadcast(numbers, 0)
    weights = torch.arange(1, _NUMBERS + 1, device=device)
    found = str(int((numbers * weights).sum()))
    distributed.barrier()
    distributed.destroy_process_group()
    return found
