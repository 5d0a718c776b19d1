"""Two GPUs: ``python benchmarks/two_gpus.py --out two_gpus.json``.

The trainer is a process on one GPU, the engine a process on the other (or on the
same one: ``--devices cuda:0,cuda:0``).  Random bits are sent, and compared after
every version by a digest of all of them, computed on each side from its own
memory.  The ceilings are measured first, in the same run: a copy between the
devices, NCCL's broadcast and NIXL's prepared READ and WRITE of the same number of
bytes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpu_checkpoint_engine
import gpu_cycles
import gpu_faults
import gpu_peers
import torch
from gpu_children import Role, attempt, child, processes, synchronize
from gpu_models import MODELS, State
from rich.console import Console
from rich.table import Table

import weightwire

TIMEOUT = 60.0


class Trainer(Role):
    def open(self) -> str:
        dtype = torch.float32 if self.setup["master"] else torch.bfloat16
        self.state = State(MODELS[self.setup["model"]](), dtype, self.device)
        self.sender = weightwire.open_sender(
            self.setup["backend"],
            session=self.setup["session"],
            source=self.state.tensors,
            overlap=self.setup["overlap"],
            group_bytes=self.setup["group_bytes"],
            wire_dtype="bfloat16" if self.setup["master"] else None,
            verify=self.setup["verify"],
            timeout=TIMEOUT,
        )
        return self.sender.session_url

    def change(self, seed: int) -> int:
        self.state.change(seed)
        self.sync()
        return self.state.digest()

    def send(self, version: int) -> dict[str, Any]:
        began = time.perf_counter()
        report = self.sender.send(version)
        self.sync()
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "phases": report.phases, "path": report.path,
                "nbytes": report.nbytes}  # fmt: skip

    def close(self) -> None:
        self.sender.close()


class Engine(Role):
    def open(self, session: str) -> None:
        self.state = State(MODELS[self.setup["model"]](), torch.bfloat16, self.device)
        self.receiver = weightwire.open_receiver(
            self.setup["backend"],
            session=session,
            target=self.state.tensors,
            receiver_id="engine",
            overlap=self.setup["overlap"],
            timeout=TIMEOUT,
        )

    def receive(self) -> dict[str, Any]:
        report = self.receiver.receive()
        self.sync()
        return {"version": report.version, "phases": report.phases, "path": report.path}

    def digest(self) -> int:
        return self.state.digest()

    def close(self) -> None:
        self.receiver.close()


class NcclRank(Role):
    """Raw NCCL broadcast between two processes."""

    def open(self, rank: int) -> None:
        import torch.distributed as dist

        store = dist.FileStore(self.setup["session"], 2)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=2)
        self.memory = torch.full(
            (self.setup["nbytes"],), rank, dtype=torch.uint8, device=self.device
        )

    def broadcast(self, repeats: int) -> list[float]:
        import torch.distributed as dist

        times = []
        for _ in range(repeats + 2):
            dist.barrier()
            self.sync()
            began = time.perf_counter()
            dist.broadcast(self.memory, 0)
            self.sync()
            times.append(time.perf_counter() - began)
        assert int(self.memory[-1]) == 0
        return times[2:]

    def close(self) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()


class NixlRank(Role):
    """Raw prepared READs and WRITEs by the backend's own thin wrapper."""

    def open(self, rank: int) -> dict[str, Any]:
        from weightwire_nixl.agent import Agent

        self.agent = Agent(f"raw-{rank}")
        self.memory = torch.full(
            (self.setup["nbytes"],), rank, dtype=torch.uint8, device=self.device
        )
        self.sync()
        self.agent.register(self.memory, "memory")
        return {
            "name": self.agent.name,
            "metadata": self.agent.metadata().hex(),
            "address": self.memory.data_ptr(),
            "device": self.device.index or 0,
        }

    def meet(self, peer: dict[str, Any]) -> None:
        self.peer = peer
        self.agent.add(peer["name"], bytes.fromhex(peer["metadata"]), "the other process")

    def move(self, operation: str, pieces: int, repeats: int) -> list[float]:
        import numpy as np

        size = self.setup["nbytes"] // pieces
        offsets = np.arange(pieces, dtype=np.uint64) * np.uint64(size)

        def places(address: int, device: int) -> Any:
            sizes = np.full(pieces, size, np.uint64)
            return np.stack([offsets + np.uint64(address), sizes,
                             np.full(pieces, device, np.uint64)], 1)  # fmt: skip

        transfer = self.agent.prepare(
            operation,  # type: ignore[arg-type]
            self.peer["name"],
            places(self.memory.data_ptr(), self.device.index or 0),
            places(self.peer["address"], self.peer["device"]),
            devices=(self.device.type, self.device.type),
            who="the other process",
        )
        times = []
        for _ in range(repeats + 2):
            began = time.perf_counter()
            if not transfer.post():
                while not transfer.done():
                    pass
            times.append(time.perf_counter() - began)
        transfer.release()
        return times[2:]

    def close(self) -> None:
        self.agent.close()


