"""The matrix on the terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from weightwire_conformance.matrix import Matrix
from weightwire_conformance.outcomes import Outcome
from weightwire_conformance.reports.marks import MARKS, STYLES, tally
from weightwire_conformance.scenarios import THEMES

__all__ = ["print_matrix"]


def print_matrix(matrix: Matrix, reporter: pytest.TerminalReporter) -> None:
    """Write it where pytest writes."""
    # A name that is cut is no use: a narrow terminal wraps lines instead.
    names = max(len(scenario) for scenario in matrix.scenarios())
    width = max(reporter._tw.fullwidth, names + 4 + 20 * len(matrix.backends))
    text = io.StringIO()
    console = Console(
        file=text, force_terminal=reporter.hasmarkup, width=width, highlight=False, soft_wrap=False
    )
    console.print(_table(matrix))
    for result in matrix.results:
        if result.outcome is not Outcome.PASSED:
            line = Text.assemble(
                (f"{result.outcome.value:<12}", STYLES[result.outcome]),
                f"{result.backend}  {result.scenario}",
            )
            console.print(line)
            console.print(Text(f"  {result.reason}", style="dim"), soft_wrap=True)
    for backend in matrix.backends:
        counts = matrix.counts(backend)
        style = "red" if Outcome.FAILED in counts else "green"
        console.print(Text.assemble((f"{backend}: ", "bold"), (tally(counts), style)))
    reporter.section("weightwire conformance")
    reporter.write(text.getvalue())


def _table(matrix: Matrix) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("scenario", overflow="fold")
    for backend in matrix.backends:
        table.add_column(backend, justify="left", no_wrap=True)
    for theme in matrix.themes:
        table.add_row(Text(THEMES[theme], style="bold"))
        for scenario in matrix.scenarios(theme):
            cells = [Text(f"  {scenario}")]
            for backend in matrix.backends:
                result = matrix.get(scenario, backend)
                if result is None:
                    cells.append(Text(""))
                    continue
                cells.append(
                    Text.assemble(
                        (MARKS[result.outcome], STYLES[result.outcome]),
                        (f" {result.seconds:.1f}s", "dim"),
                    )
                )
            table.add_row(*cells)
    return table
