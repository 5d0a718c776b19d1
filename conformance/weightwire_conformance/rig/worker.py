"""The scenario's side of one worker process."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from weightwire_conformance.rig import posix
from weightwire_conformance.rig.leavings import shared_files
from weightwire_conformance.rig.points import Action

__all__ = ["Call", "Calls", "NoAnswer", "RemoteError", "Worker", "WorkerDied", "gather", "until"]


_AFTERMATH_SECONDS = 2.0
_ABOUT_OTHERS = frozenset({"PeerLost", "TransferTimeout"})


class RemoteError(Exception):
    """What a call in a worker raised.

    Attributes:
        kinds: the error's class and its bases, by name.
        message: all of it.
        seconds: that the library's call took.
    """

    def __init__(self, kinds: Sequence[str], message: str, seconds: float) -> None:
        super().__init__(f"{kinds[0]}: {message}")
        self.kinds = tuple(kinds)
        self.message = message
        self.seconds = seconds

    @property
    def kind(self) -> str:
        return self.kinds[0]

    @property
    def first(self) -> str:
        """The first line of the message."""
        return self.message.partition("\n")[0]


class WorkerDied(RemoteError):
    """The worker's process ended before it answered."""

    def __init__(self, log: str) -> None:
        super().__init__(["WorkerDied"], f"the worker's process ended\n{log}", 0.0)


class NoAnswer(AssertionError):
    """A worker didn't answer in time: something hangs."""


class Call:
    """A command that a worker is running."""

    def __init__(self, worker: Worker, number: int, do: str) -> None:
        self.worker = worker
        self.number = number
        self.do = do

    @property
    def done(self) -> bool:
        return self.number in self.worker.answers or self.worker.dead

    @property
    def failed(self) -> bool:
        return "error" in self.worker.answers.get(self.number, ()) or self.worker.dead

    @property
    def blames_others(self) -> bool:
        kinds = self.worker.answers.get(self.number, {}).get("error", ())
        return not _ABOUT_OTHERS.isdisjoint(kinds)

    def result(self, patience: float | None = None) -> Any:
        answer = self.worker.answer(self, patience)
        if "error" in answer:
            raise RemoteError(answer["error"], answer["message"], answer["seconds"])
        return answer["result"]

    def seconds(self) -> float:
        """How long the library's call took, once it has ended."""
        return float(self.worker.answer(self)["seconds"])

    def error(self) -> RemoteError:
        """The error of weightwire's tree that the call must end with."""
        try:
            result = self.result()
        except WorkerDied:
            raise
        except RemoteError as error:
            return error
        raise AssertionError(f"{self.do} should have failed, and returned {_short(result)}")


class Calls:
    """One command on every rank of a side."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = tuple(calls)

    @property
    def done(self) -> bool:
        return all(call.done for call in self.calls)

    def results(self) -> list[Any]:
        """Every rank's result; else the error that led to the others."""
        return gather(self)[0]

    def error(self) -> RemoteError:
        """Rank 0's error, once every rank has failed."""
        errors = [call.error() for call in self.calls]
        return errors[0]

    def outcome(self) -> RemoteError | None:
        """Rank 0's error, or None when every rank succeeded; ranks may not differ."""
        failures = []
        for call in self.calls:
            try:
                call.result()
            except WorkerDied:
                raise
            except RemoteError as error:
                failures.append(error)
        if failures and len(failures) < len(self.calls):
            raise AssertionError(f"an error on some ranks only: {failures[0]}")
        return failures[0] if failures else None


def gather(*sides: Calls) -> list[list[Any]]:
    """What calls on several sides return, by side and rank.

    When one fails, the others soon do: what is raised is the error that isn't
    about somebody else, if there is one; then a call that hangs; then any.
    """
    calls = [call for side in sides for call in side.calls]
    end = time.monotonic() + max(call.worker.patience for call in calls)
    while not all(call.done for call in calls) and time.monotonic() < end:
        if any(call.failed and not call.blames_others for call in calls):
            end = min(end, time.monotonic() + _AFTERMATH_SECONDS)
        time.sleep(0.001)
    failed = [call for call in calls if call.failed]
    hanging = [call for call in calls if not call.done]
    for call in sorted(failed, key=lambda call: call.blames_others)[:1]:
        if not call.blames_others:
            call.result()
    for call in hanging:
        call.result(0.0)
    return [[call.result() for call in side.calls] for side in sides]


