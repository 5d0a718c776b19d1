"""The worker's side: a trainer rank or an inference rank that a scenario steps through its life.

Run as ``python -m weightwire_conformance.rig.process SOCKET``: imports once, then
forks one worker for each connection.  A worker's standard input and output are
that connection, one JSON object a line.  It ends when the connection does.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from pathlib import Path
from typing import Any

import torch

from weightwire.errors import WeightWireError
from weightwire.plugins import registry
from weightwire_conformance.rig import posix
from weightwire_conformance.rig.commands import Commands

__all__: list[str] = []

_PR_SET_PDEATHSIG = 1


class _Output:
    """Answers and events, one line each, from any thread."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()

    def write(self, **message: Any) -> None:
        view = memoryview((json.dumps(message) + "\n").encode())
        with self._lock:
            while view:
                view = view[os.write(self._descriptor, view) :]


def _run(commands: Commands, output: _Output, message: dict[str, Any]) -> None:
    began = time.monotonic()
    commands.clock.seconds = None
    try:
        result = commands.run(message["do"], message["args"])
        answer = {"id": message["id"], "result": result}
    except BaseException as error:
        names = [kind.__name__ for kind in type(error).__mro__]
        answer = {"id": message["id"], "error": names, "message": str(error)}
        if not isinstance(error, WeightWireError | KeyboardInterrupt):
            traceback.print_exc()
    seconds = commands.clock.seconds
    output.write(seconds=time.monotonic() - began if seconds is None else seconds, **answer)


def _serve(output: _Output) -> None:
    commands = Commands(output.write)
    # The one that runs stays first in line until it is answered: an interruption, which may
    # come between any two instructions of the main thread, then loses none.
    waiting: deque[dict[str, Any]] = deque()
    news = threading.Event()

    def read() -> None:
        for line in sys.stdin:
            message = json.loads(line)
            if message["now"]:  # beside whatever the main thread does
                threading.Thread(target=_run, args=(commands, output, message), daemon=True).start()
            else:
                waiting.append(message)
                news.set()
        os._exit(0)

    threading.Thread(target=read, name="reader", daemon=True).start()
    output.write(id=0, result=os.getpid(), seconds=0.0)
    while True:
        try:
            while not waiting:
                news.wait()
                news.clear()
            _run(commands, output, waiting[0])
            waiting.popleft()
        except KeyboardInterrupt as error:  # outside the command, or while it was answered
            output.write(event="interrupted")
            if waiting:  # the first answer counts
                names = [kind.__name__ for kind in type(error).__mro__]
                output.write(id=waiting[0]["id"], error=names, message="", seconds=0.0)
                waiting.popleft()


def _become_worker(connection: socket.socket, log: str) -> None:
    posix.collect_children(at_once=False)
    errors = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(connection.fileno(), 0)
    os.dup2(errors, 1)  # what a library prints mustn't mix with answers
    os.dup2(errors, 2)
    output = _Output(os.dup(connection.fileno()))
    connection.close()
    os.close(errors)
    sys.stdin = open(0)  # noqa: SIM115 - for the life of the process
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a run in the background ignores it
    posix.dump_stacks_when_asked()
    torch.set_num_threads(1)
    _serve(output)


def main(address: str) -> None:
    """Serve the socket ``address``: ``log PATH`` forks a worker, ``import NAME`` imports here."""
    registry()
    _settle()
    posix.collect_children(at_once=True)
    listener = posix.local_socket()
    listener.bind(address)
    listener.listen(64)
    os.write(1, b"ready\n")
    parent = os.getpid()
    threading.Thread(target=_end_with_parent, args=(address,), daemon=True).start()
    while True:
        connection, _ = listener.accept()
        what, _, rest = _first_line(connection).partition(" ")
        if what == "import":
            with connection, contextlib.suppress(ImportError):  # a worker says so when it tries
                importlib.import_module(rest)
                _settle()
            continue
        if posix.fork() == 0:
            # Even a stopped worker ends with this process, and this one with the run.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, posix.KILL)
            if os.getppid() != parent:
                os._exit(1)
            listener.close()
            _become_worker(connection, rest)
        connection.close()


def _settle() -> None:
    """What is imported stays: a worker that looks for leavings needn't go through it each time."""
    gc.collect()
    gc.freeze()


def _first_line(connection: socket.socket) -> str:
    """Byte by byte: what follows belongs to the worker."""
    line = b""
    while (byte := connection.recv(1)) not in (b"", b"\n"):
        line += byte
    return line.decode()


def _end_with_parent(address: str) -> None:
    os.read(0, 1)  # not sys.stdin: its lock would be held in every fork
    shutil.rmtree(Path(address).parent, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
