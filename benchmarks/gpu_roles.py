"""A trainer and an engine without a model's code, on one GPU or in host memory."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from typing import Any

import torch
from gpu_children import Role
from gpu_models import MODELS, State, digest, qwen3_8b

import weightwire

__all__ = ["Sink", "Source", "memory", "profiled", "release", "timed_send"]

TIMEOUT = 60.0
MODELS["qwen3-8b-cut"] = lambda: qwen3_8b(4)


def release() -> None:
    """Give back what closed handles hold in cycles."""
    gc.collect()
    torch.cuda.empty_cache()


def memory(device: torch.device) -> dict[str, int]:
    """Bytes: by the driver of this process (where it says so) and of the device, by torch."""
    if device.type != "cuda":
        return {}
    release()
    free, total = torch.cuda.mem_get_info(device)
    found = {"device": total - free, "torch": torch.cuda.memory_reserved(device)}
    with contextlib.suppress(Exception):
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(device.index or 0)
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
            if process.pid == os.getpid() and process.usedGpuMemory:
                found["process"] = process.usedGpuMemory
    return found


@contextlib.contextmanager
def profiled(path: str | None) -> Any:
    """A trace of what this process does on the CPU and on the GPU."""
    if path is None:
        yield
        return
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        yield
    profiler.export_chrome_trace(path)


def timed_send(sender: Any, version: int, trace: str | None) -> dict[str, Any]:
    with profiled(trace):
        began = time.perf_counter()
        report = sender.send(version, wait="applied")
        seconds = time.perf_counter() - began
    return {"seconds": seconds, "phases": report.phases, "path": report.path,
            "nbytes": report.nbytes}  # fmt: skip


class Source(Role):
    """A trainer: ``on`` is ``cuda``, ``pinned`` or ``pageable`` memory."""

    def make(self, case: dict[str, Any]) -> int:
        self.case = case
        dtype = torch.float32 if case.get("master") else torch.bfloat16
        shapes = MODELS[case["model"]]()
        self.made = State(shapes, dtype, self.device)
        self.state = self.made
        if case["on"] != "cuda":
            self.state = State({}, dtype, torch.device("cpu"))
            self.state.flat = torch.empty(
                self.made.flat.shape, dtype=dtype, pin_memory=case["on"] == "pinned"
            )
            self.state.tensors = weightwire.bench_model.views_of(self.state.flat, shapes)
        return self.made.flat.nbytes

    def open(self, session: str) -> str:
        case = self.case
        self.sender = weightwire.open_sender(
            case["backend"],
            session=session,
            source=self.state.tensors,
            overlap=case["overlap"],
            group_bytes=case["group_bytes"],
            wire_dtype="bfloat16" if case.get("master") else None,
            verify=case["verify"],
            device=case.get("sender_device"),
            timeout=TIMEOUT,
        )
        return self.sender.session_url

    def change(self, seed: int) -> int:
        self.made.change(seed)
        wanted = self.made.digest()
        if self.state is not self.made:
            self.state.flat.copy_(self.made.flat)
        self.sync()
        return wanted

    def send(self, version: int, trace: str | None = None) -> dict[str, Any]:
        return timed_send(self.sender, version, trace)

    def memory(self) -> dict[str, int]:
        return memory(self.device)

    def shut(self) -> None:
        self.sender.close()
        del self.sender, self.state, self.made
        release()

    def close(self) -> None:
        if hasattr(self, "sender"):
            self.sender.close()


class Sink(Role):
    """An engine; ``to`` is ``cuda`` or ``cpu``."""

    def make(self, case: dict[str, Any]) -> None:
        self.case = case
        where = self.device if case["to"] == "cuda" else torch.device("cpu")
        self.state = State(MODELS[case["model"]](), torch.bfloat16, where)

    def open(self, session: str) -> None:
        self.receiver = weightwire.open_receiver(
            self.case["backend"],
            session=session,
            target=self.state.tensors,
            receiver_id="engine",
            overlap=self.case["overlap"],
            timeout=TIMEOUT,
        )

    def receive(self, trace: str | None = None) -> dict[str, Any]:
        with profiled(trace):
            report = self.receiver.receive()
        return {"version": report.version, "phases": report.phases, "path": report.path}

    def digest(self) -> int:
        return digest(self.state.flat.to(self.device))

    def memory(self) -> dict[str, int]:
        return memory(self.device)

    def shut(self) -> None:
        self.receiver.close()
        del self.receiver, self.state
        release()

    def close(self) -> None:
        if hasattr(self, "receiver"):
            self.receiver.close()
