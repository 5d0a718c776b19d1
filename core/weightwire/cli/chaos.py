"""``weightwire chaos``: a session under random faults, for a few minutes, by hand."""

from __future__ import annotations

import importlib.util
import json
import random
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from weightwire.cli.conformance import INSTALL
from weightwire.config import select
from weightwire.errors import BackendUnavailable, ConfigError

if TYPE_CHECKING:
    from weightwire_conformance.chaos import ChaosReport

__all__ = ["chaos"]


def chaos(
    backend: Annotated[str, typer.Argument(metavar="NAME", help="Backend to try.")],
    minutes: Annotated[float, typer.Option(help="End after so many minutes.", min=0.1)] = 3.0,
    versions: Annotated[
        int, typer.Option(help="Or when so many versions have reached the pool.", min=1)
    ] = 300,
    each: Annotated[int, typer.Option(help="And each fault has come so often.", min=0)] = 30,
    seed: Annotated[
        int | None, typer.Option(help="Replays a run; by default another one each time.", min=0)
    ] = None,
    fault: Annotated[
        list[str] | None, typer.Option(metavar="KIND", help="Only these kinds of faults.")
    ] = None,
    session: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="A session server, redis://host:port/name, reached through a proxy that slows "
            "and cuts; by default a directory.",
        ),
    ] = "",
    patience: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long to wait for any answer.", min=1)
    ] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Send versions to a changing pool while processes are killed, stopped and restarted.

    An outside observer compares what replicas hold with what they say.  Exit code 1 when
    something was wrong.
    """
    if importlib.util.find_spec("weightwire_conformance") is None:
        raise BackendUnavailable(f"chaos needs the conformance kit: {INSTALL}")
    from weightwire_conformance.chaos import FAULTS, ChaosOptions, run
    from weightwire_conformance.rig import Pool

    select(backend)  # before anything is started for nothing
    known = [each.name for each in FAULTS]
    for kind in fault or ():
        if kind not in known:
            raise ConfigError(f"no fault {kind!r}: there are {', '.join(known)}")
    options = ChaosOptions(
        backend,
        random.SystemRandom().randrange(1 << 31) if seed is None else seed,
        versions=versions,
        each=each,
        seconds=minutes * 60,
        kinds=tuple(fault or ()),
        session=session,
    )
    console = Console(stderr=True, highlight=False)
    console.print(f"chaos over {backend!r} with seed {options.seed}")
    pool = Pool(patience=patience)
    try:
        with console.status("starting") as status:
            report = run(options, pool, lambda so_far: status.update(_progress(so_far)))
    finally:
        pool.close()
    if as_json:
        print(json.dumps(report.to_dict()))
    else:
        _show(report)
    raise typer.Exit(0 if report.ok else 1)


def _progress(report: ChaosReport) -> str:
    faults = sum(report.faults.values())
    return f"{report.versions} versions, {faults} faults, {report.seconds:.0f} s"


def _show(report: ChaosReport) -> None:
    console = Console(highlight=False)
    table = Table("fault", "times", "failed sends", "noticed, median s", "recovered, median s")
    told = report.to_dict()
    for kind, times in sorted(report.faults.items()):
        noticed = told["detection_seconds"].get(kind, {})
        recovered = told["recovery_seconds"].get(kind, {})
        table.add_row(
            kind,
            str(times),
            str(noticed.get("count", 0)),
            str(noticed.get("median", "")),
            str(recovered.get("median", "")),
        )
    for kind, why in report.impossible.items():
        table.add_row(kind, "", why)
    console.print(table)
    wait, deadline = report.longest_wait
    console.print(
        f"{report.versions} versions in {report.seconds:.0f} s; {report.checks} times a replica's "
        f"memory was compared with what it named; longest wait {wait:.2f} s of {deadline:g} s"
    )
    for line in report.wrong:
        console.print(f"WRONG  {line}", style="bold red", markup=False)
    for line in report.problems:
        console.print(f"PROBLEM  {line}", style="bold red", markup=False)
    if report.ok:
        console.print("nothing was wrong")
