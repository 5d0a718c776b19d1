"""Write the table of model families in docs/vllm.md from what their tests did.

    python scripts/families_table.py [--keep] results/families.json [more.json ...]

Reads files that ``scripts/soak.py --out`` wrote; ``make families`` does both.  A family
that no file has gets no mark: a test that didn't run isn't a test that passed.  With
``--keep`` it keeps the one that it has, and the line below the table names the commits
of both.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from weightwire_vllm.families import FAMILIES

DOC = Path(__file__).parents[1] / "docs" / "vllm.md"
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"
MARKS = {"passed": "✓", "failed": "FAILED", "skipped": "-"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", action="store_true", help="marks of tests that no file has")
    parser.add_argument("files", nargs="+", type=Path)
    arguments = parser.parse_args()
    reports = [json.loads(path.read_text()) for path in arguments.files]
    tests = {test["test"]: test for report in reports for test in report["tests"]}
    head, _, rest = DOC.read_text().partition(BEGIN)
    table, end, tail = rest.partition(END)
    if not end:
        sys.exit(f"{DOC} has no {BEGIN} and {END}")
    kept = _cells(table) if arguments.keep else {}
    lines = [
        "| model | trace | replay | quantised | TP=2 | EP=2 | DP=2 |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for kind in FAMILIES:
        before = kept.get(kind) or [""] * 6
        cells = [new or old for new, old in zip(_row(kind, tests), before, strict=True)]
        lines.append(f"| `{kind}` | " + " | ".join(cells) + " |")
    commits = sorted({report["commit"][:9] for report in reports})
    note = f"`make families` at {', '.join(commits)}"
    line = re.search(r"`make families` at (.*)\.", table)
    earlier = re.findall(r"\b[0-9a-f]{9}\b", line[1]) if kept and line is not None else []
    if before := [commit for commit in earlier if commit not in commits]:
        note += f"; what these runs don't have, at {', '.join(before)}"
    DOC.write_text(f"{head}{BEGIN}\n" + "\n".join(lines) + f"\n\n{note}.\n{END}{tail}")
    print(f"wrote {DOC}")


def _cells(table: str) -> dict[str, list[str]]:
    """By family, the marks of a table that this script wrote."""
    rows = (line.strip("|").split("|") for line in table.splitlines() if line.startswith("| `"))
    return {row[0].strip(" `"): [cell.strip() for cell in row[1:]] for row in rows}


def _row(kind: str, tests: dict[str, dict[str, object]]) -> list[str]:
    refused = _find(tests, "test_a_buffer_that_nothing_refreshes_is_refused_by_name")
    if kind == "mamba2":
        mark = "refused by name" if refused and refused["outcome"] == "passed" else ""
        return [mark, "", "", "", "", ""]
    warm = _find(tests, f"test_updates_equal_cold_engines[{kind}]", "test_families")
    properties = warm.get("properties") if warm else None
    traced = isinstance(properties, dict) and str(properties.get("traced", "")).startswith("traced")
    methods = []
    for name, test in tests.items():
        match = re.search(rf"test_families::test_updates_equal_cold_engines\[{kind}@(\w+)\]", name)
        if match:
            methods.append(f"{match[1]} {MARKS[str(test['outcome'])]}")
    return [
        "✓" if traced else "",
        _mark(warm),
        "<br>".join(methods),
        _mark(_find(tests, f"test_two_workers_follow_and_recover[{kind}-cold]")),
        _mark(_find(tests, f"test_two_workers_follow_and_recover[{kind}-cold ep]")),
        _mark(_find(tests, f"test_every_rank_holds_its_own_experts[{kind}]")),
    ]


def _find(
    tests: dict[str, dict[str, object]], ending: str, module: str = ""
) -> dict[str, object] | None:
    return next((t for name, t in tests.items() if name.endswith(ending) and module in name), None)


def _mark(test: dict[str, object] | None) -> str:
    return "" if test is None else MARKS[str(test["outcome"])]


if __name__ == "__main__":
    main()
