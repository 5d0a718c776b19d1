"""What a version costs over the nixl backend, beside what the same bytes cost at least.

Two processes: this one is the trainer, a child is the engine, each on its own
device.  In every round each measurement runs once, one after the other and in
turns, so that all of them meet the same machine:

* ``staged``, ``zero_copy``: ``send`` until it is applied, by the trainer's clock;
* ``unverified``: as ``staged``, with ``verify="off"``: the others verify as by default;
* ``raw_stage``, ``raw_replay``: one copy of the model into, or out of, a slot;
* ``raw_move``, ``raw_move_live``: the same groups by prepared transfers, posted one
  after another, in the direction that the backend chose; from slot to slot, and from
  where the tensors lie into a slot, as ``zero_copy`` does it.

Then, once: signals and their answers; and, between two more processes that are
confined to TCP (over shared memory the call makes the copy), what it costs to
post a group of 10,000 descriptors: neighbours, which NIXL merges, and others.
"""

from __future__ import annotations

import argparse
import json
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

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from weightwire.errors import ConfigError, TransferError
from weightwire_nixl.agent import Agent, Descriptors, Operation
from weightwire_nixl.arena import Slots
from weightwire_nixl.bench_sides import Side, finish, round_trips

__all__ = ["main", "run", "show"]

_DESCRIPTORS = 10_000
_RUN_NBYTES = 4096
_SIGNALS = 1000
_POSTS = 9
_CPU = torch.device("cpu")


def run(
    nbytes: int,
    directories: list[Path],
    repeats: int,
    threads: int | None,
    device: str | None = None,
    receiver_device: str | None = None,
) -> dict[str, Any]:
    """Measure versions of a model of about ``nbytes`` between two processes.

    Args:
        nbytes: payload, in bytes; bfloat16, 84 tensors with Llama's proportions.
        directories, threads: not of this backend; must be empty and None.
        repeats: measured rounds, after one to warm up.
        device: the trainer's, such as ``"cuda:0"``; by default the CPU.
        receiver_device: the engine's; by default the trainer's.

    Returns:
        Medians in seconds, and all samples; ready for JSON.

    Raises:
        ConfigError: there is no such device.
    """
    if directories or threads is not None:
        raise ConfigError("the nixl benchmark has neither directories nor threads: leave them out")
    device = device or "cpu"
    modes: dict[str, dict[str, Any]] = {
        "staged": {},
        "zero_copy": {"zero_copy": True},
        "unverified": {},
    }
    work = Path(tempfile.mkdtemp(prefix="weightwire-bench-"))
    try:
        setup = {"work": str(work), "nbytes": nbytes, "modes": modes}
        with _Child("--engine", {**setup, "device": receiver_device or device}) as engine:
            side = Side("sender", work, nbytes, device, modes)
            try:
                result = _measure(side, engine, repeats)
            finally:
                engine.ask("close")
                side.close()
        return {
            "backend": "nixl",
            "device": device,
            "receiver_device": receiver_device or device,
            "nbytes": side.nbytes,
            "tensors": len(side.tensors),
            "repeats": repeats,
            **result,
            "posting": _posting(),
            "load": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        }
    finally:
        shutil.rmtree(work, ignore_errors=True)


def show(result: dict[str, Any]) -> None:
    """Print figures for a person."""
    where = f"{result['device']} to {result['receiver_device']}"
    table = Table(
        title=f"nixl, {result['nbytes'] / 1e9:.2f} GB, {where}",
        title_justify="left",
    )
    table.add_column("seconds", no_wrap=True)
    for column in ("first", "median", "least", "most", "GB/s", "times raw"):
        table.add_column(column, justify="right")
    for name, samples in result["samples"].items():
        median = result["median"][name]
        first, ratio = result["first"].get(name), result["times_raw"].get(name)
        table.add_row(
            name,
            "" if first is None else f"{first:.4f}",
            *(f"{value:.4f}" for value in (median, min(samples), max(samples))),
            f"{result['nbytes'] / median / 1e9:.2f}",
            "" if ratio is None else f"{ratio:.2f}",
        )
    console = Console()
    console.print(table)
    console.print(f"what verify costs, staged: {result['verify_cost'] * 1e3:.1f} ms of a version")
    for name, path in result["path"].items():
        console.print(f"path, {name}: {path}", highlight=False)
    for name, sides in result["phases"].items():
        for side, found in sides.items():
            phases = ", ".join(f"{phase} {seconds:.4f}" for phase, seconds in found.items())
            console.print(f"phases of the {side}, medians, {name}: {phases}")
    signals, posting = result["signal"], result["posting"]
    console.print(
        f"a signal and its answer, median of {_SIGNALS}: {signals['median'] * 1e3:.3f} ms"
    )
    for name, seconds in posting["median"].items():
        console.print(
            f"posting {_DESCRIPTORS} descriptors over TCP, {name}: {seconds * 1e3:.3f} ms"
        )


