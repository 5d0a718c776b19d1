"""Refresh the support tables of a page from JSON reports of ``weightwire conformance``.

For backends that ran on different machines, or in pieces::

    python scripts/support_table.py memory.json nccl.json README.md
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from weightwire.plugins import registry
from weightwire_conformance.matrix import Matrix
from weightwire_conformance.outcomes import Outcome, Result
from weightwire_conformance.reports.markdown import write_markdown
from weightwire_conformance.scenario import cases


def main(reports: list[str], page: str) -> None:
    ran: dict[tuple[str, str], dict[str, object]] = {}
    for report in reports:
        for backend, found in json.loads(Path(report).read_text())["backends"].items():
            ran |= {(backend, scenario): result for scenario, result in found.items()}
    backends = dict.fromkeys(backend for backend, _ in ran)
    matrix = Matrix(
        Result(backend, case.name, case.theme, Outcome(ran[backend, case.name]["outcome"]))
        for case in cases(large=True)
        for backend in backends
        if (backend, case.name) in ran
    )
    for backend in backends:
        capabilities = registry().backend(backend).capabilities
        matrix.capabilities[backend] = vars(capabilities)
    write_markdown(Path(page), matrix)


if __name__ == "__main__":
    main(sys.argv[1:-1], sys.argv[-1])
