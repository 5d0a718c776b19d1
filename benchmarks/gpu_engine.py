"""vLLM on a GPU as the receiving engine, the trainer in another process on the same GPU."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gpu_children import Role
from gpu_models import State
from gpu_policies import config, shapes
from gpu_roles import TIMEOUT, memory, profiled, release, timed_send

import weightwire

__all__ = ["PROMPTS", "Engine", "Policy", "equality"]

PROMPTS = [[5, 6, 7, 9, 11, 300], list(range(40, 100))]


def equality(warm: Path, cold: Path) -> dict[str, Any]:
    """How two engines' snapshots differ."""
    from weightwire_vllm.compare import Snapshot, compare

    difference = compare(*(Snapshot.decode(path.read_bytes()) for path in (warm, cold)))
    return {
        "equal": difference.equal,
        "tensors": difference.compared_tensors,
        "bytes": difference.compared_bytes,
        "differing": difference.differing[:20],
        "missing": difference.missing[:20],
        "retied": difference.retied[:20],
    }


class Policy(Role):
    """A trainer that holds a checkpoint's tensors."""

    def make(self, kind: str) -> int:
        self.kind = kind
        self.state = State(shapes(kind), torch.bfloat16, self.device)
        self.given = dict(self.state.tensors)
        return self.state.flat.nbytes

    def offload(self) -> None:
        """Hold everything in pinned memory from now on."""
        flat = torch.empty(self.state.flat.shape, dtype=torch.bfloat16, pin_memory=True)
        self.given = dict(weightwire.bench_model.views_of(flat, shapes(self.kind)))
        self.pinned = flat
        flat.copy_(self.state.flat)

    def change(self, seed: int) -> None:
        generator = torch.Generator(self.device).manual_seed(seed)
        self.state.flat.normal_(std=0.02, generator=generator)
        for name, tensor in self.state.tensors.items():
            if name.endswith("norm.weight"):
                tensor.add_(1.0)
        if hasattr(self, "pinned"):
            self.pinned.copy_(self.state.flat)
        self.sync()

    def save(self, directory: str) -> None:
        from safetensors.torch import save_file

        place = Path(directory)
        place.mkdir(parents=True, exist_ok=True)
        (place / "config.json").write_text(json.dumps(config(self.kind)))
        tensors = {name: t.cpu().contiguous() for name, t in self.state.tensors.items()}
        save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})

    def open(self, session: str, **options: Any) -> str:
        self.sender = weightwire.open_sender(
            {"backend": "nixl", **options.pop("backend", {})},
            session=session,
            source=self.given,
            timeout=TIMEOUT,
            **options,
        )
        return self.sender.session_url

    def send(self, version: int, trace: str | None = None) -> dict[str, Any]:
        return timed_send(self.sender, version, trace)

    def shut(self) -> None:
        self.sender.close()
        del self.sender
        release()

    def memory(self) -> dict[str, int]:
        return memory(self.device)

    def handles(self, path: str) -> float:
        """What vLLM's ipc trainer side sends by HTTP: all tensors' handles."""
        from torch.multiprocessing.reductions import reduce_tensor

        began = time.perf_counter()
        uuid = str(torch.cuda.get_device_properties(self.device).uuid)
        handles = [{uuid: reduce_tensor(t.detach())[1]} for t in self.state.tensors.values()]
        update = {
            "names": list(self.state.tensors),
            "dtype_names": ["bfloat16"] * len(handles),
            "shapes": [list(t.shape) for t in self.state.tensors.values()],
            "ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode(),
        }
        Path(path).write_text(json.dumps(update))
        return time.perf_counter() - began

    def close(self) -> None:
        if hasattr(self, "sender"):
            self.sender.close()