def _measure(side: Side, engine: _Child, repeats: int) -> dict[str, Any]:
    engine.ask("meet", side.raw.describe())
    side.raw.meet(engine.ask("describe"))
    samples: dict[str, list[float]] = {}
    phases: dict[str, dict[str, dict[str, list[float]]]] = {}
    first: dict[str, float] = {}
    path: dict[str, str] = {}

    def send(mode: str, version: int) -> float:
        engine.tell("receive", mode)
        began = time.perf_counter()
        sent = side.handles[mode].send(version)
        seconds = time.perf_counter() - began
        applied = engine.answer()
        if engine.ask("digest") != side.digest():
            raise TransferError(f"round {version}, {mode}: the engine holds other bytes than sent")
        path[mode] = sent.path
        for name, found in (("trainer", sent.phases), ("engine", applied["phases"])):
            for phase, value in found.items():
                phases.setdefault(mode, {}).setdefault(name, {}).setdefault(phase, []).append(value)
        return seconds

    def move(what: str) -> float:
        if "(push" in path["staged"]:
            return float(side.serve(what, None))
        return float(engine.ask(what))

    for number in range(1, repeats + 2):
        side.change()
        parts: dict[str, Callable[[], float]] = {
            mode: lambda mode=mode, version=number: send(mode, version)  # type: ignore[misc]
            for mode in side.handles
        }
        parts["raw_stage"] = side.raw.copy
        parts["raw_move"] = lambda: move("move")
        parts["raw_move_live"] = lambda: move("move_live")
        parts["raw_replay"] = lambda: float(engine.ask("copy"))
        names = list(parts)
        if number > 1:  # what comes after what changes caches: take turns
            names = names[number % len(names) :] + names[: number % len(names)]
        for name in names:
            seconds = parts[name]()
            if number == 1:
                first[name] = seconds
            else:
                samples.setdefault(name, []).append(seconds)
    samples = {name: samples[name] for name in first}
    median = {name: statistics.median(values) for name, values in samples.items()}
    replay = median["raw_replay"]
    least = {
        "staged": median["raw_stage"] + median["raw_move"] + replay,
        "zero_copy": median["raw_move_live"] + replay,
    }
    least["unverified"] = least["staged"]
    return {
        "first": {name: first[name] for name in side.handles},
        "median": median,
        "samples": samples,
        "times_raw": {mode: median[mode] / least[mode] for mode in side.handles},
        "verify_cost": median["staged"] - median["unverified"],
        "path": path,
        "phases": {
            mode: {
                name: {phase: statistics.median(values[1:]) for phase, values in found.items()}
                for name, found in sides.items()
            }
            for mode, sides in phases.items()
        },
        "signal": _signals(side, engine),
    }


