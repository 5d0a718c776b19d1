"""What a version costs over the nccl backend, beside a raw broadcast of the same bytes.

Two processes: this one is the trainer, a child is the engine, each on its own GPU
with ``device="cuda"``.  In every round each measurement runs once, one after the
other and in turns, so that all of them meet the same machine:

* ``transfer``: ``send`` until it is applied, by the trainer's clock;
* ``unverified``: the same with ``verify="off"``; the others verify as by default;
* ``tiny``: the same for a model of 1,000 tiny tensors: what a version costs besides bytes;
* ``raw_broadcast``: the same bytes, from and into the models' own memory, by
  ``broadcast`` of the same library in buckets of 256 MB;
* ``peer_copy``: with GPUs only, a copy of the same bytes from one to the other.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
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
import xxhash
from rich.console import Console
from rich.table import Table
from torch import Tensor

import weightwire
from weightwire.bench_model import llama_shapes, views_of
from weightwire.errors import BackendUnavailable, ConfigError, TransferError

__all__ = ["main", "run", "show"]

_RAW_BUCKET_NBYTES = 256_000_000
_TINY = 1000
_TIMEOUT = 300.0


def run(
    nbytes: int,
    directories: list[Path],
    repeats: int,
    threads: int | None,
    device: str | None = None,
) -> dict[str, Any]:
    """Measure versions of a model of about ``nbytes`` between two processes.

    Args:
        nbytes: payload, in bytes; bfloat16, 84 tensors with Llama's proportions.
        directories, threads: not of this backend; must be empty and None.
        repeats: measured rounds, after one to warm up.
        device: ``"cpu"``, ``"cuda"``, or None for GPUs where there are two.

    Returns:
        Medians in seconds, and all samples; ready for JSON.

    Raises:
        BackendUnavailable: ``device="cuda"`` without two GPUs.
    """
    if directories or threads is not None:
        raise ConfigError("the nccl benchmark has neither directories nor threads: leave them out")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = device or ("cuda" if gpus >= 2 else "cpu")
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"device={device!r}: write 'cpu' or 'cuda'")
    if device == "cuda" and gpus < 2:
        raise BackendUnavailable(f"device='cuda' needs two GPUs, there are {gpus}: use 'cpu'")
    work = Path(tempfile.mkdtemp(prefix="weightwire-bench-"))
    try:
        with _Child(work, nbytes, device) as child:
            side = _Side(work, nbytes, device, rank=0)
            try:
                for name, url in side.open_senders().items():
                    child.ask("open", f"{name} {url}")
                return _rounds(side, child, repeats)
            finally:
                child.ask("close")
                side.close()
    finally:
        shutil.rmtree(work, ignore_errors=True)


def show(result: dict[str, Any]) -> None:
    """Print figures for a person."""
    title = f"nccl over {result['library']}, {result['nbytes'] / 1e9:.2f} GB on {result['device']}"
    table = Table(title=title, title_justify="left")
    table.add_column("seconds", no_wrap=True)
    for column in ("median", "least", "most", "GB/s"):
        table.add_column(column, justify="right")
    for name, samples in result["samples"].items():
        median = result["median"][name]
        rate = "" if name == "tiny" else f"{result['nbytes'] / median / 1e9:.2f}"
        spread = (f"{value:.4f}" for value in (median, min(samples), max(samples)))
        table.add_row(name, *spread, rate)
    console = Console()
    console.print(table)
    console.print(f"speed, as a share of the raw broadcast's: {result['share_of_raw']:.0%}")
    console.print(f"what verify costs: {result['verify_cost'] * 1e3:.1f} ms of a version")
    console.print(f"path: {result['path']}")
    for name, found in result["phases"].items():
        phases = ", ".join(f"{phase} {seconds:.4f}" for phase, seconds in found.items())
        console.print(f"phases of the trainer, medians, {name}: {phases}")


def _rounds(side: _Side, child: _Child, repeats: int) -> dict[str, Any]:
    samples: dict[str, list[float]] = {}
    phases: dict[str, dict[str, list[float]]] = {}
    reports: dict[str, weightwire.Report] = {}

    def send(name: str, version: int) -> float:
        child.tell("receive", name)
        began = time.perf_counter()
        report = side.senders[name].send(version)
        seconds = time.perf_counter() - began
        child.answer()
        reports[name] = report
        return seconds

    def raw() -> float:
        child.tell("raw", "")
        began = time.perf_counter()
        side.raw()
        child.answer()
        return time.perf_counter() - began

    for number in range(1, repeats + 2):
        side.change(number)
        parts: dict[str, Callable[[], float]] = {
            "transfer": lambda n=number: send("model", n),  # type: ignore[misc]
            "unverified": lambda n=number: send("unverified", n),  # type: ignore[misc]
            "tiny": lambda n=number: send("tiny", n),  # type: ignore[misc]
            "raw_broadcast": raw,
        }
        if side.device.type == "cuda":
            parts["peer_copy"] = side.peer_copy
        names = list(parts)
        for i in range(len(names)):
            name = names[(number + i) % len(names)]
            child.ask("scramble", "")
            seconds = parts[name]()
            if name != "peer_copy" and not side.equals(name, child.ask("digests")):
                raise TransferError(f"round {number}: the engine doesn't hold the trainer's bytes")
            if number > 1:
                samples.setdefault(name, []).append(seconds)
        if number > 1:
            for name, report in reports.items():
                for phase, value in report.phases.items():
                    phases.setdefault(name, {}).setdefault(phase, []).append(value)
    median = {name: statistics.median(values) for name, values in samples.items()}
    return {
        "backend": "nccl",
        "library": "nccl" if side.device.type == "cuda" else "gloo",
        "device": side.device.type,
        "nbytes": side.nbytes,
        "tensors": len(side.models["model"]),
        "repeats": repeats,
        "median": median,
        "samples": samples,
        "phases": {
            name: {phase: statistics.median(values) for phase, values in found.items()}
            for name, found in phases.items()
        },
        "seconds": {
            "median": median["transfer"],
            "min": min(samples["transfer"]),
            "max": max(samples["transfer"]),
        },
        "gbps": side.nbytes / median["transfer"] / 1e9,
        "share_of_raw": median["raw_broadcast"] / median["transfer"],
        "verify_cost": median["transfer"] - median["unverified"],
        "tiny_overhead": median["tiny"],
        "path": reports["model"].path,
        "load": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
    }


class _Side:
    """One of the two processes: models whose tensors lie in one buffer each, and a raw group."""

    def __init__(self, work: Path, nbytes: int, device: str, rank: int) -> None:
        torch.set_num_threads(1)
        self.device = torch.device("cpu") if device == "cpu" else torch.device("cuda", rank)
        if device == "cuda":
            torch.cuda.set_device(self.device)
        tiny: dict[str, tuple[int, ...]] = {f"tensors.{i}.bias": (8,) for i in range(_TINY)}
        self.flat: dict[str, Tensor] = {}
        self.models: dict[str, dict[str, Tensor]] = {}
        for name, shapes in (("model", llama_shapes(nbytes // 2)), ("tiny", tiny)):
            numel = sum(math.prod(shape) for shape in shapes.values())
            flat = torch.zeros(-(-numel // 4), dtype=torch.int64, device=self.device)
            self.flat[name] = flat
            self.models[name] = views_of(flat.view(torch.bfloat16), shapes)
        self.models["unverified"] = self.models["model"]
        self.nbytes = sum(tensor.nbytes for tensor in self.models["model"].values())
        self._group = _raw_group(work, rank, self.device)
        self.senders: dict[str, weightwire.WeightSender] = {}
        self.receivers: dict[str, weightwire.WeightReceiver] = {}
        self._other: Tensor | None = None

    def open_senders(self) -> dict[str, str]:
        """The sessions' URLs, by model: in memory, where no disk has a say."""
        for name, model in self.models.items():
            url = f"tcp://127.0.0.1:0/{name}"
            self.senders[name] = weightwire.open_sender(
                "nccl",
                session=url,
                source=model,
                timeout=_TIMEOUT,
                verify="off" if name == "unverified" else "sample",
            )
        return {name: sender.session_url for name, sender in self.senders.items()}

    def open_receiver(self, argument: str) -> None:
        name, url = argument.split(" ")
        self.receivers[name] = weightwire.open_receiver(
            "nccl",
            session=url,
            target=self.models[name],
            receiver_id="engine",
            timeout=_TIMEOUT,
        )

    def change(self, seed: int) -> None:
        """New random bytes."""
        for flat in self.flat.values():
            generator = torch.Generator(flat.device).manual_seed(seed)
            flat.random_(generator=generator)

    def scramble(self, _: str) -> None:
        """What arrives next is not what was there; pages are touched."""
        for flat in self.flat.values():
            flat.add_(1)
        self._synchronise()

    def digests(self) -> dict[str, str]:
        """A checksum of each model's bytes."""
        return {
            name: xxhash.xxh3_64_hexdigest(flat.cpu().view(torch.uint8).numpy().data)
            for name, flat in self.flat.items()
        }

    def equals(self, measured: str, digests: dict[str, str]) -> bool:
        """Whether the engine holds the bytes that were moved."""
        name = "tiny" if measured == "tiny" else "model"
        return self.digests()[name] == digests[name]

    def receive(self, name: str) -> int:
        return self.receivers[name].receive().version

    def raw(self, _: str = "") -> None:
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        data = self.flat["model"].view(torch.uint8)
        for begin in range(0, data.numel(), _RAW_BUCKET_NBYTES):
            self._group.broadcast([data[begin : begin + _RAW_BUCKET_NBYTES]], options).wait()
        self._synchronise()

    def peer_copy(self) -> float:
        """Trainer's GPU to the engine's, within this process."""
        if self._other is None:
            self._other = torch.zeros_like(self.flat["model"], device="cuda:1")
        self._synchronise()
        began = time.perf_counter()
        self._other.copy_(self.flat["model"])
        self._synchronise()
        return time.perf_counter() - began

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        for handle in (*self.senders.values(), *self.receivers.values()):
            handle.close()
        self._group = None


