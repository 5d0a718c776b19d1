"""The support table that README and docs show: generated, never typed.

In a file it lies between two comments, and is replaced there by each run::

    <!-- weightwire conformance: themes -->
    <!-- weightwire conformance: end -->

``themes`` has one row a theme, ``scenarios`` one a scenario.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from weightwire.errors import ConfigError
from weightwire_conformance.matrix import Matrix
from weightwire_conformance.outcomes import Outcome
from weightwire_conformance.reports.marks import MARKS, tally
from weightwire_conformance.scenarios import THEMES

__all__ = ["check_markdown", "markdown_table", "write_markdown"]

_END = "<!-- weightwire conformance: end -->"
_PLACE = re.compile(
    r"<!-- weightwire conformance: (themes|scenarios) -->\n.*?" + re.escape(_END), re.DOTALL
)


def write_markdown(path: Path, matrix: Matrix) -> None:
    """Refresh the tables in ``path``; a file that doesn't exist gets all of them.

    Raises:
        ConfigError: the file exists and has no place for a table.
    """
    if not path.exists():
        path.write_text(
            "# Conformance\n\n"
            + "\n\n".join(_placed(detail, matrix) for detail in ("themes", "scenarios"))
            + "\n"
        )
        return
    check_markdown(path)
    text = path.read_text()
    path.write_text(_PLACE.sub(lambda place: _placed(place[1], matrix), text))


def check_markdown(path: Path) -> None:
    """Refuse a file that exists and has no place for a table.

    Raises:
        ConfigError: that, or it can't be read.
    """
    try:
        text = path.read_text() if path.exists() else None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read ({error}): name a Markdown file") from None
    if text is not None and not _PLACE.search(text):
        raise ConfigError(
            f"{path} has no place for a support table: write the lines "
            f"'<!-- weightwire conformance: themes -->' and '{_END}' where it belongs"
        )


def _placed(detail: str, matrix: Matrix) -> str:
    table = markdown_table(matrix, detail)
    return f"<!-- weightwire conformance: {detail} -->\n{table}\n{_END}"


def markdown_table(matrix: Matrix, detail: str = "themes") -> str:
    """The table with one row for each theme, or each of the ``scenarios``."""
    backends = matrix.backends
    lines = [_row(["", *(f"`{name}`" for name in backends)]), _row(["---"] * (len(backends) + 1))]
    if detail == "themes":
        lines += _capability_rows(matrix)
    for theme in matrix.themes:
        cells = [_cell(matrix.counts(backend, theme)) for backend in backends]
        title = f"**{THEMES[theme]}**" if detail == "scenarios" else THEMES[theme]
        lines.append(_row([title, *cells]))
        if detail == "scenarios":
            lines += [
                _row([scenario, *(_mark(matrix, scenario, backend) for backend in backends)])
                for scenario in matrix.scenarios(theme)
            ]
    return "\n".join(lines)


_DESCRIBED: Sequence[tuple[str, Callable[[Mapping[str, Any]], str]]] = (
    ("flow", lambda c: str(c["flow"])),
    (
        "`send` waits until a version is",
        lambda c: str(c["default_wait"]),
    ),
    (
        "a version can be sent to nobody",
        lambda c: "no" if c["needs_live_receivers"] else "yes",
    ),
    (
        "a late receiver gets",
        lambda c: "the newest finished version" if c["serves_finished"] else "the next version",
    ),
    ("devices", lambda c: ", ".join(sorted(c["devices"]))),
)


def _capability_rows(matrix: Matrix) -> list[str]:
    rows = []
    for title, describe in _DESCRIBED:
        cells = [
            describe(matrix.capabilities[name]) if matrix.capabilities.get(name) else "?"
            for name in matrix.backends
        ]
        rows.append(_row([title, *cells]))
    return rows


def _cell(counts: Mapping[Outcome, int]) -> str:
    if not counts:
        return ""
    if set(counts) == {Outcome.PASSED}:
        return f"✓ {counts[Outcome.PASSED]}"
    return ("✗ " if Outcome.FAILED in counts else "") + tally(counts)


def _mark(matrix: Matrix, scenario: str, backend: str) -> str:
    result = matrix.get(scenario, backend)
    return MARKS[result.outcome] if result is not None else ""


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
