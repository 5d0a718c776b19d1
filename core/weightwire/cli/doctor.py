"""``weightwire doctor``: what is installed and usable here, found by doing it."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import unquote, urlsplit

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from weightwire._version import __version__
from weightwire.doctor import Check, Examination, Finding
from weightwire.doctor.builtin import CHECKS
from weightwire.units import printable

__all__ = ["SCHEMA", "doctor"]

SCHEMA = 1
"""Of what ``--json`` prints; rises when something in it changes its meaning or goes."""

_COLOURS = {"ok": "green", "warning": "yellow", "failed": "red", "absent": "dim"}


def doctor(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME",
            help="Only these: groups (host, torch, directory, session, nixl, vllm, ...) or single "
            "checks (nixl.read). A check that is named must be there, of a group something.",
        ),
    ] = None,
    session: Annotated[
        str | None, typer.Option(help="Session URL that must be reachable from here.")
    ] = None,
    directory: Annotated[
        Path | None, typer.Option(help="Directory for a session; that of a file:// URL by default.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Try what is installed here: tensors, GPUs, transports, limits, a session; with remedies.

    Each verdict comes from doing the thing, in child processes with deadlines.  Exit code 0:
    usable; 1: something is broken, or something that was asked for isn't here; 2: wrong usage.
    """
    for option, given in (("--session", session), ("--directory", directory)):
        if not _is_text(str(given)):
            raise typer.BadParameter(f"{option} {str(given)!r} isn't valid Unicode: name another")
    place = str(directory.absolute()) if directory is not None else _directory_of(session)
    with (
        _ended_by_sigterm(),
        Examination(session=session or "", directory=place) as here,
        Progress(console=Console(stderr=True), transient=True, disable=as_json) as progress,
    ):
        task = progress.add_task("looking for plug-ins", total=None)
        ours = {check.name for check in CHECKS} | {check.group for check in CHECKS}
        if names and ours.issuperset(names):  # no plug-in is needed for those
            known: list[Check] = list(CHECKS)
            findings: list[Finding] = []
        else:
            known, findings = here.known()
        checks = _chosen(known, names or [])
        if names:
            findings = [f for f in findings if f.check.name in names or f.check.group in names]
        progress.update(task, description="checking", total=len(checks))
        findings += here.run(checks, lambda _: progress.advance(task))
    asked = set(names or [])
    if session is not None:
        asked.add("session")
    if directory is not None or (session or "").startswith("file:"):
        asked.add("directory")
    broken = _broken(findings, asked)
    if as_json:
        print(json.dumps(_as_json(findings, asked, not broken), indent=2))
    else:
        _show(findings, broken)
    raise typer.Exit(1 if broken else 0)


def _is_text(text: str) -> bool:
    """Whether it has bytes that the children, and ``--json``, couldn't be told."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends this as an interrupt does: children and what they wrote go with it."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _directory_of(session: str | None) -> str:
    """The directory of a ``file://`` session, else nothing."""
    try:
        parts = urlsplit(session or "")
    except ValueError:  # opening the session says what is wrong
        return ""
    return unquote(parts.path) if parts.scheme == "file" and parts.path else ""


def _chosen(known: list[Check], names: list[str]) -> list[Check]:
    all_names = {check.name for check in known} | {check.group for check in known} | {"plugins"}
    for name in names:
        if name not in all_names and not name.startswith("plugins."):
            groups = ", ".join(sorted({check.group for check in known}))
            raise typer.BadParameter(f"nothing here is called {name!r}; groups: {groups}")
    return [c for c in known if not names or c.name in names or c.group in names]


def _is_asked(found: Finding, asked: set[str]) -> bool:
    return found.check.name in asked or found.check.group in asked


def _broken(findings: list[Finding], asked: set[str]) -> list[Finding]:
    """Those for which the exit code is 1.

    What is absent counts where it was named itself; of a group that was named, where nothing
    of it is here, or its backend can't run.
    """
    present = {found.check.group for found in findings if found.verdict.state != "absent"}

    def is_missed(found: Finding) -> bool:
        check = found.check
        stands_for_all = check.group not in present or check.name == f"{check.group}.probe"
        return check.name in asked or (check.group in asked and stands_for_all)

    return [
        found
        for found in findings
        if found.verdict.state == "failed" or (found.verdict.state == "absent" and is_missed(found))
    ]


def _as_json(findings: list[Finding], asked: set[str], usable: bool) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "weightwire": __version__,
        "python": platform.python_version(),
        "platform": sys.platform,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "usable": usable,
        "checks": [
            {
                "name": found.check.name,
                "group": found.check.group,
                "title": found.check.title,
                "state": found.verdict.state,
                "asked": _is_asked(found, asked),
                "summary": found.verdict.summary,
                "remedy": found.verdict.remedy,
                "seconds": round(found.took, 3),
                "details": msgspec.to_builtins(found.verdict.details),
            }
            for found in findings
        ],
    }


def _show(findings: list[Finding], broken: list[Finding]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    group = ""
    for found in findings:
        if found.check.group != group:
            group = found.check.group
            console.print(f"[bold]{escape(group)}[/]")
        verdict = found.verdict
        what = found.check.name.partition(".")[2]
        console.print(
            f"  [{_COLOURS[verdict.state]}]{verdict.state:8}[/]{escape(what)}: "
            f"{escape(printable(verdict.summary))}"
        )
        if verdict.state in ("warning", "failed") or found in broken:
            console.print(f"          [bold]remedy[/] {escape(printable(verdict.remedy))}")
    if broken:
        names = ", ".join(found.check.name for found in broken)
        console.print(f"[red]broken:[/] {escape(names)}")
    else:
        console.print("[green]usable[/]")
