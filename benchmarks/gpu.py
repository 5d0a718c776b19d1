"""One GPU: ``python benchmarks/gpu.py --out gpu.json``.

Trainer and engine are two processes on one GPU (or in host memory).  Random bits are sent
and compared after every version.  Parts, in order:

* ``transports``: what the device's own copies reach in this run, then seconds a version by
  phase, memory, first sync against later ones, for nixl and the filesystem backend;
* ``kit``: the conformance kit, quick, with tensors on the GPU;
* ``vllm``: vLLM as the engine: a warm one that follows against a cold one that starts on the
  same weights, overlap by traces, and vLLM's own ways on the same model.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_children import Child, Role, attempt, child, processes
from gpu_engine import Engine, Policy, equality
from gpu_roles import Sink, Source
from gpu_traces import concurrency
from rich.console import Console
from rich.table import Table
from two_gpus import NixlRank, rates

import weightwire

ROLES: dict[str, type[Role]] = {
    "source": Source, "sink": Sink, "nixl": NixlRank, "policy": Policy, "vllm": Engine,
}  # fmt: skip
PARTS = ("transports", "kit", "vllm")
GB = 1e9
SHM = "/dev/shm"  # noqa: S108 - files in memory are what is wanted


# ---------------------------------------------------------------------------- ceilings


def timed(move: Any, nbytes: int, repeats: int = 9) -> dict[str, float]:
    times = []
    for _ in range(repeats + 2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        move()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return rates(times[2:], nbytes)


def ceilings(device: str, nbytes: int, work: Path) -> dict[str, Any]:
    """Payload rates; host copies by pinned memory."""
    found: dict[str, Any] = {}
    with torch.no_grad():
        found |= _copies(device, nbytes)
    torch.cuda.empty_cache()
    with attempt(found, "nixl"), processes([device] * 2, ("nixl", "nixl"), {"nbytes": nbytes}) as p:
        infos = [process.ask("open", rank=rank) for rank, process in enumerate(p)]
        p[0].ask("meet", peer=infos[1])
        p[1].ask("meet", peer=infos[0])
        for pieces in (1, 256):
            times = p[0].ask("move", operation="WRITE", pieces=pieces, repeats=9)
            found[f"nixl WRITE, {pieces} descriptors"] = rates(times, nbytes)
    return found


def _copies(device: str, nbytes: int) -> dict[str, Any]:
    wide = torch.randn(nbytes // 4, device=device)
    source, target = wide.view(torch.uint8), torch.empty(nbytes, dtype=torch.uint8, device=device)
    found = {"device copy": timed(lambda: target.copy_(source), nbytes)}
    into = list(target[: nbytes // 2].view(torch.bfloat16).chunk(60))
    of = list(wide.chunk(60))
    found["fp32 to bf16, wire bytes"] = timed(lambda: torch._foreach_copy_(into, of), nbytes // 2)
    host = torch.empty(min(nbytes, 2 << 30), dtype=torch.uint8, pin_memory=True)
    part = source[: host.numel()]
    found["host to device"] = timed(lambda: part.copy_(host, non_blocking=True), host.numel(), 5)
    found["device to host"] = timed(lambda: host.copy_(part, non_blocking=True), host.numel(), 5)
    return found


# ---------------------------------------------------------------------------- transports


def cases(directory: Path) -> list[dict[str, Any]]:
    """One rank on each side."""
    rows = {"backend": "nixl"}
    base = {"model": "qwen3-8b", "on": "cuda", "to": "cuda", "backend": rows,
            "overlap": False, "verify": "sample", "group_bytes": 1 << 30, "repeats": 9}  # fmt: skip
    live = {"backend": "nixl", "zero_copy": True}
    one = {"max_retired_slots": 0}
    small = {**base, "model": "qwen3-8b-cut"}
    large = {**base, "model": "qwen3-30b-a3b", "repeats": 7, "group_bytes": 4 << 30}
    files = {"backend": "filesystem", "directory": str(directory), "keep": 1, "threads": 8,
             "files_per_rank": 8}  # fmt: skip
    return [
        base,
        {**base, "verify": "off"},
        {**base, "group_bytes": 256 << 20},
        {**base, "group_bytes": 4 << 30},
        {**base, "overlap": True},
        {**base, "backend": live},
        {**base, "backend": live, "overlap": True},
        {**base, "backend": live, "group_bytes": 4 << 30},
        {**base, "master": True},
        small,
        {**small, "backend": live},
        {**small, "backend": live, "verify": "off", "group_bytes": 4 << 30},
        {**small, "on": "pinned", "sender_device": "cuda"},
        {**small, "on": "pageable", "sender_device": "cuda", "repeats": 5},
        {**small, "on": "pageable", "sender_device": "cuda", "master": True, "repeats": 5},
        {**small, "sender_device": "cpu", "to": "cpu", "repeats": 3},
        {**small, "backend": files, "repeats": 3},
        {**small, "backend": files, "overlap": True, "repeats": 3},
        {**large, "backend": {**live, **one}},
        {**large, "backend": {**live, **one}, "overlap": True},
        {**large, "backend": {**live, **one}, "overlap": True, "verify": "off"},
        {**large, "backend": {**rows, **one}},
        {**large, "backend": {**rows, **one}, "overlap": True},
        {**base, "backend": live, "group_bytes": 4 << 30, "overlap": True},
        {**base, "group_bytes": 4 << 30, "overlap": True},
    ]


def versions(children: list[Child], case: dict[str, Any], work: Path) -> dict[str, Any]:
    """One case: a first version, one to warm up, and those that count."""
    trainer, engine = children
    sends, receives = [], []
    for process in children:
        process.ask("make", case=case)
    try:
        trainer.ask("change", seed=0)
        engine.ask("digest")
        before = [process.ask("memory") for process in children]
        began = time.perf_counter()
        url = trainer.ask("open", session="tcp://127.0.0.1:0/gpu")
        engine.ask("open", session=url)
        opened = time.perf_counter() - began
        for version in range(1, case["repeats"] + 3):
            wanted = trainer.ask("change", seed=version)
            engine.start("receive")
            sent = trainer.ask("send", version=version)
            received = engine.answer()
            if received["version"] != version or engine.ask("digest") != wanted:
                raise RuntimeError(f"version {version}: the engine holds other bits")
            sends.append(sent)
            receives.append(received)
        after = [process.ask("memory") for process in children]
    finally:
        for process in children:
            process.ask("shut")
    counted, taken = sends[2:], receives[2:]
    nbytes = counted[0]["nbytes"]
    return {
        **case, "nbytes": nbytes, "opened": opened, "first": sends[0]["seconds"],
        **rates([sent["seconds"] for sent in counted], nbytes),
        "send_phases": medians(counted), "receive_phases": medians(taken),
        "path": [counted[-1]["path"], taken[-1]["path"]],
        "memory": {"before": before, "after": after},
    }  # fmt: skip


def medians(reports: list[dict[str, Any]]) -> dict[str, float]:
    names = sorted({name for report in reports for name in report["phases"]})
    return {n: statistics.median(r["phases"].get(n, 0.0) for r in reports) for n in names}


def floor(row: dict[str, Any], found: dict[str, Any]) -> float:
    """What its copies would take at the rates of this run."""
    copy = found["device copy"]["gbps"] * GB
    live = row["backend"].get("zero_copy", False)
    stage = found["fp32 to bf16, wire bytes"]["gbps"] * GB if row.get("master") else copy
    if row["on"] != "cuda":
        stage = found["host to device"]["gbps"] * GB
    return float((0 if live else row["nbytes"] / stage) + 2 * row["nbytes"] / copy)


# ---------------------------------------------------------------------------- the kit


def kit(work: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("filesystem", "nixl"):
        run = "from weightwire.cli.main import main; main()"
        command = [sys.executable, "-c", run, "conformance", name, "--quick", "--device", "cuda",
                   "--json"]  # fmt: skip
        began = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=work)
        sys.stderr.write(done.stderr[-6000:])
        row: dict[str, Any] = {"rc": done.returncode, "seconds": time.perf_counter() - began}
        row["said"] = done.stderr[-20000:]
        found_json = json.loads(done.stdout) if done.stdout.strip() else {}
        results = found_json.get("results")
        if results is None:
            row["error"] = f"no results: {done.stdout[-2000:]}"
        else:
            outcomes = [result["outcome"] for result in results]
            row["outcomes"] = {outcome: outcomes.count(outcome) for outcome in set(outcomes)}
            row["failed"] = [result for result in results if result["outcome"] == "FAILED"]
        found[name] = row
    return found


# ---------------------------------------------------------------------------- vLLM


def engines(
    device: str, found: dict[str, Any], repeats: int, work: Path, keep: Callable[[], None]
) -> None:
    """A warm engine that follows a trainer, and a cold one that starts on what was sent."""
    kind, quantization = found["kind"], found["quantization"]
    place = Path(SHM) / f"{work.name}-{kind}-{quantization}"
    roles = ("policy", "vllm", "vllm")
    try:
        with processes([device] * 3, roles, {}) as (trainer, warm, cold):
            found["nbytes"] = trainer.ask("make", kind=kind)
            trainer.ask("change", seed=1)
            trainer.ask("save", directory=str(place))  # B is seed 1
            build = {"directory": str(place), "quantization": quantization}
            cold.start("build", load_format="safetensors", **build)
            warm.start("build", load_format="dummy", **build)
            found["cold"], found["warm"] = cold.answer(), warm.answer()
            found["cold_tokens"] = cold.ask("generate")
            cold.ask("snapshot", path=f"{place}/cold")
            cold.hang_up()
            cold.end()
            tokens = warm.ask("generate")
            addresses = warm.ask("addresses")
            large = {"group_bytes": 1 << 30}
            parts: dict[str, dict[str, Any]] = {
                "as by default": {},
                "one arena": large,
                "zero-copy": {"backend": {"zero_copy": True}, **large},
                "overlap": {"overlap": True, **large},
            }
            for name, options in parts.items():
                with attempt(found, name):
                    found[name] = follow((trainer, warm), options, repeats, work)
                keep()
            with attempt(found, "offloaded"):
                trainer.ask("offload")
                pinned = {"device": "cuda:0", "group_bytes": 512 << 20}
                serial = follow((trainer, warm), pinned, repeats, work, trace="serial")
                both = {**pinned, "overlap": True}
                overlapped = follow((trainer, warm), both, repeats, work, trace="overlap")
                ratio = overlapped["seconds"] / serial["seconds"]
                found["offloaded"] = {"serial": serial, "overlap": overlapped, "ratio": ratio}
            keep()
            # Everything that was sent last is B again.
            with attempt(found, "equality"):
                follow((trainer, warm), {}, -1, work)
                warm.ask("snapshot", path=f"{place}/warm")
                found["equality"] = {
                    **equality(place / "warm", place / "cold"),
                    "addresses_unchanged": warm.ask("addresses") == addresses,
                    "tokens_equal": warm.ask("generate") == found["cold_tokens"],
                    "tokens_were_others": tokens != found["cold_tokens"],
                }
            keep()
            with attempt(found, "ipc"):
                found["handles"] = trainer.ask("handles", path=f"{place}/handles")
                found["ipc"] = rates(
                    warm.ask("ipc", path=f"{place}/handles", repeats=repeats)[1:], found["nbytes"]
                )
            with attempt(found, "reload"):
                times = warm.ask("reload", directory=str(place), repeats=4)[1:]
                found["reload"] = rates(times, found["nbytes"])
    finally:
        shutil.rmtree(place, ignore_errors=True)


def follow(
    pair: tuple[Child, Child], options: dict[str, Any], repeats: int, work: Path,
    trace: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Versions of other weights, the last one B; times of all but the first two."""
    trainer, warm = pair
    options = {"group_bytes": 256 << 20, "verify": "sample", **options}
    sends, receives = [], []
    before = [process.ask("memory") for process in pair]
    began = time.perf_counter()
    url = trainer.ask("open", session="tcp://127.0.0.1:0/gpu", **options)
    warm.ask("open", session=url, overlap=options.get("overlap", False))
    opened = time.perf_counter() - began
    paths: list[str | None] = [None, None]
    try:
        for version in range(1, repeats + 3):
            trainer.ask("change", seed=1 if version == repeats + 2 else 100 + version)
            if trace is not None and version == repeats + 2:
                paths = [f"{work}/{trace}-{side}.json" for side in ("trainer", "engine")]
            warm.start("receive", trace=paths[1])
            sends.append(trainer.ask("send", version=version, trace=paths[0]))
            receives.append(warm.answer())
        after = [process.ask("memory") for process in pair]
    finally:
        for process in pair:
            process.ask("shut")
    counted, taken = sends[2:], receives[2:]
    if trace is not None:
        counted, taken = counted[:-1], taken[:-1]
    if not counted:
        return {}
    found = {
        **options, "opened": opened, "first": sends[0]["seconds"],
        **rates([sent["seconds"] for sent in counted], sends[0]["nbytes"]),
        "send_phases": medians(counted), "receive_phases": medians(taken),
        "path": [counted[-1]["path"], taken[-1]["path"]],
        "peak": max(report["peak"] for report in taken),
        "memory": {"before": before, "after": after},
    }  # fmt: skip
    if paths[0] is not None and paths[1] is not None:
        found["trace"] = concurrency(Path(paths[0]), Path(paths[1]))
    return found


