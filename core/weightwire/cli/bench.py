"""``weightwire bench``: a backend's speed beside the raw costs, in one run."""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path
from typing import Annotated

import typer

from weightwire.errors import BackendUnavailable, ConfigError, UnsupportedOperation
from weightwire.plugins import registry

__all__ = ["bench"]

_MOST_GIGABYTES = 10_000.0


def bench(
    backend: Annotated[str, typer.Argument(help="Backend to measure.")],
    gigabytes: Annotated[float, typer.Option(help="Size of the state dict, in 10^9 bytes.")] = 1.0,
    repeats: Annotated[int, typer.Option(help="Measured rounds after one warm-up.", min=1)] = 7,
    directory: Annotated[
        list[Path] | None,
        typer.Option(
            help="Where to write, for backends that write files; may be given several times. "
            "By default /dev/shm and the current directory."
        ),
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of a side.", min=1)] = None,
    device: Annotated[
        str | None, typer.Option(help="'cpu', 'cuda' or 'cuda:0', where the backend can.")
    ] = None,
    receiver_device: Annotated[
        str | None, typer.Option(help="The receiver's, if it is another, such as 'cuda:1'.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Measure a backend between two processes, with the raw costs of the same bytes beside it."""
    chosen = registry().backend(backend)
    chosen.probe()  # rather here than in a child
    package = type(chosen).__module__.rpartition(".")[0]
    try:
        module = importlib.import_module(f"{package}.bench")
    except ModuleNotFoundError as error:
        if error.name != f"{package}.bench":
            raise BackendUnavailable(
                f"the benchmark of {backend!r} needs {error.name}: install it"
            ) from error
        raise UnsupportedOperation(
            f"backend {backend!r} has no benchmark: its package {package} has no bench module"
        ) from error
    wanted = {"device": device, "receiver_device": receiver_device}
    choice = {name: value for name, value in wanted.items() if value is not None}
    for name in choice.keys() - inspect.signature(module.run).parameters.keys():
        raise UnsupportedOperation(
            f"the benchmark of {backend!r} has no choice of {name}: "
            f"leave --{name.replace('_', '-')} out"
        )
    if not 0 < gigabytes <= _MOST_GIGABYTES:
        raise ConfigError(
            f"--gigabytes {gigabytes:g}: give more than 0 and at most {_MOST_GIGABYTES:g}"
        )
    result = module.run(int(gigabytes * 1e9), directory or [], repeats, threads, **choice)
    if as_json:
        print(json.dumps(result))
    else:
        module.show(result)
