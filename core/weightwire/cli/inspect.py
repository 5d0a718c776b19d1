"""``weightwire inspect``: a session's versions, sentinels and members."""

from __future__ import annotations

import json
import time
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from weightwire.deadline import Deadline
from weightwire.inspection import SessionView, inspect_session
from weightwire.session.lease import LeaseObserver
from weightwire.session.session import Session

__all__ = ["inspect"]


def inspect(
    session: Annotated[
        str,
        typer.Argument(help="Session URL: file:///dir, tcp://host:port/name or redis://host/name."),
    ],
    watch: Annotated[bool, typer.Option("--watch", help="Redraw until interrupted.")] = False,
    interval: Annotated[float, typer.Option(help="Seconds between looks.", min=0.1)] = 1.0,
    limit: Annotated[int, typer.Option(help="How many versions to show.", min=1)] = 20,
    timeout: Annotated[float, typer.Option(help="Seconds for reaching the session.")] = 10.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object on stdout (with --watch: one a line).")
    ] = False,
) -> None:
    """Show versions, sentinels, receivers and ages of a session."""
    opened = Session.open(session, deadline=Deadline(timeout), read_only=True)
    observer = LeaseObserver(opened)
    try:
        if not watch:
            _show_once(inspect_session(opened, observer, limit), as_json)
            return
        if as_json:
            while True:
                view = inspect_session(opened, observer, limit)
                print(json.dumps(view.to_dict()), flush=True)
                time.sleep(interval)
        with Live(console=Console(), auto_refresh=False) as live:
            while True:
                live.update(_render(inspect_session(opened, observer, limit)), refresh=True)
                time.sleep(interval)
    finally:
        opened.close()


def _show_once(view: SessionView, as_json: bool) -> None:
    if as_json:
        print(json.dumps(view.to_dict(), indent=2))
    else:
        Console().print(_render(view))


def _render(view: SessionView) -> RenderableType:
    return Group(
        Text(f"session {view.url}  (id {view.session_id})", style="bold"),
        _members(view),
        _versions(view),
    )


def _members(view: SessionView) -> Table:
    table = Table(title="members", title_justify="left")
    for heading in ("who", "ranks", "process", "alive", "state", "serves", "joined ago", "error"):
        table.add_column(heading, no_wrap=heading != "error", overflow="fold")
    for member in ((view.sender,) if view.sender else ()) + view.receivers:
        is_sender = member is view.sender
        table.add_row(
            Text(f"sender #{member.incarnation}" if is_sender else member.member_id),
            str(member.world_size),
            Text(f"{member.pid}@{member.host}"),
            "[green]yes[/]" if member.alive else "[red]no[/]",
            "" if is_sender else (member.state or "idle") if member.alive else "gone",
            "" if member.serving is None else f"{member.serving}",
            _age(member.age_s),
            Text(member.error),
        )
    return table


def _versions(view: SessionView) -> Table:
    table = Table(title="versions", title_justify="left")
    for heading in (
        "version",
        "state",
        "GB",
        "seconds",
        "GB/s",
        "ready",
        "applied",
        "ago",
        "error",
    ):
        table.add_column(heading, no_wrap=heading != "error", overflow="fold")
    colours = {"finished": "green", "aborted": "red", "started": "yellow", "offered": "yellow"}
    for version in view.versions:
        retry = f".{version.attempt}" if version.attempt > 1 else ""
        table.add_row(
            f"{version.version}{retry} (#{version.incarnation})",
            f"[{colours[version.state]}]{version.state}[/]"
            + (" (dropped)" if version.retired else ""),
            f"{version.nbytes / 1e9:.3f}",
            "" if version.seconds is None else f"{version.seconds:.3f}",
            "" if not version.seconds else f"{version.nbytes / version.seconds / 1e9:.2f}",
            f"{sum(v == 'yes' for v in version.ready.values())}/{len(version.roster)}",
            f"{sum(v == 'yes' for v in version.applied.values())}/{len(version.roster)}",
            _age(version.age_s),
            Text(version.error),
        )
    return table


def _age(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h"
