"""A trainer in verl's manner, with weightwire as its checkpoint engine.

verl's actors hand full tensors, yielded one by one in a collective of all ranks
(``get_per_tensor_param``), to a checkpoint engine: ``prepare``, ``send_weights``, ``finalize``.
Its manager pauses the rollouts around that, and resumes them.  Here the engine is a sender
with a stream as its source, and the manager's part is a pool's ``update``.  verl itself isn't
imported (0.9.1 and vLLM 0.32 want different versions of transformers).

Run it with ``python examples/verl_engine.py``: two FSDP2 ranks on gloo, and a vLLM engine in
this process.  A number of steps may follow.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import weightwire
from weightwire_vllm.models import save_checkpoint, tiny_model

BACKEND = "memory"  # or "nixl": the rollout waits for no more than its own update
RANKS = 2


class CheckpointEngine:
    """The trainer's half of what verl calls a checkpoint engine, on every rank."""

    def __init__(self, session: str, rank: int, world_size: int) -> None:
        self._weights: Iterator[tuple[str, Tensor]] = iter(())
        self._session, self._rank, self._world_size = session, rank, world_size
        self._sender: weightwire.WeightSender | None = None

    def prepare(self, actor: nn.Module) -> None:
        """Once: what the generator will yield is known without running it."""
        specs = {
            name: weightwire.streaming.TensorSpec(tuple(tensor.shape), tensor.dtype)
            for name, tensor in actor.state_dict().items()
        }
        self._sender = weightwire.open_sender(
            BACKEND,
            session=self._session,
            source=weightwire.StreamingSource(lambda: self._weights, specs=specs),
            wire_dtype="bfloat16",
            rank=self._rank,
            world_size=self._world_size,
        )

    def send_weights(self, weights: Iterator[tuple[str, Tensor]], global_steps: int) -> None:
        """Return once the rollouts have them; no rank ever holds the model."""
        assert self._sender is not None, "prepare() comes first"
        self._weights = weights
        self._sender.send(global_steps)

    def finalize(self) -> None:
        """After each update: staging memory goes, for rollouts on the same GPUs."""
        if self._sender is not None:
            self._sender.release_buffers()

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()


def get_per_tensor_param(actor: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in actor.state_dict().items():
        yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(session: str, directory: str, steps: int) -> None:
    """One trainer rank."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (RANKS,))
    actor = tiny_model("qwen3", seed=0, dtype=torch.float32)
    for layer in actor.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(actor, mesh=mesh)
    optimizer = torch.optim.Adam(actor.parameters(), lr=1e-2)
    engine = CheckpointEngine(session, dist.get_rank(), RANKS)
    engine.prepare(actor)
    for step in range(1, steps + 1):
        tokens = torch.randint(2, 320, (4, 16))
        actor(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.send_weights(get_per_tensor_param(actor), global_steps=step)
        engine.finalize()
    last = {name: tensor.bfloat16() for name, tensor in get_per_tensor_param(actor)}
    if dist.get_rank() == 0:
        save_file(last, f"{directory}/last.safetensors")
    engine.close()
    dist.destroy_process_group()


def main(steps: int) -> None:
    from vllm import LLM, SamplingParams
    from weightwire.vllm import Pool
    from weightwire_vllm.inprocess import on_model

    with tempfile.TemporaryDirectory() as directory:
        checkpoint = save_checkpoint(tiny_model("qwen3", seed=1), Path(directory) / "initial")
        rollout = LLM(
            str(checkpoint),
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=64,
            weight_transfer_config={"backend": "weightwire"},
        )
        session = f"file://{directory}/session"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        arguments = [f"--nproc-per-node={RANKS}", __file__, session, directory, str(steps)]
        trainer = subprocess.Popen(
            [*command, *arguments], env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        try:
            # verl's CheckpointEngineManager: abort or keep requests, update, resume.
            options = {"session": session, "backend": BACKEND, "release_buffers": True}
            with Pool({"rollout": rollout}, mode="keep", timeout=120, **options) as pool:
                for step in range(1, steps + 1):
                    report = pool.update(step)
                    sampling = SamplingParams(max_tokens=8, detokenize=False, seed=step)
                    rollout.generate({"prompt_token_ids": [5, 6, 7]}, sampling, use_tqdm=False)
                    (replica,) = report.updated.values()
                    print(f"step {step}: {replica.paused_seconds:.3f} s out of service", flush=True)
                if trainer.wait(timeout=60) != 0:
                    raise RuntimeError("the trainer failed: see above")
                pool.detach()
        finally:
            trainer.terminate()
            trainer.wait()
        last = load_file(f"{directory}/last.safetensors")
        held = on_model(rollout, lambda model: dict(model.named_parameters()))
        # Others are fused, or packed for the CPU's kernels.
        alike = [n for n, value in last.items() if n in held and held[n].shape == value.shape]
        assert alike
        assert all(torch.equal(held[name], last[name]) for name in alike)
        print(f"the rollout holds version {steps}: {len(alike)} tensors compared", flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 4:
        train(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
