"""Starts trainer and inference ranks as processes, steps them, and leaves nothing behind.

A ``Fleet`` belongs to one test.  It takes warm workers from a pool, opens senders
and receivers in them, and gives back those that end clean.  Every answer has a
deadline; a worker that misses it shows its stacks and fails the test.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

SHM = Path("/dev/shm")
ANSWER_SECONDS = 60.0
"""How long a test waits for an answer that has no deadline of its own."""

SLACK = 0.5


class RemoteError(Exception):
    """What a call in a worker raised.

    Attributes:
        kinds: the error's class and its bases, by name.
        first: the first line of its message.
        seconds: that the call took.
    """

    def __init__(self, kinds: Sequence[str], message: str, seconds: float) -> None:
        super().__init__(f"{kinds[0]}: {message}")
        self.kinds = list(kinds)
        self.message = message
        self.seconds = seconds

    @property
    def kind(self) -> str:
        return self.kinds[0]

    @property
    def first(self) -> str:
        return self.message.splitlines()[0] if self.message else ""


class WorkerDied(RemoteError):
    """The worker's process ended before it answered."""

    def __init__(self, log: str) -> None:
        super().__init__(["WorkerDied"], f"the worker's process ended\n{log}", 0.0)


class Call:
    """A command that a worker is running."""

    def __init__(self, worker: Worker, number: int, do: str) -> None:
        self.worker = worker
        self.number = number
        self.do = do

    @property
    def done(self) -> bool:
        return self.number in self.worker.answers

    def result(self, timeout: float = ANSWER_SECONDS) -> Any:
        answer = self.worker.answer(self, timeout)
        if "error" in answer:
            raise RemoteError(answer["error"], answer["message"], answer["seconds"])
        return answer["result"]

    def error(self, timeout: float = ANSWER_SECONDS) -> RemoteError:
        """The error that the call must end with."""
        try:
            result = self.result(timeout)
        except WorkerDied:
            raise
        except RemoteError as error:
            return error
        raise AssertionError(f"{self.do} returned {result!r}, and should have failed")

    @property
    def seconds(self) -> float:
        self.result()
        return float(self.worker.answers[self.number]["seconds"])


