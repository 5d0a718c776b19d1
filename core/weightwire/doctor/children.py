"""Child processes that end when they are told to, or when their time is up.

A child is ``python -m weightwire.doctor.worker``, told what to do by a file, and
answers by another: its stdout and stderr belong to the libraries that it loads.
It, and whatever it starts, is ended as one process group.  Each child also carries
an alarm of its own, which the kernel sees to, should its parent be gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from weightwire.deadline import Deadline

__all__ = ["MOST_ANSWER", "Child", "Request", "Step", "together"]

MOST_ANSWER = 4 << 20
"""Bytes of the longest answer that is read."""
_MOST_LOG = 4000
_PAUSE = 0.02
_GRACE = 30.0


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One call that a child makes.

    Attributes:
        arguments: plain data, handed over by position.
    """

    function: str
    arguments: list[Any] = []


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a child is to do: its steps, one after the other; one line of answer for each."""

    steps: list[Step]
    answers: str
    seconds: float


class Child:
    """A running child.

    Args:
        steps: what it calls.
        scratch: where its files go.
        seconds: after which it ends itself, if nobody does before.
        environment: by default this process's.
        own_group: False for the child of a child, which ends with it.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        scratch: Path,
        seconds: float,
        *,
        environment: Mapping[str, str] | None = None,
        own_group: bool = True,
    ) -> None:
        self._own_group = own_group and os.name == "posix"
        place = Path(tempfile.mkdtemp(prefix="child-", dir=scratch))
        self._answers, self._log = place / "answers", place / "log"
        request = Request(list(steps), str(self._answers), seconds + _GRACE)
        (place / "request").write_bytes(msgspec.json.encode(request))
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "weightwire.doctor.worker", str(place / "request")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=None if environment is None else dict(environment),
                start_new_session=self._own_group,
            )

    def answers(self) -> list[bytes]:
        """Whole lines of answer so far: ``begin`` and then a value for each step."""
        try:
            with self._answers.open("rb") as file:
                whole, _, _ = file.read(MOST_ANSWER).rpartition(b"\n")
        except FileNotFoundError:
            return []
        return whole.split(b"\n") if whole else []

    @property
    def is_over(self) -> bool:
        return self._process.poll() is not None

    def death(self) -> str:
        """How it ended, with the last line that it wrote."""
        code = self._process.poll()
        if code is None:
            how = "is still running"
        elif code < 0:
            with contextlib.suppress(ValueError):
                how = f"was ended by {signal.Signals(-code).name}"
                return how + self._last_words()
            how = f"was ended by signal {-code}"
        else:
            how = f"ended with code {code}"
        return how + self._last_words()

    def log(self) -> str:
        """The end of what it and its libraries wrote."""
        try:
            with self._log.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _MOST_LOG))
                return file.read(_MOST_LOG).decode(errors="replace")
        except OSError:
            return ""

    def _last_words(self) -> str:
        lines = [line.strip() for line in self.log().splitlines() if line.strip()]
        return f": {lines[-1][:300]}" if lines else ""

    def kill(self) -> None:
        """End it, and what it started.  Idempotent."""
        if sys.platform != "win32" and self._own_group:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        if self._process.poll() is None:
            self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)


def together(
    steps: Sequence[Step],
    scratch: str | Path,
    seconds: float,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run each step in a process of its own, all at once; what they return, in order.

    For checks that need more than one process.  The children end with the check's own.

    Args:
        seconds: after which those that are still running are ended.
        environment: by default this process's.

    Raises:
        RuntimeError: one failed, crashed or was late: what it said, by the step's function.
    """
    deadline = Deadline(seconds)
    children = [
        Child([step], Path(scratch), seconds, environment=environment, own_group=False)
        for step in steps
    ]
    try:
        while not all(child.is_over for child in children):
            if any(_failed(child) for child in children) or deadline.remaining() <= 0:
                break  # the others may wait for whoever failed
            time.sleep(_PAUSE)
        for step, child in sorted(
            zip(steps, children, strict=True), key=lambda pair: not _failed(pair[1])
        ):  # who failed, before who still waits for it
            value = _value(child)
            if value is None:
                raise RuntimeError(f"{step.function.partition(':')[2]} {child.death()}")
            if "error" in value:
                raise RuntimeError(str(value["error"])[:2000])
        return [(_value(child) or {}).get("value") for child in children]
    finally:
        for child in children:
            child.kill()


def _failed(child: Child) -> bool:
    is_over = child.is_over  # before its answer is read: none comes after that
    value = _value(child)
    return "error" in value if value is not None else is_over


def _value(child: Child) -> dict[str, Any] | None:
    lines = child.answers()
    if len(lines) < 2:
        return None
    try:
        found = msgspec.json.decode(lines[1])
    except msgspec.DecodeError:
        return None
    return found if isinstance(found, dict) else None