# ---------------------------------------------------------------------------- the command


def show(result: dict[str, Any]) -> None:
    console = Console(width=170)
    found = result.get("ceilings", {})
    for name, row in found.items():
        console.print(f"{name}: {row.get('gbps', 0):.1f} GB/s {row.get('error', '')}")
    table = Table(title="versions, medians", title_justify="left")
    for heading in ("model", "backend", "on/to", "options", "GB", "opened", "first", "s", "GB/s",
                    "of copies", "stage", "wait", "fetch", "verify", "replay"):  # fmt: skip
        table.add_column(heading)
    for row in result.get("versions", []):
        options = [k for k in ("overlap", "master") if row.get(k)]
        options += [f"{row['group_bytes'] >> 20} MiB", row["verify"]]
        named = {k: v for k, v in row["backend"].items() if k != "directory"}
        shown = [row["model"], json.dumps(named), f"{row['on']}/{row['to']}", " ".join(options)]
        if "error" in row:
            table.add_row(*shown, "", "", "", "failed", row["error"][:100])
            continue
        phases = {**row["receive_phases"]}
        share = row["seconds"] / floor(row, found) if "device copy" in found else float("nan")
        table.add_row(
            *shown, f"{row['nbytes'] / GB:.1f}", f"{row['opened']:.2f}", f"{row['first']:.3f}",
            f"{row['seconds']:.4f}", f"{row['gbps']:.0f}", f"{share:.2f}",
            f"{row['send_phases'].get('stage', 0):.4f}",
            *(f"{phases.get(n, 0):.4f}" for n in ("wait", "fetch", "verify", "replay")),
        )  # fmt: skip
    console.print(table)
    for name, row in result.get("kit", {}).items():
        console.print(f"kit, {name}: {row.get('outcomes', row)}")
        for failed in row.get("failed", [])[:30]:
            console.print(f"  {failed.get('case')}: {failed.get('reason')}", markup=False)
    for row in result.get("vllm", []):
        console.print(f"vLLM, {row['kind']} {row['quantization']}", style="bold")
        for name, value in row.items():
            if isinstance(value, dict) and "seconds" in value and "gbps" in value:
                phases = {k: round(v, 4) for k, v in value.get("receive_phases", {}).items()}
                console.print(f"  {name}: {value['seconds']:.4f} s, {value['gbps']:.0f} GB/s "
                              f"first {value.get('first', 0):.2f} {phases}")  # fmt: skip
            elif isinstance(value, dict) and "error" in value:
                console.print(f"  {name}: failed: {value['error'][:300]}", markup=False)
        console.print(f"  {row.get('equality')}", markup=False)
        if "ratio" in row.get("offloaded", {}):
            offloaded = row["offloaded"]
            for side in ("serial", "overlap"):
                traced = offloaded[side].get("trace")
                console.print(f"  offloaded {side}: {offloaded[side]['seconds']:.4f} {traced}",
                              markup=False)  # fmt: skip
            console.print(f"  overlap over serial: {offloaded['ratio']:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--cases", help="numbers of the transports' cases; all by default")
    parser.add_argument("--override", default="{}", help="of the transports' cases, as JSON")
    parser.add_argument("--kinds", default="qwen3,qwen3_moe:fp8_per_block,deepseek_v3,qwen3:fp8")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--gigabytes", type=float, default=8.6, help="of the ceilings")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.child:
        child(ROLES, *options.child)
        return
    device = options.device
    result: dict[str, Any] = {
        "gpu": None if device == "cpu" else torch.cuda.get_device_name(device),
        "cores": os.cpu_count(),
        "torch": torch.__version__, "python": platform.python_version(),
        "weightwire": weightwire.__version__, "command": sys.argv[1:],
    }  # fmt: skip

    def keep() -> None:
        if options.out is not None:  # after each part: what was measured isn't lost
            options.out.write_text(json.dumps(result, indent=1))

    with tempfile.TemporaryDirectory(prefix="weightwire-gpu-") as directory:
        work = Path(directory)
        parts = options.parts.split(",")
        if "transports" in parts:
            nbytes = int(options.gigabytes * GB) // (1 << 20) << 20
            if device != "cpu":  # where the script itself can be tried
                result["ceilings"] = ceilings(device, nbytes, work)
            keep()
            files = Path(SHM) / f"{work.name}-versions"
            chosen = [{**case, **json.loads(options.override)} for case in cases(files)]
            if options.cases:
                chosen = [chosen[int(number)] for number in options.cases.split(",")]
            result["versions"] = []
            left = list(chosen)
            while left:  # a case that fails takes its processes along
                with processes([device] * 2, ("source", "sink"), {}) as pair:
                    while left:
                        kept = dict(left.pop(0))
                        with attempt(kept, "failed"):
                            kept = versions(pair, kept, work)
                        shutil.rmtree(files, ignore_errors=True)
                        failed = kept.pop("failed", None)
                        if failed is not None:
                            kept["error"] = failed["error"]
                        result["versions"].append(kept)
                        keep()
                        if failed is not None:
                            break
        if "kit" in parts:
            result["kit"] = kit(work)
            keep()
        if "vllm" in parts:
            result["vllm"] = []
            for name in options.kinds.split(","):
                kind, _, quantization = name.partition(":")
                kept = {"kind": kind, "quantization": quantization or None}  # filled as it goes
                result["vllm"].append(kept)
                with attempt(kept, "failed"):
                    engines(device, kept, options.repeats, work, keep)
                keep()
    show(result)


if __name__ == "__main__":
    main()