class Worker:
    """One process of the rig."""

    def __init__(self, address: str, log: Path) -> None:
        self.log = log
        self.answers: dict[int, dict[str, Any]] = {}
        self.events: list[dict[str, Any]] = []
        self.dead = False
        self.stopped = False
        self._numbers = itertools.count(1)
        self._news = threading.Condition()
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(address)
        self._connection.sendall(f"{log}\n".encode())
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._pid = 0

    @property
    def pid(self) -> int:
        if not self._pid:
            self._pid = int(Call(self, 0, "hello").result())
        return self._pid

    def _read(self) -> None:
        with contextlib.suppress(OSError), self._connection.makefile("r") as lines:
            for line in lines:
                message = json.loads(line)
                with self._news:
                    if "event" in message:
                        self.events.append(message)
                    else:
                        self.answers[message["id"]] = message
                    self._news.notify_all()
        with self._news:
            self.dead = True
            self._news.notify_all()

    def start(self, do: str, /, *, now: bool = False, **args: Any) -> Call:
        """Begin a command; ``now`` runs it beside what the worker does already."""
        assert self.pid
        call = Call(self, next(self._numbers), do)
        line = json.dumps({"id": call.number, "do": do, "now": now, "args": args})
        self.mark = len(self.events)
        with contextlib.suppress(OSError):  # a dead worker is found out by its answer
            self._connection.sendall(f"{line}\n".encode())
        return call

    def call(self, do: str, /, *, now: bool = False, **args: Any) -> Any:
        return self.start(do, now=now, **args).result()

    def answer(self, call: Call, timeout: float) -> dict[str, Any]:
        def arrived() -> bool:
            return call.number in self.answers or self.dead

        with self._news:
            in_time = self._news.wait_for(arrived, timeout)
        if call.number in self.answers:
            return self.answers[call.number]
        if not in_time:
            raise AssertionError(
                f"no answer to {call.do} within {timeout:g} s; the worker:\n{self.stacks()}"
            )
        raise WorkerDied(self.tail())

    def until_event(self, wanted: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        """The first event of the current command that ``wanted`` accepts."""
        found: list[dict[str, Any]] = []

        def arrived() -> bool:
            found.extend(event for event in self.events[self.mark :] if wanted(event))
            return bool(found) or self.dead

        with self._news:
            self._news.wait_for(arrived, ANSWER_SECONDS)
        if not found:
            raise AssertionError(
                f"the worker never got to {what}; since then {self.events[self.mark :]}\n"
                f"{self.stacks()}"
            )
        return found[0]

    def until_at(self, point: str) -> None:
        """Return when the worker has stopped at ``point``."""
        self.until_event(lambda e: e["event"] == "at" and e["point"] == point, point)

    def until_waiting(self, for_what: str) -> None:
        """Return when the worker waits for something whose name contains ``for_what``."""
        self.until_event(
            lambda e: e["event"] == "waiting" and for_what in e["for_what"], f"wait {for_what!r}"
        )

    def arm(self, point: str, do: str = "stop", after: int = 0) -> None:
        """Stop (or ``raise``, ``flip``, ``kill``) at a point, the ``after + 1``-th time."""
        self.call("arm", now=True, point=point, do=do, after=after)

    def release(self, point: str) -> None:
        self.call("release", now=True, point=point)

    def kill(self) -> None:
        """SIGKILL, and wait until the process is gone."""
        os.kill(self.pid, signal.SIGKILL)
        self._wait_dead()

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        self.stopped = True
        _until(lambda: _state(self.pid) == "T", "the process stops")

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)
        self.stopped = False

    def interrupt(self) -> None:
        """Ctrl-C."""
        os.kill(self.pid, signal.SIGINT)

    def discard(self) -> None:
        """End the process, whatever state it is in."""
        if not self.dead and self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
        self._reader.join(10)

    def reset(self) -> bool:
        """Close everything in the worker; False when it isn't fit for another test."""
        if self.dead or self.stopped or not self._pid:
            return not self.dead and not self.stopped
        try:
            left = self.start("reset").result(40)
        except (AssertionError, RemoteError) as error:
            print(f"process {self.pid} wasn't fit for another test: {error}")
            return False
        assert not left["threads"], f"threads are left: {left['threads']}"
        self.events.clear()
        self.answers.clear()
        return True

    def tail(self) -> str:
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return text[-6000:]

    def stacks(self) -> str:
        if not self.dead and self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGUSR1)
            time.sleep(0.3)
        return self.tail()

    def _wait_dead(self) -> None:
        with self._news:
            assert self._news.wait_for(lambda: self.dead, 10), "a killed worker lives on"
        _until(lambda: _state(self.pid) in ("", "Z", "X"), "the process ends")


