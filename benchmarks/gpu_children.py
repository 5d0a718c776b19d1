"""Processes on GPUs, for the benchmarks: a JSON line each way."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch


class Child:
    """One process on one GPU: a JSON line each way."""

    def __init__(self, role: str, device: str, setup: dict[str, Any]) -> None:
        command = [sys.executable, sys.argv[0], "--child", role, device, json.dumps(setup)]
        self._role = f"{role} on {device}"
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self, do: str, **arguments: Any) -> Child:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()
        return self

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the {self._role} process ended: its error is above")
        found = json.loads(line)
        if "error" in found:
            raise RuntimeError(f"{self._role}: {found['error']}")
        return found["result"]

    def answer_within(self, seconds: float) -> Any:
        """``answer``, or an error after ``seconds``; errors of the child come as they are."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        if not ready:
            raise RuntimeError(f"the {self._role} said nothing within {seconds:g} s")
        line = self._process.stdout.readline()
        return json.loads(line) if line else {"error": "its process ended", "seconds": 0.0}

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def await_stop(self, seconds: float) -> None:
        """Return when the process was stopped, or has ended, by a signal of its own."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                stat = Path(f"/proc/{self._process.pid}/stat").read_text()
                if stat.rpartition(")")[2].split()[0] in "TtZ":
                    return
            if self._process.poll() is not None:
                return
            time.sleep(0.002)
        raise RuntimeError(f"the {self._role} wasn't stopped within {seconds:g} s")

    def ask(self, do: str, **arguments: Any) -> Any:
        return self.start(do, **arguments).answer()

    def hang_up(self) -> None:
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGCONT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=30)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def processes(
    devices: Sequence[str], roles: Sequence[str], setup: dict[str, Any]
) -> Iterator[list[Child]]:
    """One a device; those that are appended end with the others."""
    children: list[Child] = []
    try:
        for role, device in zip(roles, devices, strict=True):
            children.append(Child(role, device, setup))
        yield children
    finally:
        for child in children:  # all of them first: leaving may need the other
            child.hang_up()
        for child in children:
            child.end()


def synchronize(device: torch.device | str) -> None:
    if torch.device(device).type == "cuda":  # on CPUs the script itself can be tried
        torch.cuda.synchronize(device)


class Role:
    def __init__(self, device: str, setup: dict[str, Any]) -> None:
        self.device = torch.device(device)
        self.setup = setup
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def close(self) -> None:
        pass

    def sync(self) -> None:
        synchronize(self.device)


def child(roles: Mapping[str, type[Role]], role: str, device: str, setup: str) -> None:
    """The life of a child: commands from its input, until that ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to stderr
    here = roles[role](device, json.loads(setup))
    for line in sys.stdin:
        command = json.loads(line)
        do = command.pop("do")
        began = time.monotonic()
        try:
            answer = {"result": getattr(here, do)(**command)}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}", "kind": type(error).__name__}
        answer["seconds"] = time.monotonic() - began
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    with contextlib.suppress(Exception):
        here.close()


@contextlib.contextmanager
def attempt(found: dict[str, Any], name: str) -> Iterator[None]:
    """One part that fails leaves the others their time: the machine is lent."""
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        found[name] = {"error": str(error)}
