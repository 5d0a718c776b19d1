"""``weightwire backends``: what is installed, what it can do, and what can't run here."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from weightwire.contract import Backend
from weightwire.errors import WeightWireError
from weightwire.plugins import Provided, probe, registry

__all__ = ["backends"]


@dataclass(frozen=True)
class _Row:
    name: str
    distribution: str
    summary: str
    available: bool
    reason: str
    capabilities: dict[str, Any]


def backends(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """List installed backends, their capabilities, and why one can't run here."""
    installed = registry().backends()
    with ThreadPoolExecutor(max(1, len(installed))) as threads:  # one that hangs delays no other
        rows = list(threads.map(_look_at, installed))
    if as_json:
        print(json.dumps({"backends": [asdict(row) for row in rows]}, indent=2))
        return
    table = Table(
        title="backends", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False,
        collapse_padding=True,
    )  # fmt: skip
    for heading in ("name", "from", "runs", "flow", "late joiners", "ranged", "devices"):
        table.add_column(heading, no_wrap=heading in ("name", "flow"), overflow="fold")
    for row in rows:
        caps = row.capabilities
        table.add_row(
            row.name,
            row.distribution,
            "[green]yes[/]" if row.available else "[red]no[/]",
            str(caps.get("flow", "?")),
            "finished" if caps.get("serves_finished") else "next offer",
            "yes" if caps.get("ranged_reads") else "no",
            ", ".join(caps.get("devices", [])),
        )
    console = Console()
    console.print(table)
    for row in rows:
        if not row.available:
            console.print(f"[bold]{row.name}[/]: ", end="")
            console.print(row.reason, markup=False, soft_wrap=True)


def _look_at(provided: Provided) -> _Row:
    backend = provided.value
    if not isinstance(backend, Backend):
        return _Row(provided.name, provided.distribution, "", False, str(provided.error), {})
    reason = ""
    try:
        registry().backend(provided.name)
        probe(backend)
    except WeightWireError as error:
        reason = str(error)
    capabilities = asdict(backend.capabilities)
    capabilities["devices"] = sorted(capabilities["devices"])
    return _Row(
        provided.name,
        provided.distribution,
        backend.summary,
        not reason,
        reason,
        capabilities,
    )
