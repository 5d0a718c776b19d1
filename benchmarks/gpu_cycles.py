"""vLLM on other GPUs than its trainer: updates amid requests, and experts spread over two ranks.

A trainer follows its engine through a whole cycle, requests in flight: pause, update, resume.
Then two data-parallel ranks of a mixture of experts, each with its own half of the experts,
follow a trainer whose tensors are sharded over both GPUs: each rank reads both owners.
What was updated is compared with engines that were started on the same weights.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from gpu_children import Child, Role, attempt, processes
from gpu_engine import PROMPTS, Engine, Policy, equality
from gpu_roles import TIMEOUT, timed_send

import weightwire

__all__ = ["ROLES", "run"]

_IN_FLIGHT = 16
_TOKENS = 64
_BEFORE = 16
_SHM = Path("/dev/shm")  # noqa: S108 - files in memory are what is wanted


class BusyEngine(Engine):
    """An engine that has requests when its weights change."""

    def cycle(self) -> dict[str, Any]:
        """Pause amid requests, take the offer, and go on with them."""
        from vllm import SamplingParams
        from weightwire_vllm import inprocess

        engine, tokens = self.llm.llm_engine, dict[str, int]()
        sampling = SamplingParams(
            temperature=0, max_tokens=_TOKENS, ignore_eos=True, detokenize=False
        )
        names = [f"in-flight-{time.monotonic_ns()}-{i}" for i in range(_IN_FLIGHT)]
        for i, name in enumerate(names):
            prompt = PROMPTS[i % len(PROMPTS)]
            engine.add_request(name, {"prompt_token_ids": prompt}, sampling)

        def step() -> None:
            for output in engine.step():
                name = output.request_id
                tokens[name] = len(output.outputs[0].token_ids)

        while len(tokens) < 8 or min(tokens.values()) < _BEFORE:  # as many as run at once
            step()
        before = dict(tokens)
        times = [time.perf_counter()]
        inprocess.pause(self.llm)
        self.sync()
        times.append(time.perf_counter())
        report = self.receiver.receive()
        times.append(time.perf_counter())
        # Whoever was generating goes on from its tokens, under the new weights alone.
        if not engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("the engine kept what it had cached of the old weights")
        inprocess.resume(self.llm)
        times.append(time.perf_counter())
        while tokens == before:
            step()
        times.append(time.perf_counter())
        while engine.has_unfinished_requests():
            step()
        if len(tokens) != _IN_FLIGHT or set(tokens.values()) != {_TOKENS}:
            raise RuntimeError(f"requests ended early: {tokens}")
        steps = [b - a for a, b in itertools.pairwise(times)]
        return {
            "version": report.version,
            "in_flight": len(before),
            "seconds": dict(zip(("pause", "update", "caches", "first token"), steps, strict=True)),
            "paused": times[3] - times[0],
            "phases": report.phases,
        }

    def logprobs(self) -> list[list[float]]:
        from weightwire_vllm import inprocess

        self.llm.reset_prefix_cache()
        return inprocess.token_logprobs(self.llm, PROMPTS)


class ShardedPolicy(Role):
    """One of two trainer ranks: a half of each tensor that divides, and all of the rest."""

    def make(self, kind: str, rank: int, store: str) -> None:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        backend = "nccl" if self.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.FileStore(store, 2), rank=rank, world_size=2)
        self.mesh = init_device_mesh(self.device.type, (2,))
        self.rank = rank
        self.whole = Policy(str(self.device), {})
        self.whole.make(kind)
        self.given = {name: self._shard(t) for name, t in self.whole.state.tensors.items()}

    def _shard(self, whole: torch.Tensor) -> Any:
        from torch.distributed.tensor import DTensor, Replicate, Shard

        placement = Replicate() if whole.shape[0] % 2 else Shard(0)
        local = torch.empty_like(self._mine(whole))
        return DTensor.from_local(local, self.mesh, [placement], run_check=False)

    def _mine(self, whole: torch.Tensor) -> torch.Tensor:
        return whole if whole.shape[0] % 2 else whole.chunk(2)[self.rank]

    def change(self, seed: int) -> None:
        self.whole.change(seed)
        for name, tensor in self.given.items():
            tensor.to_local().copy_(self._mine(self.whole.state.tensors[name]))
        self.sync()

    def save(self, directory: str) -> None:
        self.whole.save(directory)

    def open(self, session: str) -> str:
        self.sender = weightwire.open_sender(
            "nixl",
            session=session,
            source=self.given,
            rank=self.rank,
            world_size=2,
            group_bytes=1 << 30,
            timeout=TIMEOUT,
        )
        return self.sender.session_url

    def send(self, version: int) -> dict[str, Any]:
        return timed_send(self.sender, version, None)

    def close(self) -> None:
        import torch.distributed as dist

        self.sender.close()
        dist.destroy_process_group()


class ExpertRank(Role):
    """One data-parallel rank of vLLM, with half of the experts."""

    def build(
        self, directory: str, load_format: str, quantization: str | None, rank: int, port: int
    ) -> dict[str, Any]:
        os.environ.update(
            VLLM_DP_SIZE="2", VLLM_DP_RANK=str(rank), VLLM_DP_RANK_LOCAL=str(rank),
            VLLM_DP_MASTER_IP="127.0.0.1", VLLM_DP_MASTER_PORT=str(port),
            VLLM_USE_FLASHINFER_SAMPLER="0", VLLM_USE_DEEP_GEMM="0", VLLM_LOGGING_LEVEL="WARNING",
        )  # fmt: skip
        from weightwire_vllm import compat, inprocess

        began = time.perf_counter()
        self.llm = inprocess.build_engine(
            Path(directory), max_model_len=256, load_format=load_format, dtype="bfloat16",
            quantization=quantization, enable_expert_parallel=True, enforce_eager=True,
            gpu_memory_utilization=0.3, kv_cache_memory_bytes=1 << 30, max_num_seqs=8,
            max_num_batched_tokens=512, worker_extension_cls="gpu_cycles.Seen",
        )  # fmt: skip
        return {"seconds": time.perf_counter() - began, "vllm": compat.vllm_version()}

    def attach(self, session: str) -> None:
        from weightwire_vllm import inprocess

        inprocess.attach(
            self.llm, session=session, backend="nixl", receiver_id="engine", timeout=TIMEOUT
        )

    def update(self, version: int) -> None:
        from weightwire_vllm import inprocess

        inprocess.update(self.llm, version=version)

    def snapshot(self, path: str) -> None:
        (found,) = self.llm.collective_rpc("snapshot")
        Path(path).write_bytes(found)

    def close(self) -> None:
        os._exit(0)  # vLLM's data-parallel shutdown waits for a coordinator that isn't there


class Seen:
    """In each worker: what its model holds."""

    get_model: Any

    def snapshot(self) -> bytes:
        from weightwire_vllm.compare import snapshot

        return bytes(snapshot(self.get_model()).encode())


ROLES: dict[str, type[Role]] = {
    "policy": Policy, "busy-engine": BusyEngine, "sharded-policy": ShardedPolicy,
    "expert-rank": ExpertRank,
}  # fmt: skip


def run(devices: Sequence[str], kinds: Sequence[str], work: Path) -> dict[str, Any]:
    """Each of ``kinds`` (``kind`` or ``kind:quantization``, or ``dp:kind``)."""
    found: dict[str, Any] = {}
    for name in kinds:
        with attempt(found, name), _directory(work, name) as place:
            if name.startswith("dp:"):
                found[name] = _experts(devices, name.removeprefix("dp:"), place, work)
            else:
                found[name] = _cycle(devices, name, place)
    return found


@contextlib.contextmanager
def _directory(work: Path, name: str) -> Iterator[Path]:
    place = _SHM / f"{work.name}-{name.replace(':', '-')}"
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _cycle(devices: Sequence[str], name: str, place: Path) -> dict[str, Any]:
    kind, _, quantization = name.partition(":")
    roles = ("policy", "busy-engine", "busy-engine")
    with processes([devices[0], devices[1], devices[1]], roles, {}) as (trainer, warm, cold):
        nbytes = trainer.ask("make", kind=kind)
        trainer.ask("change", seed=1)
        trainer.ask("save", directory=str(place))
        build = {"directory": str(place), "quantization": quantization or None}
        cold.start("build", load_format="safetensors", **build)
        warm.start("build", load_format="dummy", **build)
        started = [cold.answer(), warm.answer()]
        wanted, wanted_tokens = cold.ask("logprobs"), cold.ask("generate")
        cold.ask("snapshot", path=f"{place}/cold")
        cold.hang_up()
        cold.end()
        url = trainer.ask("open", session="tcp://127.0.0.1:0/cycle", group_bytes=1 << 30)
        warm.ask("open", session=url, overlap=False)
        addresses = warm.ask("addresses")
        cycles, mismatches = [], []
        for version, seed in enumerate((2, 3, 2, 3, 1), 1):
            trainer.ask("change", seed=seed)
            mismatches.append(_apart(warm.ask("logprobs"), wanted))
            warm.start("cycle")
            trainer.ask("send", version=version)
            cycles.append(warm.answer())
        mismatches.append(_apart(warm.ask("logprobs"), wanted))
        warm.ask("snapshot", path=f"{place}/warm")
        found = {
            "nbytes": nbytes,
            "engines": started,
            "cycles": cycles,
            "mismatch before each, and after": mismatches,
            **equality(place / "warm", place / "cold"),
            "addresses_unchanged": warm.ask("addresses") == addresses,
            "tokens_equal": warm.ask("generate") == wanted_tokens,
        }
    return _passed(found, ("equal", "addresses_unchanged", "tokens_equal"))


def _passed(found: dict[str, Any], wanted: Sequence[str]) -> dict[str, Any]:
    """The same; what isn't as it has to be is an error beside it."""
    if missed := [name for name in wanted if not found[name]]:
        found["error"] = f"not so: {', '.join(missed)}"
    return found