def _raw_group(work: Path, rank: int, device: torch.device) -> Any:
    from torch.distributed import (  # type: ignore[attr-defined]  # not in torch's __all__
        FileStore,
        PrefixStore,
        ProcessGroupGloo,
    )

    store = PrefixStore("raw", FileStore(str(work / "raw"), 2))
    timeout = datetime.timedelta(seconds=_TIMEOUT)
    if device.type == "cpu":
        return ProcessGroupGloo(store, rank, 2, timeout)
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    group = ProcessGroupNCCL(store, rank, 2, options)
    group.eager_connect_single_device(device)
    return group


class _Child:
    """The engine's process, as the trainer sees it: one JSON line each way."""

    def __init__(self, work: Path, nbytes: int, device: str) -> None:
        setup = json.dumps({"work": str(work), "nbytes": nbytes, "device": device})
        self._process = subprocess.Popen(
            [sys.executable, "-m", "weightwire_nccl.bench", "--engine", setup],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def tell(self, command: str, argument: str = "") -> None:
        assert self._process.stdin is not None  # noqa: S101 - it is a pipe
        self._process.stdin.write(f"{command} {argument}\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None  # noqa: S101 - it is a pipe
        line = self._process.stdout.readline()
        if not line:
            raise TransferError("the engine process failed: see its output above")
        return json.loads(line)

    def ask(self, command: str, argument: str = "") -> Any:
        self.tell(command, argument)
        return self.answer()


def _serve(work: Path, nbytes: int, device: str) -> None:
    side = _Side(work, nbytes, device, rank=1)
    commands: dict[str, Callable[[str], object]] = {
        "open": side.open_receiver,
        "receive": side.receive,
        "raw": side.raw,
        "scramble": side.scramble,
        "digests": lambda _: side.digests(),
        "close": lambda _: side.close(),
    }
    for line in sys.stdin:
        command, _, argument = line.rstrip("\n").partition(" ")
        print(json.dumps(commands[command](argument)), flush=True)  # noqa: T201 -- the reply


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nbytes", type=int, default=10**9)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        setup = json.loads(options.engine)
        _serve(Path(setup["work"]), setup["nbytes"], setup["device"])
        return
    figures = run(options.nbytes, [], options.repeats, None, options.device)
    print(json.dumps(figures, indent=2))  # noqa: T201 -- the result


if __name__ == "__main__":
    main()
