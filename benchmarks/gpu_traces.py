"""How much of two phases ran at the same time, by torch profiler traces of both processes."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

__all__ = ["concurrency"]

Spans = list[tuple[float, float]]
_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
_WAITS = {"cudaDeviceSynchronize", "cuCtxSynchronize"}
_REPLAY = {"weightwire.replay", "weightwire.finalize"}


def concurrency(trainer: Path, engine: Path) -> dict[str, Any]:
    """What the trainer's transfers (stage, write) and the engine's replay have in common.

    Transfers are what the trainer's process has on the GPU.  Replay is taken twice: the
    engine's phases ``replay`` and ``finalize``, and what its process has on the GPU meanwhile,
    which is the less of the two where the host can't launch it faster.

    Returns:
        Microseconds.  ``of_the_shorter``: how much of the shorter of the two the other one
        ran beside.  ``of_serial``: the span, of what it would be if the two had run one after
        the other.  Waits for the whole device are counted from the first to the last of
        either process's GPU work.
    """
    sides = {"transfer": _events(trainer), "replay": _events(engine)}
    gpu = {side: _spans(events, _GPU) for side, events in sides.items()}
    if not all(gpu.values()):
        raise RuntimeError("a trace has no GPU work: was the profiler given CUDA?")
    begin = min(spans[0][0] for spans in gpu.values())
    end = max(spans[-1][1] for spans in gpu.values())
    waits = {
        side: sum(e["name"] in _WAITS and begin <= e["at"] <= end for e in events)
        for side, events in sides.items()
    }
    replay = _spans([e for e in sides["replay"] if e["name"] in _REPLAY], {"user_annotation"})
    return {
        "span": end - begin,
        "phases": _beside(gpu["transfer"], replay, end - begin),
        "gpu": _beside(gpu["transfer"], gpu["replay"], end - begin),
        "device_wide_waits": waits,
    }


def _beside(transfer: Spans, replay: Spans, span: float) -> dict[str, float]:
    both = _length(_common(transfer, replay))
    shorter = min(_length(transfer), _length(replay))
    return {
        "transfer": _length(transfer),
        "replay": _length(replay),
        "both": both,
        "of_the_shorter": both / shorter if shorter else 0.0,
        "of_serial": span / (span + both),
    }


def _events(path: Path) -> list[dict[str, Any]]:
    trace = json.loads(path.read_text())
    base = trace.get("baseTimeNanoseconds", 0) / 1000
    return [
        {"cat": e.get("cat", ""), "name": e.get("name", ""), "at": base + float(e["ts"]),
         "dur": float(e.get("dur", 0))}
        for e in trace["traceEvents"]
        if e.get("ph") == "X"
    ]  # fmt: skip


def _spans(events: list[dict[str, Any]], kinds: Collection[str]) -> Spans:
    """When some event of these kinds was on, in order and apart."""
    found: Spans = []
    for begin, end in sorted((e["at"], e["at"] + e["dur"]) for e in events if e["cat"] in kinds):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def _common(a: Spans, b: Spans) -> Spans:
    found = []
    at = 0
    for begin, end in a:
        while at < len(b) and b[at][1] <= begin:
            at += 1
        for other_begin, other_end in b[at:]:
            if other_begin >= end:
                break
            found.append((max(begin, other_begin), min(end, other_end)))
    return found


def _length(spans: Spans) -> float:
    return sum(end - begin for begin, end in spans)
