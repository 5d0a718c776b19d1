"""``weightwire plan``: what each rank reads from whom, before anything runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from weightwire.cli.page_file import refuse_page, write_page
from weightwire.errors import ConfigError
from weightwire.options import DEFAULT_GROUP_BYTES
from weightwire.topology import parse_inference, parse_ranks, parse_trainer
from weightwire.units import human_bytes

if TYPE_CHECKING:
    from weightwire.planning import Plan

__all__ = ["plan"]


def plan(
    model: Annotated[Path, typer.Argument(help="Directory with a Hugging Face config.json.")],
    trainer: Annotated[
        str, typer.Option(help="The trainer's axes: dp, fsdp, ep; such as fsdp=8,ep=4.")
    ] = "fsdp=1",
    inference: Annotated[
        str, typer.Option(help="The engine's axes: tp, pp, dp, ep; such as tp=2.")
    ] = "tp=1",
    ranks: Annotated[str, typer.Option(help="Inference ranks: all, or 0, or 0,3.")] = "all",
    engine: Annotated[str, typer.Option(help="Engine whose planner is asked.")] = "vllm",
    wire_dtype: Annotated[
        str | None, typer.Option(help="Dtype on the wire; the config's own by default.")
    ] = None,
    group_bytes: Annotated[
        int, typer.Option(help="Budget of a transfer group, in bytes.", min=8)
    ] = DEFAULT_GROUP_BYTES,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page to look at.")] = None,
) -> None:
    """Show what each inference rank reads from whom, by the engine's own tracer; no weights."""
    from weightwire.plan_page import page
    from weightwire.planning import Plan, PlanRequest, find_planner
    from weightwire.table import DTYPES

    topology = parse_inference(inference)
    if wire_dtype is not None and wire_dtype not in DTYPES:
        raise ConfigError(f"--wire-dtype {wire_dtype}: use one of {', '.join(DTYPES)}")
    refuse_page(html)
    request = PlanRequest(
        model=model,
        trainer=parse_trainer(trainer),
        inference=topology,
        ranks=parse_ranks(ranks, topology.world_size),
        wire_dtype=wire_dtype,
        group_bytes=group_bytes,
    )
    planner = find_planner(engine)
    result = Plan(request)
    with Progress(console=Console(stderr=True), transient=True, disable=as_json) as progress:
        task = progress.add_task("planning ranks", total=len(request.ranks))
        for rank in planner(request):
            result.ranks.append(rank)
            progress.advance(task)
    if html is not None:
        write_page(html, page(result))
    if as_json:
        print(json.dumps(result.as_json()))
    else:
        _show(result, html)


def _show(plan: Plan, html: Path | None) -> None:
    console = Console()
    table = Table(title=str(plan.request.model), title_justify="left")
    for column in ("rank", "reads", "descriptors", "groups", "owners", "replayed", "arena"):
        table.add_column(column, justify="right")
    for rank in plan.ranks:
        table.add_row(
            str(rank.rank),
            human_bytes(rank.nbytes),
            f"{rank.descriptors:,}",
            str(len(rank.groups)),
            str(len(rank.owners)),
            f"{rank.replayed:,}",
            human_bytes(max((group.nbytes for group in rank.groups), default=0)),
        )
    console.print(table)
    total = sum(rank.nbytes for rank in plan.ranks)
    descriptors = sum(rank.descriptors for rank in plan.ranks)
    console.print(
        f"in all {human_bytes(total)} in {descriptors:,} descriptors; largest arena "
        f"{human_bytes(plan.largest_group_bytes)}"
    )
    if plan.unmatched:
        console.print(f"[red]{len(plan.unmatched)} unmatched names:[/]")
        for name in plan.unmatched[:20]:
            console.print(f"  {name}", markup=False)
    if html is not None:
        console.print(f"wrote {html}", markup=False)