class Worker:
    """One process of the rig.

    Args:
        address: socket of the process that forks workers.
        log: file for what it writes to stdout and stderr.
        patience: seconds to wait for any answer.
        fresh: it serves one scenario only.

    Attributes:
        shared: files in shared memory that a process held when it was killed.
    """

    def __init__(self, address: str, log: Path, patience: float, *, fresh: bool = False) -> None:
        self.log = log
        self.patience = patience
        self.answers: dict[int, dict[str, Any]] = {}
        self.dead = False
        self.fresh = fresh
        self.shared: set[str] = set()
        self._events: list[dict[str, Any]] = []
        self._mark = 0
        self._started: set[int] = set()
        self._numbers = itertools.count(1)
        self._news = threading.Condition()
        self._connection = posix.local_socket()
        self._connection.connect(address)
        self._connection.sendall(f"log {log}\n".encode())
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.pid = 0
        self.pid = int(Call(self, 0, "start").result())

    def _read(self) -> None:
        with contextlib.suppress(OSError), self._connection.makefile("r") as lines:
            for line in lines:
                message = json.loads(line)
                with self._news:
                    if "event" in message:
                        self._events.append(message)
                    else:
                        self.answers.setdefault(message["id"], message)
                    self._news.notify_all()
        with self._news:
            self.dead = True
            self._news.notify_all()

    def start(self, do: str, /, *, now: bool = False, **arguments: Any) -> Call:
        """Begin a command; ``now`` runs it beside what the worker does already."""
        call = Call(self, next(self._numbers), do)
        self._started.add(call.number)
        line = json.dumps({"id": call.number, "do": do, "now": now, "args": arguments})
        if not now:
            self._mark = len(self._events)
        with contextlib.suppress(OSError):  # a dead worker is found out by its answer
            self._connection.sendall(f"{line}\n".encode())
        return call

    def call(self, do: str, /, *, now: bool = False, **arguments: Any) -> Any:
        return self.start(do, now=now, **arguments).result()

    def answer(self, call: Call, patience: float | None = None) -> dict[str, Any]:
        def arrived() -> bool:
            return call.number in self.answers or self.dead

        with self._news:
            in_time = self._news.wait_for(arrived, self.patience if patience is None else patience)
        if call.number in self.answers:
            return self.answers[call.number]
        if in_time:
            raise WorkerDied(self.tail())
        raise NoAnswer(f"{call.do} hangs: no answer within {self.patience:g} s\n{self.stacks()}")

    @property
    def busy(self) -> bool:
        return bool(self._started - self.answers.keys())

    def _until_event(
        self, wanted: Callable[[dict[str, Any]], bool], what: str, likely: str = ""
    ) -> None:
        def arrived() -> bool:
            return self.dead or any(wanted(event) for event in self._events[self._mark :])

        with self._news:
            self._news.wait_for(arrived, self.patience)
        if not any(wanted(event) for event in self._events[self._mark :]):
            failed = [answer for answer in self.answers.values() if "error" in answer]
            why = f"; it ended with {failed[-1]['message']}" if failed else f"\n{self.stacks()}"
            likely = likely and f": {likely}"
            raise NoAnswer(f"the process never got to {what}{likely}{why}")

    def drain(self) -> list[dict[str, Any]]:
        """The events since the last time, and no more of them."""
        with self._news:
            events, self._events, self._mark = self._events, [], 0
        return events

    def until_at(self, point: str) -> None:
        """Return when the worker has stopped at ``point``."""
        self._until_event(lambda e: e["event"] == "at" and e["point"] == point, point)

    def until_waiting(self, for_what: str, likely: str = "") -> None:
        """Return when the worker waits for something whose name contains ``for_what``.

        Args:
            likely: what is probably wrong where it doesn't, for the failure.
        """
        self._until_event(
            lambda e: e["event"] == "waiting" and for_what in e["for_what"],
            f"waiting for {for_what!r}",
            likely,
        )

    def arm(self, point: str, action: Action = "stop", after: int = 0) -> None:
        """Act at a point, the ``after + 1``-th time that the worker reaches it."""
        self.call("arm", now=True, point=point, action=action, after=after)

    def release(self, point: str) -> None:
        self.call("release", now=True, point=point)

    def kill(self) -> None:
        """SIGKILL, and wait until the process is gone."""
        self.shared |= shared_files(self.pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, posix.KILL)
        with self._news:
            self._news.wait_for(lambda: self.dead, self.patience)
        until(lambda: _state(self.pid) in ("", "Z", "X"), "the killed process ends")

    def suspend(self) -> None:
        """SIGSTOP, and wait until it stands still."""
        os.kill(self.pid, posix.STOP)
        until(lambda: _state(self.pid) == "T", "the process stands still")

    def resume(self) -> None:
        """It goes on from where it stood."""
        os.kill(self.pid, posix.CONTINUE)

    def held(self) -> set[str]:
        """Files in shared memory that it holds, or held when it was killed."""
        return self.shared if self.dead else self.shared | shared_files(self.pid)

    def interrupt(self) -> None:
        """Ctrl-C."""
        os.kill(self.pid, signal.SIGINT)

    def discard(self) -> None:
        """End the process, whatever state it is in."""
        if not self.dead:
            self.shared |= shared_files(self.pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, posix.KILL)
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
        self._reader.join(10)

    def forget(self) -> None:
        """Drop old answers; the worker goes to another scenario."""
        self._events.clear()
        self.answers.clear()
        self._started.clear()

    def tail(self) -> str:
        """The end of its log."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return text[-6000:]

    def stacks(self) -> str:
        """Its log, with the stack of every thread at the end."""
        if not self.dead and self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, posix.DUMP_STACKS)
            time.sleep(0.3)
        return self.tail()


def until(condition: Callable[[], bool], what: str, seconds: float = 10.0) -> None:
    """Poll; ``AssertionError`` when ``condition`` doesn't hold within ``seconds``."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        time.sleep(0.005)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
