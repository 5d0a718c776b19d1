"""The table scenario × culprit: which broken backends each scenario catches.

``make soak`` makes all of it.  As a command it works for a while, and goes on from there
when it is called again at the same commit::

    python tests/conformance/culprit_table.py --seconds 280 --docs docs/conformance.md

What it finds goes to ``results/conformance_culprits.json`` and ``.md``.  The working
backends run beside the broken ones: what fails for them proves nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import culprits
from culprit_lab import Lab

from weightwire_conformance.outcomes import Outcome, Result
from weightwire_conformance.scenario import Case, cases

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
WORKING = ("memory", "filesystem")
JOBS = 2 * (os.cpu_count() or 1)  # most of a cell is waiting
PLACE = ("<!-- weightwire culprits: begin -->", "<!-- weightwire culprits: end -->")
SHOWN = 3
EVERY = 1 << 20


@dataclass
class Table:
    """Outcomes so far.

    Attributes:
        commit: of the tree that they are about.
        seed: of the scenarios' values, and of the order in which backends run.
        seconds: that it took, over all calls.
        enough: culprits at which a scenario needed no more; see ``unproven``.
        cells: by scenario and backend, why it is FAILED; "" where it isn't.
        astray: what a culprit that is named for a scenario says instead of what it should.
    """

    commit: str
    seed: int
    seconds: float = 0.0
    enough: int = EVERY
    cells: dict[str, dict[str, str]] = field(default_factory=dict)
    astray: list[str] = field(default_factory=list)

    def caught(self, scenario: str) -> list[str]:
        """Culprits that a scenario catches; those first that are named for it."""
        row = dict(self.cells.get(scenario, {}))  # other threads write to it
        named = list(culprits.proofs_of(scenario))
        return sorted(
            (name for name, reason in row.items() if reason and name not in WORKING),
            key=lambda name: (named.index(name) if name in named else len(named), name),
        )

    def note(self, case: Case, backend: str, result: Result) -> None:
        """What a cell has to say."""
        failed = result.outcome is Outcome.FAILED
        self.cells.setdefault(case.name, {})[backend] = result.reason if failed else ""
        wanted = culprits.proofs_of(case.name).get(backend)
        found = f"{result.reason}\n{result.detail}"
        if wanted is not None and not (failed and re.search(wanted, found)):
            said = f"{result.outcome.value}: {result.reason}"
            self.astray.append(f"{case.name} over {backend} says {said!r}, not {wanted!r}")

    def unproven(self, backend: str, enough: int) -> list[Case]:
        """What is still to be run over a backend.

        Args:
            enough: a scenario that catches so many needs only the culprits that are named
                for it; the working backends run all.
        """
        return [
            case
            for case in rows()
            if backend not in self.cells.get(case.name, {})
            and (
                backend in _working(case)
                or backend in culprits.proofs_of(case.name)
                or (backend not in WORKING and len(self.caught(case.name)) < enough)
            )
        ]

    def faults(self) -> list[str]:
        """What is wrong with a table that is done."""
        found = [f"{s} fails for {b}" for s in self.cells for b in WORKING if self.cells[s].get(b)]
        found += [f"{case.name} catches nothing" for case in rows() if not self.caught(case.name)]
        every = {culprit for case in rows() for culprit in self.caught(case.name)}
        found += [f"{culprit} isn't caught" for culprit in set(culprits.CULPRITS) - every]
        return found + self.astray

    def save(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        found = {**vars(self), "cells": {s: dict(row) for s, row in list(self.cells.items())}}
        (directory / "conformance_culprits.json").write_text(json.dumps(found, indent=1))
        lines = [f"# Scenarios and culprits\n\n{self.about()}\n\n{self.markdown(most=None)}\n"]
        (directory / "conformance_culprits.md").write_text("\n".join(lines))

    @classmethod
    def load(cls, directory: Path, commit: str) -> Table | None:
        """What an earlier call found, if it was about the same commit."""
        path = directory / "conformance_culprits.json"
        found: Mapping[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return cls(**found) if found.get("commit") == commit and "modified" not in commit else None

    def about(self) -> str:
        much = f", each until it had caught {self.enough}" if self.enough < EVERY else ""
        return (
            f"{len(rows())} scenarios{much}, over {len(culprits.CULPRITS)} broken backends, at "
            f"commit `{self.commit}` with seed {self.seed}."
        )

    def markdown(self, most: int | None) -> str:
        lines = ["| scenario | catches | among them |", "| --- | --- | --- |"]
        for case in rows():
            found = self.caught(case.name)
            more = ", …" if most is not None and len(found) > most else ""
            lines.append(f"| {case.name} | {len(found)} | {', '.join(found[:most])}{more} |")
        return "\n".join(lines)

    def write_docs(self, page: Path) -> None:
        """Refresh the summary between its markers."""
        text = page.read_text()
        begin, end = PLACE
        pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        summary = f"{begin}\n{self.about()}\n\n{self.markdown(SHOWN)}\n{end}"
        page.write_text(pattern.sub(lambda _: summary, text))


def rows() -> list[Case]:
    """The smallest case of each scenario, and those that are named for a culprit."""
    named = {proof.scenario for proof in culprits.PROOFS}
    return [case for case in cases(large=True) if case.smallest or case.name in named]


def _working(case: Case) -> Sequence[str]:
    return WORKING[:1] if case.name in culprits.EXPENSIVE else WORKING


def columns() -> list[str]:
    return [*WORKING, *culprits.CULPRITS]


def fill(
    table: Table,
    site: Path,
    *,
    jobs: int = JOBS,
    seconds: float = float("inf"),
    done: Callable[[], None] = lambda: None,
) -> None:
    """Run what is missing, each backend in one of several threads, until the time is up.

    Args:
        site: where culprits are to be installed.
        done: called after each backend.
    """
    began = time.monotonic()
    known = os.environ.get("PYTHONPATH", "")
    lab = Lab(os.pathsep.join([culprits.install(site), *([known] if known else ())]))
    try:
        # Those that are named for a scenario first: then it may have caught enough already.
        for enough in (0, table.enough):
            order = [backend for backend in columns() if table.unproven(backend, enough)]
            random.Random(table.seed).shuffle(order)
            _share(table, lab, jobs, order, enough, began + seconds, done)
    finally:
        lab.close()
        table.seconds += time.monotonic() - began


def _share(
    table: Table,
    lab: Lab,
    jobs: int,
    order: list[str],
    enough: int,
    end: float,
    done: Callable[[], None],
) -> None:
    lock = threading.Lock()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            while time.monotonic() < end:
                with lock:
                    if failures or not order:
                        return
                    backend = order.pop()
                _run(table, lab, backend, enough, end)
                with lock:
                    done()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def _run(table: Table, lab: Lab, backend: str, enough: int, end: float) -> None:
    for case in table.unproven(backend, enough):
        long = case.soak or case.name in culprits.EXPENSIVE
        if long and backend not in (*_working(case), *culprits.proofs_of(case.name)):
            # What else fails within fifty versions, or 2 GiB, fails within nine, or 3 MiB.
            table.cells.setdefault(case.name, {})[backend] = ""
            continue
        if time.monotonic() > end:
            break
        table.note(case, backend, lab.run_warm(case, backend))
    lab.end(backend)


def commit() -> str:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    about = git("rev-parse", "--short", "HEAD")
    return f"{about}, modified" if git("status", "--porcelain", "--untracked-files=no") else about


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=int(os.environ.get("WEIGHTWIRE_SEED", "0")))
    parser.add_argument(
        "--enough", type=int, default=EVERY, help="culprits at which a scenario needs no more"
    )
    parser.add_argument("--jobs", type=int, default=JOBS)
    parser.add_argument("--docs", type=Path, help="a page whose summary is refreshed at the end")
    arguments = parser.parse_args()
    table = Table.load(RESULTS, commit()) or Table(commit(), arguments.seed)
    table.enough = arguments.enough
    os.environ["WEIGHTWIRE_SEED"] = str(table.seed)
    with tempfile.TemporaryDirectory() as site:
        fill(
            table,
            Path(site),
            jobs=arguments.jobs,
            seconds=arguments.seconds,
            done=lambda: table.save(RESULTS),
        )
    table.save(RESULTS)
    left = sum(len(table.unproven(backend, table.enough)) for backend in columns())
    if left:
        print(f"up to {left} cells are left: call again")
        return 3
    if arguments.docs is not None:
        table.write_docs(arguments.docs)
    faults = table.faults()
    print("\n".join(faults) or f"every scenario catches a culprit: {table.about()}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
