"""``weightwire conformance``: prove backends, or session stores, with all of the kit."""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, TextIO

import typer

from weightwire.errors import BackendNotFound, BackendUnavailable
from weightwire.plugins import registry

__all__ = ["INSTALL", "conformance"]

INSTALL = "install it with `pip install 'weightwire[conformance]'`"
_INTERRUPTED, _USAGE, _NOTHING_RUN = 2, 4, 5  # pytest's exit codes
_ENDING = (signal.SIGINT, signal.SIGTERM)
_EXIT_CODES = {_INTERRUPTED: 130, _USAGE: 2, _NOTHING_RUN: 2}


def _device(text: str) -> str:
    import torch

    with contextlib.suppress(RuntimeError):
        if torch.device(text).type in ("cpu", "cuda"):
            return text
    raise typer.BadParameter(f"{text!r} is neither cpu nor cuda")


def conformance(
    backends: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Backends to prove.", show_default=False),
    ] = None,
    store: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="Prove a session store instead: where sessions can be made, {} for their names.",
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Each scenario's smallest case, and no soaks.")
    ] = False,
    large: Annotated[
        bool, typer.Option("--large", help="Also what needs gigabytes of memory.")
    ] = False,
    require: Annotated[
        bool, typer.Option("--require", help="A backend that can't run here counts as FAILED.")
    ] = False,
    select: Annotated[
        str, typer.Option("-k", metavar="EXPR", help="Only these scenarios, as pytest's -k.")
    ] = "",
    option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME:]KEY=VALUE", help="A backend's option, or a JSON object of options."
        ),
    ] = None,
    xfail: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="TOML file of expected failures.")
    ] = None,
    patience: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long to wait for any answer.", min=1)
    ] = 60.0,
    device: Annotated[
        str,
        typer.Option(
            "--device",  # typer before 0.29 takes a metavar that is its name in capitals for it
            metavar="DEVICE",
            help="Where tensors lie: cpu, or cuda for one GPU.",
            parser=_device,
        ),
    ] = "cpu",
    jobs: Annotated[
        int | None, typer.Option("--jobs", "-j", metavar="N", min=1, help="Scenarios at once.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write one self-contained page.")
    ] = None,
    markdown: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the support table, or refresh the one in FILE."),
    ] = None,
    junit: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write JUnit XML, outcomes as properties.")
    ] = None,
) -> None:
    """Run every scenario over each backend, with real processes, and show the matrix.

    With --store: every promise of a session store, over the scheme of each URL.
    Exit code 1 when anything FAILED.
    """
    if bool(backends) == bool(store):
        raise typer.BadParameter("name backends, or stores by --store URL: one of the two")
    backends = backends or []
    if importlib.util.find_spec("pytest") is None:
        raise BackendUnavailable(f"the conformance kit needs pytest: {INSTALL}")
    try:
        for name in dict.fromkeys(backends):
            _refuse_unknown(name)
    except BackendNotFound as error:  # as wrong as an option that there isn't
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        raise typer.Exit(_EXIT_CODES[_USAGE]) from None
    arguments = [f"--weightwire-backend={name}" for name in backends]
    arguments += [f"--weightwire-store={url}" for url in store or ()]
    arguments += [f"--weightwire-option={text}" for text in option or ()]
    arguments += [f"--weightwire-xfail={path.absolute()}" for path in xfail or ()]
    arguments += [
        f"--weightwire-{flag}"
        for flag, wanted in (("quick", quick), ("large", large), ("require", require))
        if wanted
    ]
    arguments.append(f"--weightwire-patience={patience}")
    arguments.append(f"--weightwire-device={device}")
    if jobs is not None:
        arguments.append(f"--weightwire-jobs={jobs}")
    if select:
        arguments += ["-k", select]
    for flag, path in (("--weightwire-html", html), ("--weightwire-markdown", markdown)):
        if path is not None:
            arguments.append(f"{flag}={path.absolute()}")
    if junit is not None:
        arguments.append(f"--junitxml={junit.absolute()}")
    suite = "weightwire_conformance.stores" if store else "weightwire_conformance"
    code = _run(suite, arguments, as_json=as_json)
    if code == _NOTHING_RUN and select and not store:
        near = ", ".join(_nearest(select))
        print(f"no scenario fits -k {select!r}: the nearest are {near}", file=sys.stderr)
    raise typer.Exit(_EXIT_CODES.get(code, code))


def _nearest(expression: str) -> list[str]:
    from weightwire_conformance.scenario import cases

    names = list(dict.fromkeys(case.name.partition("[")[0] for case in cases(large=True)))
    return difflib.get_close_matches(expression, names, 3, 0.0)


def _refuse_unknown(name: str) -> None:
    """``BackendNotFound`` for a name that nothing claims; a broken plug-in is a result."""
    known = {provided.name for provided in registry().backends()}
    if name not in known:
        registry().backend(name)


def _run(suite: str, arguments: list[str], *, as_json: bool) -> int:
    with tempfile.TemporaryDirectory(prefix="weightwire-conformance-") as directory:
        # Away from any project's own pytest configuration.
        configuration = Path(directory) / "pytest.ini"
        configuration.write_text("[pytest]\n")
        results = Path(directory) / "results.json"
        command = [
            *(sys.executable, "-m", "pytest", "--pyargs", suite),
            *("-c", str(configuration), "--rootdir", directory, "-p", "no:cacheprovider"),
            *("-q", "--no-header", "-r", "N", "--import-mode=importlib"),
            *arguments,
        ]
        if as_json:
            command.append(f"--weightwire-json={results}")
        # With --json, stdout is for the object alone.
        code = _end_well(command, sys.stderr if as_json else None)
        if as_json and results.exists():
            print(results.read_text())
    return code


def _end_well(command: list[str], stdout: TextIO | None) -> int:
    """Run pytest to its end; an interrupt or a SIGTERM of ours is one interrupt of it.

    It then ends the scenarios' processes, removes what they hold, and still reports.
    """
    run: subprocess.Popen[bytes] | None = None
    asked = 0

    def interrupt(number: int, frame: object) -> None:
        nonlocal asked
        asked += 1
        if run is None:
            return  # it is told once it has started
        if asked > 1:
            run.kill()  # whoever asks twice gets a hard end
        else:
            run.send_signal(signal.SIGINT)

    # Before pytest starts: of what runs in the background SIGINT is ignored, which a process
    # inherits, unless its parent handles it.
    before = {number: signal.signal(number, interrupt) for number in _ENDING}
    try:
        run = subprocess.Popen(command, stdout=stdout, start_new_session=True)
        if asked:
            run.send_signal(signal.SIGINT)
        return run.wait()
    finally:
        if run is not None:
            run.kill()
        for number, handler in before.items():
            signal.signal(number, handler)