class Engine(Role):
    """vLLM in this process."""

    def build(
        self, directory: str, load_format: str, quantization: str | None, eager: bool = False
    ) -> dict[str, Any]:
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        os.environ.setdefault("VLLM_USE_DEEP_GEMM", "0")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # for vLLM's own ipc engine
        from weightwire_vllm import compat, inprocess

        began = time.perf_counter()
        self.llm = inprocess.build_engine(
            Path(directory), max_model_len=256, load_format=load_format, dtype="bfloat16",
            quantization=quantization, enforce_eager=eager, gpu_memory_utilization=0.25,
            kv_cache_memory_bytes=1 << 30, max_num_seqs=8, max_num_batched_tokens=512,
            compilation_config={
                "mode": 0, "cudagraph_mode": "NONE" if eager else "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": [1, 2, 4, 8],
            },
        )  # fmt: skip
        self.model = inprocess.on_model(self.llm, lambda model: model)
        self.config = inprocess.vllm_config(self.llm)
        graphs = str(self.config.compilation_config.cudagraph_mode)
        return {"seconds": time.perf_counter() - began, "cudagraph_mode": graphs,
                "vllm": compat.vllm_version(), "memory": memory(self.device)}  # fmt: skip

    def generate(self) -> list[list[int]]:
        from vllm import SamplingParams

        self.llm.reset_prefix_cache()
        sampling = SamplingParams(temperature=0, max_tokens=16, detokenize=False, ignore_eos=True)
        prompts = [{"prompt_token_ids": tokens} for tokens in PROMPTS]
        outputs = self.llm.generate(prompts, sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def snapshot(self, path: str) -> int:
        from weightwire_vllm.compare import snapshot

        found = snapshot(self.model)
        Path(path).write_bytes(found.encode())
        return sum(digest.nbytes for digest in found.tensors.values())

    def addresses(self) -> dict[str, int]:
        """Of every parameter and buffer, and of what MLA layers derive."""
        from weightwire_vllm import compat

        named = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        named |= compat.absorbed_weights(self.model)
        return {name: tensor.data_ptr() for name, tensor in named.items() if not tensor.is_meta}

    def open(self, session: str, overlap: bool) -> None:
        from weightwire_vllm.target import VllmTarget

        self.receiver = weightwire.open_receiver(
            "nixl",
            session=session,
            target=VllmTarget(self.model, self.config),
            receiver_id="engine",
            overlap=overlap,
            timeout=TIMEOUT,
        )

    def receive(self, trace: str | None = None) -> dict[str, Any]:
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        with profiled(trace):
            report = self.receiver.receive()
        self.sync()
        peak = torch.cuda.max_memory_allocated(self.device) - before
        return {"version": report.version, "phases": report.phases, "path": report.path,
                "peak": peak}  # fmt: skip

    def shut(self) -> None:
        self.receiver.close()
        del self.receiver
        release()

    def memory(self) -> dict[str, int]:
        return memory(self.device)

    @contextlib.contextmanager
    def _timed(self, times: list[float]) -> Iterator[None]:
        self.sync()
        began = time.perf_counter()
        yield
        self.sync()
        times.append(time.perf_counter() - began)

    def ipc(self, path: str, repeats: int) -> list[float]:
        """vLLM's own engine over the trainer's tensors where they lie."""
        from vllm.config import WeightTransferConfig

        from weightwire_vllm import compat

        # It is imported for its trainer side, which isn't used here.
        sys.modules.setdefault("ray", types.ModuleType("ray"))
        from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

        engine = IPCWeightTransferEngine(
            WeightTransferConfig(backend="ipc"), self.config, self.device, self.model
        )
        times: list[float] = []
        for _ in range(repeats):
            update = json.loads(Path(path).read_text())
            with compat.config_context(self.config), self._timed(times):
                engine.start_weight_update()
                engine.update_weights(update)
                engine.finish_weight_update()
        return times

    def reload(self, directory: str, repeats: int) -> list[float]:
        """vLLM's own ``reload_weights`` from a checkpoint in memory."""
        from safetensors import safe_open

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            with safe_open(Path(directory) / "model.safetensors", framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    yield name, file.get_tensor(name)

        times: list[float] = []
        for _ in range(repeats):
            with self._timed(times):
                self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors()})
        return times

    def close(self) -> None:
        if hasattr(self, "receiver"):
            self.receiver.close()