def _apart(mine: list[list[float]], others: list[list[float]]) -> float:
    """Mean distance of the prompts' log-probabilities."""
    pairs = [
        abs(a - b)
        for one, other in zip(mine, others, strict=True)
        for a, b in zip(one, other, strict=True)
    ]
    return sum(pairs) / len(pairs)


def _experts(devices: Sequence[str], name: str, place: Path, work: Path) -> dict[str, Any]:
    kind, _, quantization = name.partition(":")
    trainers = ("sharded-policy",) * 2
    with processes(devices, trainers, {}) as ranks:
        for rank, process in enumerate(ranks):
            process.start("make", kind=kind, rank=rank, store=str(work / "trainers"))
        _all(ranks)
        for process in ranks:
            process.start("change", seed=1)
        _all(ranks)
        ranks[0].ask("save", directory=str(place))
        started = []
        session = f"file://{work}/experts"
        sent: list[Any] = []
        for which, load_format in (("cold", "safetensors"), ("warm", "dummy")):
            with processes(devices, ("expert-rank",) * 2, {}) as engine:
                port = _free_port()
                build = {"directory": str(place), "quantization": quantization or None}
                for rank, process in enumerate(engine):
                    process.start("build", load_format=load_format, rank=rank, port=port, **build)
                started.append(_all(engine))
                if which == "warm":
                    for process in ranks:
                        process.start("open", session=session)
                    _all(ranks)
                    for process in engine:
                        process.start("attach", session=session)
                    _all(engine)
                    sent = [_version(ranks, engine, 1, 2), _version(ranks, engine, 2, 1)]
                for rank, process in enumerate(engine):
                    process.start("snapshot", path=f"{place}/{which}-{rank}")
                _all(engine)
        found = {
            "engines": started,
            "sent by each owner": sent,
            "ranks": [equality(place / f"warm-{r}", place / f"cold-{r}") for r in range(2)],
            "ranks hold different experts": not equality(place / "warm-0", place / "warm-1")[
                "equal"
            ],
        }
    found["ranks equal"] = all(rank["equal"] for rank in found["ranks"])
    return _passed(found, ("ranks equal", "ranks hold different experts"))


def _version(ranks: list[Child], engine: list[Child], version: int, seed: int) -> Any:
    for process in ranks:
        process.start("change", seed=seed)
    _all(ranks)
    for process in engine:
        process.start("update", version=version)
    for process in ranks:
        process.start("send", version=version)
    _all(engine)
    return _all(ranks)


def _all(children: list[Child]) -> list[Any]:
    return [child.answer() for child in children]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
