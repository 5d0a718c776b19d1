"""What a version costs through the filesystem, beside what the same bytes cost at least.

Two processes: this one is the trainer, a child is the engine.  In every round
each measurement runs once, one after the other, so that all of them meet the
same machine:

* the transfer: ``publish`` and ``apply``, as seen by the trainer's clock;
* ``unverified``: the same with ``verify="off"``; the transfer verifies as by default;
* ``raw_write``, ``raw_read``: the same bytes in as many files, with as many
  threads, synced, and read into the engine's own memory;
* ``safetensors_save``, ``_load``, ``_copy``: the library's way of doing it;
* ``memcpy``: one pass over memory, the floor.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
import xxhash
from rich.console import Console
from rich.table import Table

import weightwire
from weightwire.bench_model import llama_shapes, views_of
from weightwire.deadline import Deadline, Watch
from weightwire.errors import TransferError
from weightwire_filesystem.config import FilesystemConfig
from weightwire_filesystem.files import create_file, read_exactly, write_exactly
from weightwire_filesystem.workers import Workers, shared

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["main", "run", "show"]

_RAW_CALL_NBYTES = 4 << 20
_TIMEOUT = 600.0


def run(nbytes: int, directories: list[Path], repeats: int, threads: int | None) -> dict[str, Any]:
    """Measure transfers of a model of about ``nbytes`` through each directory.

    Args:
        nbytes: payload, in bytes; bfloat16, 84 tensors with Llama's proportions.
        directories: where to write; a tmpfs and the current directory unless given.
        repeats: measured rounds, after one to warm up.
        threads: for the transfer and the raw costs alike; None for the default.

    Returns:
        The first directory's figures, in seconds and bytes, and under
        ``"directories"`` those of each; ready for JSON.
    """
    usual = [Path("/dev/shm"), Path.cwd()]  # noqa: S108 -- a tmpfs, where there is one
    directories = directories or [path for path in usual if path.is_dir()]
    shapes = llama_shapes(nbytes // 2)
    figures = [_measure(shapes, directory, repeats, threads) for directory in directories]
    return {**figures[0], "directories": figures}


def show(result: dict[str, Any]) -> None:
    """Print figures for a person."""
    table = Table(title=f"filesystem, {result['nbytes'] / 1e9:.2f} GB", title_justify="left")
    table.add_column("seconds, median", no_wrap=True)
    for figures in result["directories"]:
        table.add_column(figures["directory"], justify="right")
    rows: dict[str, list[str]] = {}
    for figures in result["directories"]:
        seconds = figures["seconds"]
        spread = f"{seconds['median']:.3f} ({seconds['min']:.3f} to {seconds['max']:.3f})"
        rows.setdefault("publish + apply", []).append(spread)
        for name, value in figures["raw"].items():
            rows.setdefault(name, []).append(f"{value:.3f}")
        rows.setdefault("GB/s", []).append(f"{figures['gbps']:.2f}")
        rows.setdefault("of it, verify", []).append(f"{figures['verify_cost']:.3f}")
        rows.setdefault("times raw write + read", []).append(f"{figures['times_raw']:.2f}")
        faster = f"{figures['times_faster_than_safetensors']:.2f}"
        rows.setdefault("times faster than safetensors", []).append(faster)
        rows.setdefault("peak extra MB", []).append(f"{figures['peak_extra_bytes'] / 1e6:.1f}")
    for name, values in rows.items():
        table.add_row(name, *values)
    Console().print(table)


def _measure(
    shapes: dict[str, tuple[int, ...]], directory: Path, repeats: int, threads: int | None
) -> dict[str, Any]:
    directory.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".weightwire-bench-", dir=directory))
    try:
        with _Engine(work, shapes, threads) as engine:
            trainer = _Trainer(work, shapes, threads)
            try:
                return _rounds(trainer, engine, directory, repeats)
            finally:
                trainer.close()
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _rounds(trainer: _Trainer, engine: _Engine, directory: Path, repeats: int) -> dict[str, Any]:
    samples: dict[str, list[float]] = {}
    extra = 0
    parts = [_transfer, _unverified, _raw, _library]
    for number in range(repeats + 1):
        trainer.change()
        clock = _Clock()
        # What comes after what changes which free pages the kernel hands out: take turns.
        for i in range(len(parts)):
            parts[(number + i) % len(parts)](trainer, engine, number, clock)
        if number:
            clock.times["total"] = clock.times["publish"] + clock.times["apply"]
            for name, seconds in (clock.times | clock.phases).items():
                samples.setdefault(name, []).append(seconds)
            extra = max(extra, clock.extra)
    median = {name: statistics.median(values) for name, values in samples.items()}
    raw = ("memcpy", "raw_write", "raw_read")
    library = ("safetensors_save", "safetensors_load", "safetensors_copy")
    floor = median["raw_write"] + median["raw_read"]
    total = median["total"]
    return {
        "backend": "filesystem",
        "directory": str(directory),
        "nbytes": trainer.nbytes,
        "tensors": trainer.tensors,
        "threads": trainer.threads,
        "repeats": repeats,
        "seconds": {"median": total, "min": min(samples["total"]), "max": max(samples["total"])},
        "phases": {
            name: seconds
            for name, seconds in sorted(median.items())
            if name.startswith(("publish", "apply"))
        },
        "gbps": trainer.nbytes / total / 1e9,
        "raw": {name: median[name] for name in (*raw, *library)},
        "times_raw": total / floor,
        "verify_cost": total - median["unverified"],
        "times_faster_than_safetensors": sum(median[name] for name in library) / total,
        "peak_extra_bytes": extra,
        "load": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
    }


def _transfer(trainer: _Trainer, engine: _Engine, number: int, clock: _Clock) -> None:
    _reset_peak()
    engine.ask("reset_peak")
    with clock("publish"):
        sent = trainer.publish(number + 1)
    with clock("apply"):
        applied = engine.ask("apply")
    for side, report in (("publish", sent), ("apply", applied)):
        clock.phases |= {f"{side}.{name}": t for name, t in report["phases"].items()}
    clock.extra = _peak_extra() + engine.ask("peak")
    if applied["version"] != number + 1 or engine.ask("digest") != trainer.digest():
        raise TransferError(f"round {number}: the engine doesn't hold the trainer's bytes")


def _unverified(trainer: _Trainer, engine: _Engine, number: int, clock: _Clock) -> None:
    with clock("unverified"):
        trainer.publish(number + 1, verified=False)
        engine.ask("apply", "unverified")
    if engine.ask("digest") != trainer.digest():
        raise TransferError(f"round {number}: the engine doesn't hold the trainer's bytes")


def _raw(trainer: _Trainer, engine: _Engine, _: int, clock: _Clock) -> None:
    with clock("raw_write"):
        trainer.raw_write()
    with clock("raw_read"):
        engine.ask("raw_read")
    trainer.remove_raw()
    clock.times["memcpy"] = engine.ask("memcpy")


def _library(trainer: _Trainer, engine: _Engine, _: int, clock: _Clock) -> None:
    with clock("safetensors_save"):
        trainer.save()
    clock.times.update(engine.ask("load"))
    trainer.remove_saved()


class _Clock:
    def __init__(self) -> None:
        self.times: dict[str, float] = {}
        self.phases: dict[str, float] = {}
        self.extra = 0

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.times[name] = time.perf_counter() - begin


class _State:
    """A state dict whose tensors lie one after the other in one touched buffer."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        numel = sum(math.prod(shape) for shape in shapes.values())
        self.words = torch.zeros(-(-numel // 4), dtype=torch.int64)
        self.tensors = views_of(self.words.view(torch.bfloat16), shapes)
        self.nbytes = 2 * numel
        self.view = self.words.view(torch.uint8).numpy().data[: self.nbytes]

    def digest(self) -> str:
        return xxhash.xxh3_64_hexdigest(self.view)


def _choice(threads: int | None) -> dict[str, Any]:
    return {"backend": "filesystem", "threads": threads, "keep": 1}


def _summary(report: weightwire.Report) -> dict[str, Any]:
    return {"version": report.version, "phases": dict(report.phases)}


def _session(work: Path, *, verified: bool = True) -> str:
    return (work / ("session" if verified else "unverified")).as_uri()


def _raw_parts(nbytes: int, files: int) -> list[tuple[int, int]]:
    return [(nbytes * i // files, nbytes * (i + 1) // files) for i in range(files)]


class _Trainer:
    """The sending side, and its part of the yardsticks."""

    def __init__(self, work: Path, shapes: dict[str, tuple[int, ...]], threads: int | None) -> None:
        self._work = work
        config = FilesystemConfig(threads=threads)
        self.threads = config.thread_count
        self._files = config.files_per_rank
        self._state = _State(shapes)
        self._state.words.random_(generator=torch.Generator().manual_seed(0))
        self.nbytes = self._state.nbytes
        self.tensors = len(shapes)
        self._watch = Watch()
        self._workers = Workers(self.threads, self._watch)
        self._senders = {
            verified: weightwire.open_sender(
                _choice(threads),
                session=_session(work, verified=verified),
                source=self._state.tensors,
                verify="sample" if verified else "off",
            )
            for verified in (True, False)
        }

    def change(self) -> None:
        """Other weights, as after an optimizer step."""
        self._watch.start(Deadline(_TIMEOUT))
        self._state.words.mul_(6364136223846793005).add_(1442695040888963407)

    def digest(self) -> str:
        return self._state.digest()

    def publish(self, version: int, *, verified: bool = True) -> dict[str, Any]:
        return _summary(self._senders[verified].send(version))

    def raw_write(self) -> None:
        parts = _raw_parts(self.nbytes, self._files)
        jobs = [partial(self._raw_write, i, begin, end) for i, (begin, end) in enumerate(parts)]
        self._workers.run(shared(jobs))

    def _raw_write(self, number: int, begin: int, end: int) -> None:
        fd = create_file(self._work / f"raw{number}", 0o600)
        for offset in range(begin, end, _RAW_CALL_NBYTES):
            view = self._state.view[offset : min(end, offset + _RAW_CALL_NBYTES)]
            write_exactly(fd, view, offset - begin)
        os.fsync(fd)
        os.close(fd)

    def remove_raw(self) -> None:
        for path in self._work.glob("raw*"):
            path.unlink()

    def save(self) -> None:
        safetensors.torch.save_file(self._state.tensors, self._work / "saved.safetensors")

    def remove_saved(self) -> None:
        (self._work / "saved.safetensors").unlink()

    def close(self) -> None:
        for sender in self._senders.values():
            sender.close()
        self._workers.close()


class _Engine:
    """The child process, as the trainer sees it: one JSON line each way."""

    def __init__(self, work: Path, shapes: dict[str, tuple[int, ...]], threads: int | None) -> None:
        setup = json.dumps({"work": str(work), "shapes": shapes, "threads": threads})
        self._process = subprocess.Popen(
            [sys.executable, "-m", "weightwire_filesystem.bench", "--engine", setup],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> _Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def ask(self, command: str, argument: str = "") -> Any:
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise TransferError("the engine process has no pipes")
        stdin.write(f"{command} {argument}\n")
        stdin.flush()
        line = stdout.readline()
        if not line:
            raise TransferError(f"the engine process failed at {command!r}: see its output above")
        return json.loads(line)


class _EngineProcess:
    """The receiving side, and its part of the yardsticks."""

    def __init__(self, work: Path, shapes: dict[str, tuple[int, ...]], threads: int | None) -> None:
        self._work = work
        config = FilesystemConfig(threads=threads)
        self._files = config.files_per_rank
        self._state = _State(shapes)
        self._other = torch.ones_like(self._state.words)
        self._watch = Watch()
        self._workers = Workers(config.thread_count, self._watch)
        self._receivers = {
            verified: weightwire.open_receiver(
                _choice(threads),
                session=_session(work, verified=verified),
                target=self._state.tensors,
                receiver_id="engine",
            )
            for verified in (True, False)
        }

    def apply(self, how: str) -> dict[str, Any]:
        return _summary(self._receivers[how != "unverified"].receive())

    def raw_read(self, _: str) -> None:
        jobs: list[Callable[[], None]] = []
        fds = []
        for number, (begin, end) in enumerate(_raw_parts(self._state.nbytes, self._files)):
            fds.append(os.open(self._work / f"raw{number}", os.O_RDONLY))
            for offset in range(begin, end, _RAW_CALL_NBYTES):
                view = self._state.view[offset : min(end, offset + _RAW_CALL_NBYTES)]
                jobs.append(partial(_raw_read, fds[-1], view, offset - begin))
        self._workers.run(shared(jobs))
        for fd in fds:
            os.close(fd)

    def load(self, _: str) -> dict[str, float]:
        clock = _Clock()
        with clock("safetensors_load"):
            loaded = safetensors.torch.load_file(self._work / "saved.safetensors")
        with clock("safetensors_copy"):
            for name, tensor in self._state.tensors.items():
                tensor.copy_(loaded[name])
        return clock.times

    def memcpy(self, _: str) -> float:
        begin = time.perf_counter()
        self._other.copy_(self._state.words)
        return time.perf_counter() - begin

    def digest(self, _: str) -> str:
        return self._state.digest()

    def reset_peak(self, _: str) -> None:
        _reset_peak()

    def peak(self, _: str) -> int:
        return _peak_extra()

    def serve(self) -> None:
        commands: dict[str, Callable[[str], object]] = {
            "apply": self.apply,
            "raw_read": self.raw_read,
            "load": self.load,
            "memcpy": self.memcpy,
            "digest": self.digest,
            "reset_peak": self.reset_peak,
            "peak": self.peak,
        }
        for line in sys.stdin:
            command, _, argument = line.rstrip("\n").partition(" ")
            self._watch.start(Deadline(_TIMEOUT))
            print(json.dumps(commands[command](argument)), flush=True)  # noqa: T201 -- the reply
        for receiver in self._receivers.values():
            receiver.close()
        self._workers.close()


def _raw_read(fd: int, view: memoryview, offset: int) -> None:
    if not read_exactly(fd, view, offset):
        raise TransferError("a raw file ended early: run the benchmark again")


_baseline = 0


def _reset_peak() -> None:
    """Let the kernel forget this process's peak; remember what it holds now (Linux)."""
    global _baseline
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return
    _baseline = _status("VmRSS")


def _peak_extra() -> int:
    """Most bytes held since ``_reset_peak`` beyond what was held then; 0 where unknown."""
    return max(0, _status("VmHWM") - _baseline) if _baseline else 0


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    return 0


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nbytes", type=int, default=10**9)
    parser.add_argument("--directory", type=Path, action="append", dest="directories")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        setup = json.loads(options.engine)
        shapes = {name: tuple(shape) for name, shape in setup["shapes"].items()}
        _EngineProcess(Path(setup["work"]), shapes, setup["threads"]).serve()
        return
    figures = run(options.nbytes, options.directories or [], options.repeats, options.threads)
    print(json.dumps(figures, indent=2))  # noqa: T201 -- the result


if __name__ == "__main__":
    main()