class Pool:
    """Warm workers, forked from one process that has imported everything."""

    def __init__(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="weightwire-rig-"))
        self._address = str(self._directory / "workers")
        self._count = itertools.count()
        self._idle: list[Worker] = []
        self._log = (self._directory / "first.log").open("w")
        script = Path(__file__).with_name("process_worker.py")
        environment = {k: v for k, v in os.environ.items() if k != "WEIGHTWIRE_TOKEN"}
        self._first = subprocess.Popen(
            [sys.executable, str(script), self._address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
            env={**environment, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"},
        )
        assert self._first.stdout is not None
        if self._first.stdout.readline() != b"ready\n":
            raise RuntimeError((self._directory / "first.log").read_text())

    def take(self) -> Worker:
        while self._idle:
            worker = self._idle.pop()
            if not worker.dead:
                return worker
        log = self._directory / f"worker-{next(self._count)}.log"
        return Worker(self._address, log)

    def give_back(self, worker: Worker) -> None:
        self._idle.append(worker)

    def close(self) -> None:
        for worker in self._idle:
            worker.discard()
        self._idle.clear()
        self._first.kill()  # every worker ends with it
        self._first.communicate()
        self._log.close()
        shutil.rmtree(self._directory, ignore_errors=True)


class Side:
    """All ranks of a sender, or of one receiver."""

    def __init__(self, fleet: Fleet, workers: Sequence[Worker], opening: dict[str, Any]) -> None:
        self.fleet = fleet
        self.workers = list(workers)
        self.opening = opening
        self.about: list[dict[str, Any]] = []

    @property
    def first(self) -> Worker:
        return self.workers[0]

    def open(self) -> Side:
        calls = self.start_opening()
        self.about = [call.result() for call in calls]
        self.fleet.sessions.add(self.about[0]["session_id"])
        return self

    def start_opening(self) -> list[Call]:
        ranks = len(self.workers)
        do = "open_receiver" if "receiver_id" in self.opening else "open_sender"
        return [
            worker.start(do, rank=rank, world_size=ranks, **self.opening)
            for rank, worker in enumerate(self.workers)
        ]

    @property
    def incarnation(self) -> int:
        return int(self.about[0]["incarnation"])

    def start(self, do: str, /, **args: Any) -> Calls:
        return Calls([worker.start(do, **args) for worker in self.workers])

    def call(self, do: str, /, **args: Any) -> list[Any]:
        return self.start(do, **args).results()

    def ask(self, do: str, /, *, now: bool = False, **args: Any) -> Any:
        """Rank 0's answer."""
        return self.first.call(do, now=now, **args)

    # ------------------------------------------------------------------ shorthands

    def send(self, version: int, **args: Any) -> list[dict[str, Any]]:
        return self.start("send", version=version, **args).results()

    def receive(self, **args: Any) -> list[dict[str, Any]]:
        return self.start("receive", **args).results()

    def close(self) -> None:
        self.call("close")

    @property
    def version(self) -> int | None:
        versions = set(self.call("version"))
        assert len(versions) == 1, f"ranks disagree on the version: {versions}"
        return versions.pop()

    @property
    def tainted(self) -> str | None:
        return self.ask("tainted")

    def holds(self, *versions: int) -> Any:
        """The version that every rank holds, byte for byte, of these; else pristine or mixed."""
        answers = set(self.call("holds", versions=list(versions)))
        return answers.pop() if len(answers) == 1 else answers

    def kill(self) -> None:
        for worker in self.workers:
            worker.kill()


class Calls:
    """One command on every rank of a side."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = list(calls)

    @property
    def done(self) -> bool:
        return all(call.done for call in self.calls)

    def results(self, timeout: float = ANSWER_SECONDS) -> list[Any]:
        return [call.result(timeout) for call in self.calls]

    def errors(self, timeout: float = ANSWER_SECONDS) -> list[RemoteError]:
        return [call.error(timeout) for call in self.calls]

    def error(self, timeout: float = ANSWER_SECONDS) -> RemoteError:
        """Rank 0's error, once every rank has failed."""
        return self.errors(timeout)[0]


class Fleet:
    """The processes of one test, in one session.

    Args:
        backend: name of the backend on both sides.
        scheme: of the session, ``file`` or ``tcp``.
        directory: the test's own.
    """

    def __init__(self, pool: Pool, backend: str, scheme: str, directory: Path) -> None:
        self._pool = pool
        self.backend = backend
        self.scheme = scheme
        self.directory = directory
        self.sessions: set[str] = set()
        self.url = self._new_url()
        self.seed = int.from_bytes(os.urandom(4), "big")
        self._workers: list[Worker] = []
        self._senders: list[Worker] = []

    @property
    def stores(self) -> bool:
        """Whether finished versions stay readable."""
        return self.backend.endswith("filesystem")

    def _new_url(self) -> str:
        if self.scheme == "file":
            return f"file://{self.directory / 'session'}"
        return f"tcp://127.0.0.1:{free_port()}/run"

    def worker(self) -> Worker:
        worker = self._pool.take()
        self._workers.append(worker)
        return worker

    def choice(self, **options: Any) -> dict[str, Any]:
        """The backend with the options that it needs in this session."""
        if self.stores and self.scheme == "tcp":
            options.setdefault("directory", str(self.directory / "versions"))
        return {"backend": self.backend, **options}

    def sender(
        self,
        *,
        ranks: int = 1,
        open_now: bool = True,
        workers: Sequence[Worker] = (),
        config: dict[str, Any] | None = None,
        **options: Any,
    ) -> Side:
        opening = {
            "backend": self.choice(**(config or {})),
            "session": self.url,
            "model": "small",
            "seed": self.seed,
            "group_bytes": 8 << 10,
            "verify": "full",
            "timeout": 30.0,
            "open_timeout": 30.0,
            **options,
        }
        side = Side(self, workers or [self.worker() for _ in range(ranks)], opening)
        self._senders.extend(side.workers)
        return side.open() if open_now else side

    def receiver(
        self,
        receiver_id: str = "replica-0",
        *,
        ranks: int = 1,
        open_now: bool = True,
        workers: Sequence[Worker] = (),
        config: dict[str, Any] | None = None,
        **options: Any,
    ) -> Side:
        opening = {
            "backend": self.choice(**(config or {})),
            "session": self.url,
            "model": "small",
            "seed": self.seed,
            "receiver_id": receiver_id,
            "timeout": 30.0,
            "open_timeout": 30.0,
            **options,
        }
        side = Side(self, workers or [self.worker() for _ in range(ranks)], opening)
        return side.open() if open_now else side

    def await_renewals(self, member: str, count: int = 4) -> None:
        """Return when a live member has renewed its lease: it has looked around each time."""
        lease = self.directory / "session/records" / member / "lease"
        for _ in range(count):
            before = lease.read_bytes()
            _until(lambda b=before: lease.read_bytes() != b, "the lease is renewed")  # type: ignore[misc]

    def versions_directory(self) -> Path:
        return self.directory / ("versions" if self.scheme == "tcp" else "session/versions")

    def version_path(self, version: int) -> Path:
        """The directory of a finished version."""
        found = sorted(self.versions_directory().glob(f"v{version:08d}-*"))
        assert len(found) == 1, f"version {version}: {found}"
        return found[0]

    def close(self) -> None:
        """End every process, and fail if anything is left behind."""
        problems = []
        harmed = any(worker.dead or worker.stopped for worker in self._workers)
        clean = []
        # Receivers before the sender that serves their session.
        for worker in sorted(self._workers, key=lambda worker: worker in self._senders):
            try:
                reusable = worker.reset()
            except AssertionError as error:
                reusable, problem = False, str(error)
                problems.append(problem)
            if reusable:
                clean.append(worker)
            else:
                harmed = True
                worker.discard()
        for session in self.sessions:
            left = list(SHM.glob(f"weightwire-{session}-*"))
            for path in left:
                path.unlink(missing_ok=True)
            if left and not harmed:
                problems.append(f"shared memory is left: {[path.name for path in left]}")
        if self.scheme == "tcp" and not harmed and not _port_is_free(self.url):
            problems.append(f"the port of {self.url} is still taken")
        for worker in clean:
            self._pool.give_back(worker)
        assert not problems, "\n".join(problems)


def exchange(sender: Side, version: int, *replicas: Side) -> None:
    """A version that every replica must then hold, byte for byte."""
    receiving = [replica.start("receive", minimum=version) for replica in replicas]
    sending = sender.start("send", version=version, wait="applied")
    for calls in receiving:
        assert calls.results()[0]["version"] == version
    sending.results()
    assert [replica.holds(version) for replica in replicas] == [version] * len(replicas)


def in_time(error: RemoteError, deadline: float) -> bool:
    """Whether a call ended within 10% and half a second of its deadline."""
    return error.seconds <= deadline * 1.1 + SLACK


def free_port() -> int:
    """A port below those that the system hands out by itself."""
    for _ in range(200):
        port = random.randrange(20000, 30000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise AssertionError("no free port between 20000 and 30000")


def _port_is_free(url: str) -> bool:
    port = int(url.rpartition(":")[2].partition("/")[0])

    def free() -> bool:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                return False
        return True

    with contextlib.suppress(AssertionError):
        _until(free, "the port is free")
    return free()


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _until(condition: Callable[[], bool], what: str, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(0.005)


until = _until


_pool: Pool | None = None


@contextlib.contextmanager
def shared_pool() -> Iterator[Pool]:
    """One pool for all tests that use the rig, from the first one on."""
    global _pool
    if _pool is None:
        _pool = Pool()
    yield _pool


def close_pool() -> None:
    global _pool
    if _pool is not None:
        _pool.close()
        _pool = None
