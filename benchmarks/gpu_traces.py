"""How much of two phases ran at the same time, by torch profiler traces of both processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["concurrency"]

Spans = list[tuple[float, float]]
_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
_WAITS = {"cudaDeviceSynchronize", "cuCtxSynchronize"}


def concurrency(trainer: Path, engine: Path) -> dict[str, Any]:
    """What the trainer's GPU work (stage, write) and the engine's (replay) have in common.

    Microseconds; waits for the whole device are counted from the first to the last of either
    process's GPU work.
    """
    sides = {"transfer": _events(trainer), "replay": _events(engine)}
    spans = {
        side: _union([(e["at"], e["at"] + e["dur"]) for e in events if e["cat"] in _GPU])
        for side, events in sides.items()
    }
    if not all(spans.values()):
        raise RuntimeError("a trace has no GPU work: was the profiler given CUDA?")
    begin = min(span[0][0] for span in spans.values())
    end = max(span[-1][1] for span in spans.values())
    waits = {
        side: [e["name"] for e in events if e["name"] in _WAITS and begin <= e["at"] <= end]
        for side, events in sides.items()
    }
    lengths = {side: _length(span) for side, span in spans.items()}
    both = _length(_common(*spans.values()))
    return {
        **lengths,
        "both": both,
        "of_the_shorter": both / min(lengths.values()),
        "span": end - begin,
        "device_wide_waits": {side: len(found) for side, found in waits.items()},
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


def _union(spans: Spans) -> Spans:
    found: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def _common(a: Spans, b: Spans) -> Spans:
    found = []
    for begin, end in a:
        for other_begin, other_end in b:
            if other_begin < end and begin < other_end:
                found.append((max(begin, other_begin), min(end, other_end)))
    return found


def _length(spans: Spans) -> float:
    return sum(end - begin for begin, end in spans)
