"""Refresh the figures of docs/failure-model.md from what soaks have written.

``make soak`` leaves ``results/soak.json`` (fuzzing is in it) and ``results/chaos_*.json``::

    python scripts/failure_figures.py results/soak.json results/chaos_*.json

Files of parts of a soak may be given together.  What isn't in any of them isn't in the page.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "failure-model.md"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"


def main(paths: Sequence[str]) -> None:
    found = {Path(path): json.loads(Path(path).read_text()) for path in paths}
    chaos = {path.stem: run for path, run in found.items() if "faults" in run}
    soaks = [run for run in found.values() if "tests" in run]
    lines = [*_chaos(chaos), "", *_fuzzing(soaks)]
    text = PAGE.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{PAGE} has no {BEGIN} and {END}")
    PAGE.write_text("\n".join([before + BEGIN, *lines, END + after]))


def _chaos(runs: dict[str, Any]) -> Iterator[str]:
    if not runs:
        yield "No run of chaos was given."
        return
    names = [name.removeprefix("chaos_") for name in runs]
    yield "| chaos over | " + " | ".join(f"`{name}`" for name in names) + " |"
    yield "| --- |" + " --- |" * len(names)
    rows = {
        "seed": lambda run: run["seed"],
        "versions that reached everybody": lambda run: run["versions"],
        "faults": lambda run: sum(run["faults"].values()),
        "memory compared with the oracle": lambda run: f"{run['checks']} x",
        "wrong states": lambda run: len(run["wrong"]),
        "other problems": lambda run: len(run["problems"]),
        "longest wait": lambda run: "{seconds:.2f} of {deadline:g} s".format(**run["longest_wait"]),
    }
    for title, cell in rows.items():
        yield f"| {title} | " + " | ".join(str(cell(run)) for run in runs.values()) + " |"
    yield ""
    yield "By fault: how often; until the sender's error, where there was one; until every live"
    yield "receiver held a newer version. Seconds, median and longest."
    yield ""
    yield "| fault | " + " | ".join(f"`{name}`" for name in names) + " |"
    yield "| --- |" + " --- |" * len(names)
    for kind in sorted({kind for run in runs.values() for kind in run["faults"]}):
        yield f"| {kind} | " + " | ".join(_of_kind(run, kind) for run in runs.values()) + " |"


def _of_kind(run: dict[str, Any], kind: str) -> str:
    if kind not in run["faults"]:
        return ""
    parts = [f"{run['faults'][kind]} x"]
    for title, times in (("noticed", "detection_seconds"), ("recovered", "recovery_seconds")):
        if kind in run[times]:
            found = run[times][kind]
            parts.append(f"{title} {found['median']:.2f}, {found['max']:.2f}")
    return "; ".join(parts)


def _fuzzing(soaks: Sequence[dict[str, Any]]) -> Iterator[str]:
    decoders: dict[str, dict[str, Any]] = {}
    for soak in soaks:
        for test in soak["tests"]:
            name = re.search(r"test_fuzz::\w+\[(.+)\]$", test["test"])
            if name and "properties" in test:
                ours = decoders.setdefault(name[1], {})
                ours |= {key: json.loads(value) for key, value in test["properties"].items()}
                # Of one test in several files the last counts.
                ours.setdefault("tests", {})[test["test"]] = test["outcome"]
    if not decoders:
        yield "No run of fuzzing was given."
        return
    yield "| decoder | inputs | accepted | guided by coverage | longest | lines reached | |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for name, found in sorted(decoders.items()):
        cells = [
            f"{found['inputs']:,}" if "inputs" in found else "",
            f"{found['outcomes']['accepted']:,}" if "outcomes" in found else "",
            f"{found['guided']:,}" if "guided" in found else "",
            f"{1000 * found['longest_s']:.0f} ms" if "longest_s" in found else "",
            "{percent} %".format(**found["coverage"]) if "coverage" in found else "",
            "FAILED" if "failed" in found["tests"].values() else "no crash, no hang",
        ]
        yield f"| {name} | " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main(sys.argv[1:])
