"""``weightwire inspect``: a session's versions, sentinels and members."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from weightwire.cli.page_file import refuse_page, write_page
from weightwire.deadline import Deadline
from weightwire.errors import AuthenticationError, SessionError
from weightwire.inspection import (
    AnswerView,
    MemberView,
    SessionView,
    VersionView,
    inspect_session,
)
from weightwire.report import PHASES
from weightwire.session.lease import LeaseObserver
from weightwire.session.session import Session
from weightwire.session_page import session_page
from weightwire.units import human_seconds, printable, rate

__all__ = ["inspect"]

_MOST_ANSWERS = 40


def inspect(
    session: Annotated[
        str,
        typer.Argument(help="Session URL: file:///dir, tcp://host:port/name or redis://host/name."),
    ],
    watch: Annotated[
        bool, typer.Option("--watch", "--follow", help="Redraw until interrupted.")
    ] = False,
    interval: Annotated[
        float, typer.Option(help="Seconds between looks.", min=0.1, max=86400)
    ] = 1.0,
    limit: Annotated[int, typer.Option(help="How many versions to show.", min=1)] = 20,
    timeout: Annotated[float, typer.Option(help="Seconds for reaching the session.")] = 10.0,
    html: Annotated[
        Path | None,
        typer.Option(help="Write a page with the phases of the versions shown; at each look."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object on stdout (with --watch: one a line).")
    ] = False,
) -> None:
    """Show versions, receivers, phases, rates, lags and mismatches of a session.

    Exit code 1 when it can't be reached, or holds records that can't be read.
    """
    refuse_page(html)
    with contextlib.closing(_Looked(session, timeout)) as looked:

        def look() -> SessionView:
            view = looked.look(limit)
            if html is not None:
                write_page(html, session_page(view))
            return view

        if watch:
            _follow(look, interval, as_json)
            return
        view = look()
        _show_once(view, as_json)
        if html is not None and not as_json:
            Console(soft_wrap=True).print(f"wrote {html}", markup=False)
        if view.unreadable:
            raise typer.Exit(1)


class _Looked:
    """A session that is looked at, and opened again when it was lost or made anew."""

    def __init__(self, url: str, timeout: float) -> None:
        self._url, self._timeout = url, timeout
        self._opened: Session | None = None
        self._observer: LeaseObserver | None = None

    def look(self, limit: int) -> SessionView:
        try:
            if self._opened is not None and self._opened.is_replaced():
                self.close()
            if self._opened is None or self._observer is None:
                deadline = Deadline(self._timeout)
                self._opened = Session.open(self._url, deadline=deadline, read_only=True)
                self._observer = LeaseObserver(self._opened)
            return inspect_session(self._opened, self._observer, limit)
        except SessionError:
            self.close()
            raise

    def close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            with contextlib.suppress(SessionError):
                opened.close()


def _follow(look: Callable[[], SessionView], interval: float, as_json: bool) -> None:
    """Look until interrupted; a session that was there once is waited for when it has gone."""
    last = look()
    lost = ""
    with contextlib.nullcontext() if as_json else Live(auto_refresh=False) as live:
        while True:
            if live is not None:
                waits = Text(f"waiting: {printable(lost)}", style="yellow") if lost else Text()
                live.update(Group(_render(last), waits), refresh=True)
            elif not lost:
                print(json.dumps(last.to_dict()), flush=True)
            time.sleep(interval)
            try:
                last, lost = look(), ""
            except AuthenticationError:
                raise
            except SessionError as error:
                if as_json and not lost:
                    print(f"waiting: {printable(str(error))}", file=sys.stderr, flush=True)
                lost = str(error)


def _show_once(view: SessionView, as_json: bool) -> None:
    if as_json:
        print(json.dumps(view.to_dict(), indent=2))
    else:
        Console().print(_render(view))


def _render(view: SessionView) -> RenderableType:
    members = ((view.sender,) if view.sender else ()) + view.receivers
    parts: list[RenderableType] = [
        Text(f"session {view.url}  (id {view.session_id})", style="bold"),
        _members(view, members),
        *_notes((_who(view, member), "", member.error) for member in members),
        _versions(view),
        *_notes((_which(v), _phases(v.phases), _errors(v)) for v in view.versions),
    ]
    if view.versions and view.versions[0].answers:
        answers = view.versions[0].answers[:_MOST_ANSWERS]
        parts.append(_answers(view.versions[0], answers))
        parts += _notes((a.receiver_id, _phases(a.phases), a.error) for a in answers)
    parts += [Text(f"left out: {why}", style="red") for why in view.unreadable]
    return Group(*parts)


def _notes(lines: Iterable[tuple[str, str, str]]) -> list[Text]:
    """What is too long for a table: of whom, phases, and an error."""
    found = []
    for name, phases, error in lines:
        if phases:
            found.append(Text(f"{name}: {phases}", style="dim"))
        if error:
            found.append(Text(f"{name}: {error}", style="red"))
    return found


def _who(view: SessionView, member: MemberView) -> str:
    return f"sender #{member.incarnation}" if member is view.sender else member.member_id


def _which(version: VersionView) -> str:
    retry = f".{version.attempt}" if version.attempt > 1 else ""
    return f"{version.version}{retry} (#{version.incarnation})"


def _members(view: SessionView, members: Iterable[MemberView]) -> Table:
    table = Table(title="members", title_justify="left")
    for heading in (
        "who",
        "ranks",
        "process",
        "alive",
        "state",
        "serves",
        "behind",
        "joined ago",
    ):
        table.add_column(heading, overflow="fold")
    for member in members:
        table.add_row(
            Text(_who(view, member)),
            str(member.world_size),
            Text(f"{member.pid}@{member.host}"),
            "[green]yes[/]" if member.alive else "[red]no[/]",
            "" if member is view.sender else member.state or "idle",
            "" if member.serving is None else f"{member.serving}",
            f"[yellow]{member.behind}[/] ({_age(member.lag_s)})" if member.behind else "",
            _age(member.age_s),
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
    ):
        table.add_column(heading, overflow="fold")
    colours = {"finished": "green", "aborted": "red", "started": "yellow", "offered": "yellow"}
    for version in view.versions:
        table.add_row(
            _which(version),
            f"[{colours.get(version.state, 'yellow')}]{version.state}[/]"
            + (" (dropped)" if version.retired else ""),
            f"{version.nbytes / 1e9:.3f}",
            "" if version.seconds is None else f"{version.seconds:.3f}",
            "" if not version.seconds else f"{rate(version.nbytes, version.seconds):.2f}",
            _count(version.ready, version) if version.ready else "-",  # stored ones ask nobody
            _count(version.applied, version),
            _age(version.age_s),
        )
    return table


def _count(answers: Mapping[str, str], version: VersionView) -> str:
    """How many of the roster said yes; of stored versions others read, too."""
    done = sum(answer == "yes" for answer in answers.values())
    return f"{done}/{len(version.roster)}" if done <= len(version.roster) else f"{done}"


def _errors(version: VersionView) -> str:
    """Why it failed; or who holds other bits than the others."""
    if version.error:
        return version.error
    wrong = [f"{a.receiver_id} ({a.bits})" for a in version.answers if a.mismatch]
    return f"other bits than their peers: {', '.join(wrong)}" if wrong else ""


def _answers(version: VersionView, shown: Sequence[AnswerView]) -> Table:
    """Who is where with the newest version."""
    table = Table(title=f"version {version.version}, by receiver", title_justify="left")
    for heading in ("receiver", "phase", "GB", "GB/s", "digest"):
        table.add_column(heading, overflow="fold")
    for answer in shown:
        done = "yes" if version.applied.get(answer.receiver_id) == "yes" else ""
        table.add_row(
            Text(answer.receiver_id),
            answer.phase or ("applied" if done else "failed" if answer.error else ""),
            f"{answer.nbytes / 1e9:.3f}" if done else "",
            f"{answer.gbps:.2f}" if done else "",
            Text(answer.digest, style="red" if answer.mismatch else ""),
        )
    if len(version.answers) > len(shown):
        table.caption = f"and {len(version.answers) - len(shown)} more"
    return table


def _phases(phases: Mapping[str, float]) -> str:
    """Those that took more than a hundredth of all, in their order."""
    total = sum(phases.values())
    shown = [name for name in PHASES if phases.get(name, 0.0) > 0.01 * total]
    return " ".join(f"{name} {human_seconds(phases[name])}" for name in shown)


def _age(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h"