ROLES: dict[str, type[Role]] = {
    "trainer": Trainer, "engine": Engine, "nccl": NcclRank, "nixl": NixlRank,
    **gpu_cycles.ROLES,
    **gpu_faults.ROLES,
    **gpu_peers.ROLES,
    **gpu_checkpoint_engine.ROLES,
}  # fmt: skip


# ------------------------------------------------------------------------------- ceilings


def rates(times: list[float], nbytes: int) -> dict[str, float]:
    median = statistics.median(times)
    return {"seconds": median, "min": min(times), "max": max(times), "gbps": nbytes / median / 1e9}


def peer_copy(devices: list[str], nbytes: int, repeats: int) -> list[float]:
    source = torch.ones(nbytes, dtype=torch.uint8, device=devices[0])
    target = torch.zeros(nbytes, dtype=torch.uint8, device=devices[1])
    times = []
    for _ in range(repeats + 2):
        for device in devices:
            synchronize(device)
        began = time.perf_counter()
        target.copy_(source)
        for device in devices:
            synchronize(device)
        times.append(time.perf_counter() - began)
    return times[2:]


def ceilings(devices: list[str], nbytes: int, repeats: int, work: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["peer_copy"] = rates(peer_copy(devices, nbytes, repeats), nbytes)
    torch.cuda.empty_cache()
    setup = {"session": str(work / "nccl-store"), "nbytes": nbytes}
    if devices[0] != devices[1]:
        with attempt(found, "nccl_broadcast"), processes(devices, ("nccl", "nccl"), setup) as ranks:
            for rank, process in enumerate(ranks):
                process.start("open", rank=rank)
            for process in ranks:
                process.answer()
            for process in ranks:
                process.start("broadcast", repeats=repeats)
            times = [process.answer() for process in ranks]
            found["nccl_broadcast"] = rates(
                [max(pair) for pair in zip(*times, strict=True)], nbytes
            )
    with attempt(found, "nixl"), processes(devices, ("nixl", "nixl"), setup) as ranks:
        infos = [process.ask("open", rank=rank) for rank, process in enumerate(ranks)]
        ranks[0].ask("meet", peer=infos[1])
        ranks[1].ask("meet", peer=infos[0])
        for operation, by in (("READ", 1), ("WRITE", 0)):
            for pieces in (1, 256):
                few = 3 if devices[0] == devices[1] and operation == "READ" else repeats
                times = ranks[by].ask("move", operation=operation, pieces=pieces, repeats=few)
                found[f"nixl_{operation.lower()}_{pieces}"] = rates(times, nbytes)
    return found


# ------------------------------------------------------------------------------- versions


def versions(devices: list[str], case: dict[str, Any], repeats: int) -> dict[str, Any]:
    """One configuration: a first version, one to warm up, and ``repeats`` that count."""
    setup = {"session": "tcp://127.0.0.1:0/two-gpus", **case}
    sends: list[dict[str, Any]] = []
    receives: list[dict[str, Any]] = []
    with processes(devices, ("trainer", "engine"), setup) as (trainer, engine):
        engine.ask("open", session=trainer.ask("open"))
        for version in range(1, repeats + 3):
            wanted = trainer.ask("change", seed=version)
            engine.start("receive")
            sent = trainer.ask("send", version=version)
            received = engine.answer()
            held = engine.ask("digest")
            if received["version"] != version or held != wanted:
                raise RuntimeError(f"version {version}: the engine holds other bits than were sent")
            sends.append(sent)
            receives.append(received)
    counted, taken = sends[2:], receives[2:]
    nbytes = counted[0]["nbytes"]

    def medians(reports: list[dict[str, Any]]) -> dict[str, float]:
        names = {name for report in reports for name in report["phases"]}
        return {
            name: statistics.median(report["phases"].get(name, 0.0) for report in reports)
            for name in sorted(names)
        }

    return {
        **case,
        "nbytes": nbytes,
        "first": sends[0]["seconds"],
        "transfer": statistics.median(map(_transfer, counted)),
        "lifecycle": statistics.median(s["seconds"] - _transfer(s) for s in counted),
        **rates([report["seconds"] for report in counted], nbytes),
        "send_phases": medians(counted),
        "receive_phases": medians(taken),
        "path": [counted[-1]["path"], taken[-1]["path"]],
    }


def _transfer(sent: dict[str, Any]) -> float:
    """From the first group's staging to the last credit, by the trainer's clock."""
    return sum(sent["phases"].get(name, 0.0) for name in ("stage", "verify", "announce", "wait"))


def peers(devices: list[str], model: str, repeats: int, work: Path) -> dict[str, Any]:
    """What others do on the same work."""
    found: dict[str, Any] = {}
    setup = {"model": model, "store": str(work / f"peers-{model}")}
    nbytes = payload(model)
    with processes(devices, ("peer", "peer"), setup) as ranks:
        for rank, process in enumerate(ranks):
            process.start("open", rank=rank)
        for process in ranks:
            process.answer()
        for how in ("per_tensor", "vllm_packed"):
            with attempt(found, f"{model}, {how}"):
                times = gpu_peers.measure(ranks, how, repeats)
                found[f"{model}, {how}"] = rates(times, nbytes)
    if model == "qwen3-8b":  # it needs pinned memory of the model's size
        with attempt(found, f"{model}, checkpoint-engine"):
            times = gpu_checkpoint_engine.measure(devices, model, min(repeats, 5), work)
            found[f"{model}, checkpoint-engine"] = rates(times, nbytes)
    return found


def payload(model: str) -> int:
    """Bytes of a version, in bfloat16."""
    return 2 * sum(int(torch.Size(shape).numel()) for shape in MODELS[model]().values())


def cases(
    backends: list[str], models: list[str], group_bytes: int | None, bucket_bytes: int
) -> Iterator[dict[str, Any]]:
    """What is measured: with two slots on both sides, and once with one."""
    for model in models:
        base = {"model": model, "master": False, "overlap": True, "verify": "sample",
                "group_bytes": group_bytes or -(-payload(model) // 8)}  # fmt: skip
        if "nccl" in backends:
            for mode in ("p2p", "broadcast"):
                backend = {"backend": "nccl", "mode": mode, "bucket_bytes": bucket_bytes}
                yield {**base, "backend": backend}
        if "nixl" in backends:
            yield {**base, "backend": {"backend": "nixl", "zero_copy": True}}
            yield {**base, "backend": {"backend": "nixl"}}
        if model == "qwen3-8b":
            for name in backends:
                backend = {"backend": name}
                if name == "nccl":
                    backend["bucket_bytes"] = bucket_bytes
                yield {**base, "backend": backend, "overlap": False}
                yield {**base, "backend": backend, "master": True}


def show(result: dict[str, Any]) -> None:
    console = Console(width=160)
    title = f"ceilings, {result['ceiling_nbytes'] / 1e9:.1f} GB, and what others do"
    table = Table(title=title, title_justify="left")
    for heading in ("what", "seconds", "GB/s"):
        table.add_column(heading)
    for name, row in {**result["ceilings"], **result["peers"]}.items():
        if "error" in row:
            table.add_row(name, "failed", row["error"][:80])
        else:
            table.add_row(name, f"{row['seconds']:.4f}", f"{row['gbps']:.1f}")
    console.print(table)
    table = Table(title="versions, medians", title_justify="left")
    for heading in ("model", "backend", "overlap", "master", "GB", "first s", "s", "GB/s",
                    "lifecycle s", "transfer s", "of raw"):  # fmt: skip
        table.add_column(heading)
    for row in result["versions"]:
        shown = [row["model"], json.dumps(row["backend"]), str(row["overlap"]), str(row["master"])]
        if "error" in row:
            table.add_row(*shown, "", "", "failed", row["error"][:120])
            continue
        raw = "nccl_broadcast" if row["backend"]["backend"] == "nccl" else "nixl_read_1"
        rate = result["ceilings"].get(raw, {}).get("gbps", float("nan"))
        table.add_row(
            *shown, f"{row['nbytes'] / 1e9:.1f}", f"{row['first']:.2f}",
            f"{row['seconds']:.4f}", f"{row['gbps']:.1f}", f"{row['lifecycle']:.4f}",
            f"{row['transfer']:.4f}", f"{row['nbytes'] / row['transfer'] / 1e9 / rate:.0%}",
        )  # fmt: skip
    console.print(table)
    for name, row in result["faults"].items():
        console.print(f"faults, {name}: {row.get('error', 'as they should end')}")
    for name, row in result["engines"].items():
        console.print(f"engines, {name}: {json.dumps(row)[:3000]}", markup=False)


PARTS = ("ceilings", "versions", "peers", "faults", "engines")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--devices", default="cuda:0,cuda:1", help="the trainer's, the engine's")
    parser.add_argument("--backends", default="nccl,nixl")
    parser.add_argument("--models", default="qwen3-8b,qwen3-30b-a3b", help=", ".join(MODELS))
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--gigabytes", type=float, default=8.6, help="of the ceilings")
    parser.add_argument("--kinds", default="qwen3,qwen3_moe:fp8_per_block,dp:qwen3_moe",
                        help="of vLLM engines")  # fmt: skip
    parser.add_argument("--group-bytes", type=int, help="an eighth of the model unless said")
    parser.add_argument("--bucket-bytes", type=int, default=1 << 30, help="of nccl")
    parser.add_argument("--parts", default=",".join(PARTS), help="of the benchmark, in order")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.child:
        child(ROLES, *options.child)
        return
    devices = options.devices.split(",")
    nbytes = int(options.gigabytes * 1e9) // (1 << 20) << 20
    result: dict[str, Any] = {
        "devices": [torch.cuda.get_device_name(d) if d.startswith("cuda") else d for d in devices],
        "torch": torch.__version__,
        "weightwire": weightwire.__version__,
        "ceiling_nbytes": nbytes,
        "ceilings": {},
        "versions": [],
        "peers": {},
        "faults": {},
        "engines": {},
    }

    def keep() -> None:
        if options.out is not None:  # after each part: what was measured isn't lost
            options.out.write_text(json.dumps(result, indent=1))

    models, backends = options.models.split(","), options.backends.split(",")
    with tempfile.TemporaryDirectory(prefix="weightwire-gpus-") as directory:
        work = Path(directory)
        for part in options.parts.split(","):
            if part == "ceilings":
                result["ceilings"] = ceilings(devices, nbytes, options.repeats, work)
            elif part == "versions":
                for case in cases(backends, models, options.group_bytes, options.bucket_bytes):
                    kept = dict(case)
                    with attempt(kept, "failed"):
                        kept = versions(devices, dict(case), options.repeats)
                    if "failed" in kept:
                        kept["error"] = kept.pop("failed")["error"]
                    result["versions"].append(kept)
                    print(json.dumps(kept), file=sys.stderr, flush=True)
                    keep()
            elif part == "peers":
                for model in models:
                    with attempt(result["peers"], f"{model}, others"):
                        result["peers"] |= peers(devices, model, options.repeats, work)
                    keep()
            elif part == "faults":
                for backend in backends:
                    # NCCL takes each GPU once: there a trainer has one, and its replica the other.
                    ranks = 1 if backend == "nccl" else len(devices)
                    name = f"{backend}, {ranks} trainer ranks"
                    with attempt(result["faults"], name):
                        result["faults"][name] = gpu_faults.run(
                            devices, backend, ranks, work / f"faults-{backend}"
                        )
                    print(json.dumps(result["faults"][name]), file=sys.stderr, flush=True)
            elif part == "engines":
                result["engines"] = gpu_cycles.run(devices, options.kinds.split(","), work)
            else:
                parser.error(f"--parts {part}: there are {', '.join(PARTS)}")
            keep()
    show(result)
    named = (result["ceilings"], result["peers"], result["faults"], result["engines"])
    rows = [*result["versions"], *(row for found in named for row in found.values())]
    failed = [row for row in rows if "error" in row]
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
