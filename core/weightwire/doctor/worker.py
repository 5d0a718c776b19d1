"""A child of the doctor: calls what it is told to, and writes what that returns.

For each step a line ``{"begin": n}`` and then ``{"value": ...}`` or ``{"error": ...}``.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import msgspec

from weightwire.doctor.check import CheckOptions, Verdict
from weightwire.doctor.children import Request
from weightwire.errors import WeightWireError

__all__ = ["check", "main"]


def main(path: str) -> None:
    """Do what the request at ``path`` says."""
    request = msgspec.json.decode(Path(path).read_bytes(), type=Request)
    if sys.platform != "win32":
        signal.alarm(math.ceil(request.seconds))  # ends this process: nothing handles it
    with Path(request.answers).open("ab", buffering=0) as answers:
        for number, step in enumerate(request.steps):
            _write(answers, {"begin": number})
            try:
                value = _function(step.function)(*step.arguments)
                _write(answers, {"value": value})
            except Exception as error:
                traceback.print_exc()
                _write(answers, {"error": _text(error), "kind": type(error).__name__})


def check(function: str, options: dict[str, Any], arguments: list[str]) -> Verdict:
    """Run one check."""
    verdict = _function(function)(msgspec.convert(options, CheckOptions), *arguments)
    if not isinstance(verdict, Verdict):
        raise TypeError(f"{function} returned a {type(verdict).__name__}, not a Verdict")
    return verdict


def _function(name: str) -> Any:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def _text(error: Exception) -> str:
    """Its own words where it is of our tree: those say what to do."""
    if isinstance(error, WeightWireError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _write(file: Any, line: dict[str, object]) -> None:
    payload = memoryview(msgspec.json.encode(line) + b"\n")
    while payload:
        payload = payload[file.write(payload) :]


if __name__ == "__main__":
    main(sys.argv[1])
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(0)  # libraries that crash at exit say nothing of what was checked
