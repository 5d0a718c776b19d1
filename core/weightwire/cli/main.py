"""Entry point of the ``weightwire`` command: its subcommands, errors and exit codes.

Exit codes: 0 done, 1 it failed (the first line on stderr says what and the
remedy), 2 the command line is wrong, 130 interrupted.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from weightwire._version import __version__
from weightwire.cli import backends, bench, chaos, conformance, demo, doctor, inspect, plan
from weightwire.cli.stubs import ANY_ARGUMENTS
from weightwire.errors import PluginError, WeightWireError
from weightwire.plugins import registry
from weightwire.units import printable

__all__ = ["app", "main"]


_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EPIPE)


class _Commands(TyperGroup):
    """The built-in subcommands, which no plug-in replaces, and those of plug-ins.

    Plug-ins are loaded when all are listed, or for a name that isn't built in.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        ours = super().list_commands(ctx)
        return ours + [name for name in registry().command_names() if name not in ours]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        ours = super().get_command(ctx, cmd_name)
        if ours is not None or cmd_name not in registry().command_names():
            return ours
        try:
            return _command(cmd_name, registry().command(cmd_name))
        except PluginError as error:  # it hurts who calls it, and not who lists all
            return _command(cmd_name, _refusal(error))


def _command(name: str, function: Callable[..., object]) -> Any:
    made = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    settings = getattr(function, "context_settings", None)
    made.command(name, context_settings=settings)(function)
    return typer.main.get_command(made)


def _refusal(error: PluginError) -> Callable[[], None]:
    def refuse() -> None:
        raise error

    refuse.__doc__ = str(error)
    refuse.context_settings = ANY_ARGUMENTS  # type: ignore[attr-defined]  # read by _command
    return refuse


app = typer.Typer(
    name="weightwire",
    cls=_Commands,
    help="Move RL policy weights from trainers to running inference engines.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command("backends")(backends.backends)
app.command("doctor")(doctor.doctor)
app.command("inspect")(inspect.inspect)
app.command("demo")(demo.demo)
app.command("bench")(bench.bench)
app.command("conformance")(conformance.conformance)
app.command("chaos")(chaos.chaos)
app.command("plan")(plan.plan)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    del version


def main() -> None:
    """Run the command; an error of weightwire's tree becomes one line and exit code 1."""
    try:
        try:
            app()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # here, where a full disk can still be told
    except WeightWireError as error:
        _complain(type(error).__name__, str(error))
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        if error.filename is not None or error.errno not in _UNWRITABLE:
            raise
        _forget_output()
        if error.errno != errno.EPIPE:  # whoever read it has gone, and knows
            _complain("OSError", f"{error.strerror}: make room for what this command writes")
        sys.exit(1)


def _complain(kind: str, message: str) -> None:
    """An error's name and message; what others wrote into it is data."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    first, _, rest = printable(message).partition("\n")
    console.print(f"[bold red]{kind}:[/] ", end="")
    console.print(first, markup=False)
    if rest:
        console.print(rest, markup=False)


def _forget_output() -> None:
    """Nothing more is written to stdout; the interpreter would try again, and say so."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