def _signals(side: Side, engine: _Child) -> dict[str, float]:
    engine.tell("echo", _SIGNALS)
    seconds = sorted(round_trips(side.raw.agent, side.raw.peer, _SIGNALS))
    engine.answer()
    return {"median": statistics.median(seconds), "p99": seconds[_SIGNALS * 99 // 100]}


# ------------------------------------------------------------------------------ posting


def _posting() -> dict[str, Any]:
    """What posting costs, measured in processes that may use TCP only."""
    # NIXL doesn't start on a machine with GPUs without a transport that knows their memory.
    tls = "tcp,cuda_copy" if torch.cuda.is_available() else "tcp"
    environment = {**os.environ, "UCX_TLS": tls, "CUDA_VISIBLE_DEVICES": ""}
    with _Child("--poster", {}, environment) as poster:
        found: dict[str, Any] = poster.ask("post")
    return found


class _Poster:
    """Posts to a target process, which only waits."""

    def serve(self, command: str, argument: Any) -> Any:
        del command, argument
        samples: dict[str, list[float]] = {}
        with _Child("--target", {}, dict(os.environ)) as target:
            agent = Agent("poster")
            slots = Slots(agent, 1, 2 * _DESCRIPTORS * _RUN_NBYTES, _CPU)
            other = target.ask("describe")
            agent.add(other["agent"], bytes.fromhex(other["metadata"]), "the target")
            operations: tuple[Operation, ...] = ("READ", "WRITE")
            # Sorted neighbours are merged when they are prepared; every other block never is.
            for layout, stride in (("adjacent", _RUN_NBYTES), ("scattered", 2 * _RUN_NBYTES)):
                for operation in operations:
                    transfer = agent.prepare(
                        operation,
                        other["agent"],
                        _blocks(slots.address, stride),
                        _blocks(other["address"], stride),
                        devices=("cpu", "cpu"),
                        who="the target",
                    )
                    found = [finish(transfer) for _ in range(_POSTS + 1)]
                    samples[f"{operation}, {layout}"] = found[1:]
            agent.close()
        return {
            "descriptors": _DESCRIPTORS,
            "nbytes_each": _RUN_NBYTES,
            "median": {name: statistics.median(values) for name, values in samples.items()},
            "samples": samples,
        }

    def close(self) -> None:
        pass


def _blocks(base: int, stride: int) -> Descriptors:
    found = np.zeros((_DESCRIPTORS, 3), dtype=np.uint64)
    found[:, 0] = np.uint64(base) + np.arange(_DESCRIPTORS, dtype=np.uint64) * np.uint64(stride)
    found[:, 1] = _RUN_NBYTES
    return found


class _Target:
    def __init__(self) -> None:
        self._agent = Agent("target")
        self._slots = Slots(self._agent, 1, 2 * _DESCRIPTORS * _RUN_NBYTES, _CPU)

    def serve(self, command: str, argument: Any) -> Any:
        del command, argument
        return {
            "agent": self._agent.name,
            "metadata": self._agent.metadata().hex(),
            "address": self._slots.address,
        }

    def close(self) -> None:
        self._agent.close()


# ------------------------------------------------------------------------------ processes


class _Child:
    """Another process, as its parent sees it: one JSON line each way."""

    def __init__(
        self, role: str, setup: dict[str, Any], environment: dict[str, str] | None = None
    ) -> None:
        self._role = role.lstrip("-")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "weightwire_nixl.bench", role, json.dumps(setup)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def tell(self, command: str, argument: Any = None) -> None:
        assert self._process.stdin is not None  # noqa: S101 - opened with pipes
        self._process.stdin.write(json.dumps([command, argument]) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None  # noqa: S101 - opened with pipes
        line = self._process.stdout.readline()
        if not line:
            raise TransferError(f"the {self._role} process failed: see its output above")
        return json.loads(line)

    def ask(self, command: str, argument: Any = None) -> Any:
        self.tell(command, argument)
        return self.answer()


def _serve(side: Side | _Poster | _Target) -> None:
    try:
        for line in sys.stdin:
            command, argument = json.loads(line)
            found = None if command == "close" else side.serve(command, argument)
            print(json.dumps(found), flush=True)  # noqa: T201 -- the reply
            if command == "close":
                break
    finally:
        side.close()


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nbytes", type=int, default=10**9)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--device")
    parser.add_argument("--receiver-device")
    for role in ("--engine", "--poster", "--target"):
        parser.add_argument(role, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        setup = json.loads(options.engine)
        _serve(
            Side("receiver", Path(setup["work"]), setup["nbytes"], setup["device"], setup["modes"])
        )
    elif options.poster:
        _serve(_Poster())
    elif options.target:
        _serve(_Target())
    else:
        found = run(
            options.nbytes, [], options.repeats, None, options.device, options.receiver_device
        )
        print(json.dumps(found, indent=2))  # noqa: T201 -- the result


if __name__ == "__main__":
    main()
