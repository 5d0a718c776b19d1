"""The processes of one scenario, in one session."""

from __future__ import annotations

import contextlib
import random
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from weightwire_conformance.rig.placements import MEETING_SECONDS, PRELOAD
from weightwire_conformance.rig.pool import Pool
from weightwire_conformance.rig.worker import Call, Calls, RemoteError, Worker, gather, until

__all__ = ["Fleet", "LeftBehind", "Side"]

SLACK_SECONDS = 0.5
"""Deadlines hold within a tenth and this."""

_LEASE_SECONDS = 20.0
"""A busy machine doesn't miss it, and a process of this host that dies is seen to be gone."""
_MOST_PATIENT_CALL = 30.0
_MARGIN = 4
_UNFIT: dict[str, Any] = {"files": [], "problems": []}


class LeftBehind(AssertionError):
    """A scenario's processes left something behind."""


class Side:
    """All ranks of the sender, or of one receiver."""

    def __init__(self, workers: Sequence[Worker], opening: Mapping[str, Any]) -> None:
        self.workers = list(workers)
        self.opening = opening
        self.incarnation = 0
        self.pids: list[int] = []

    @property
    def first(self) -> Worker:
        """Rank 0."""
        return self.workers[0]

    @property
    def name(self) -> str:
        return str(self.opening.get("receiver_id", "the sender"))

    def open(self) -> Side:
        about = [call.result() for call in self.start_opening().calls]
        self.incarnation = about[0].get("incarnation", 0)
        self.pids = [rank["pid"] for rank in about]
        return self

    def start_opening(self) -> Calls:
        do = "open_receiver" if "receiver_id" in self.opening else "open_sender"
        ranks = len(self.workers)
        return Calls(
            [
                worker.start(do, rank=rank, world_size=ranks, **self.opening)
                for rank, worker in enumerate(self.workers)
            ]
        )

    def start(self, do: str, /, **arguments: Any) -> Calls:
        """Begin a command on every rank."""
        return Calls([worker.start(do, **arguments) for worker in self.workers])

    def call(self, do: str, /, **arguments: Any) -> list[Any]:
        return self.start(do, **arguments).results()

    def ask(self, do: str, /, *, now: bool = False, **arguments: Any) -> Any:
        """Rank 0's answer."""
        return self.first.call(do, now=now, **arguments)

    # -------------------------------------------------------------- shorthands

    def send(self, version: int, **arguments: Any) -> list[dict[str, Any]]:
        return self.start("send", version=version, **arguments).results()

    def receive(self, **arguments: Any) -> list[dict[str, Any]]:
        return self.start("receive", **arguments).results()

    def close(self) -> None:
        self.call("close")

    def kill(self) -> None:
        for worker in self.workers:
            worker.kill()

    def arm(self, point: str, action: Any = "stop", after: int = 0) -> None:
        self.first.arm(point, action, after)

    @property
    def version(self) -> int | None:
        versions = set(self.call("version"))
        if len(versions) != 1:
            raise AssertionError(f"ranks of {self.name} disagree on its version: {versions}")
        found: int | None = versions.pop()
        return found

    @property
    def tainted(self) -> str | None:
        why: str | None = self.ask("tainted")
        return why

    def must_hold(self, version: int) -> None:
        """Fail unless every rank holds this version, byte for byte, and says so."""
        for rank, difference in enumerate(self.call("difference", version=version)):
            if difference is not None:
                raise AssertionError(f"{self.name} rank {rank}: {difference}")
        claimed = self.version
        if claimed != version:
            raise AssertionError(f"{self.name} holds version {version}, and says {claimed}")

    def must_be_whole(self) -> None:
        """Fail if the replica says that it holds a version, and doesn't."""
        version = self.version
        if version is not None:
            self.must_hold(version)

    def must_be_pristine(self) -> None:
        if not all(self.call("pristine")):
            raise AssertionError(f"{self.name} was written to")


class Fleet:
    """The processes of one scenario.

    Args:
        backend: name of the backend.
        options: its options.
        capabilities: what it declares, by name.
    """

    def __init__(
        self,
        pool: Pool,
        backend: str,
        options: Mapping[str, Any],
        capabilities: Mapping[str, Any],
        name: str,
        *,
        seed: int,
    ) -> None:
        self.pool = pool
        self.backend = backend
        self.options = dict(options)
        self.capabilities = capabilities
        self.seed = seed
        self.directory = pool.directory / name
        (self.directory / "tmp").mkdir(parents=True)
        self.url = f"file://{self.directory / 'session'}"
        self.timeout = min(_MOST_PATIENT_CALL, pool.patience / 2)
        self._patience = pool.patience
        self._workers: list[Worker] = []
        self._sides: list[Side] = []
        self._slowest = 0.0

    @property
    def stores(self) -> bool:
        """Whether finished versions outlive the sender; else bytes go from hand to hand."""
        return bool(self.capabilities["flow"] == "store")

    def over_tcp(self) -> None:
        """Use a session without a directory."""
        self.url = f"tcp://127.0.0.1:{_free_port()}/conformance"
        if self.stores:
            self.options.setdefault("directory", str(self.directory / "versions"))

    def deadline(self, least: float) -> float:
        """Seconds for a call that is to run into its deadline in the midst of a version.

        It must get there first: so many seconds, or on a busy machine several times what
        a side's opening or a version has taken until now.
        """
        return max(least, min(self.timeout, _MARGIN * self._slowest))

    @contextlib.contextmanager
    def _noting_its_time(self) -> Iterator[None]:
        began = time.monotonic()
        yield
        self._slowest = max(self._slowest, time.monotonic() - began)

    def patient(self, seconds: float) -> None:
        """Before anything is opened: this scenario's calls may take that long."""
        self.timeout = seconds
        self._patience = seconds

    def tables(self) -> list[Path]:
        """Files of a session in a directory that hold tensor tables, each under its digest."""
        return sorted((self.directory / "session" / "records").glob("tables/*/*.last"))

    def worker(self, *, fresh: bool = False) -> Worker:
        worker = self.pool.take(self.backend, fresh=fresh)
        worker.patience = self._patience
        self._workers.append(worker)
        worker.call("take", directory=str(self.directory / "tmp"))
        return worker

    def sender(
        self,
        model: str = "layers",
        sizes: Mapping[str, Any] | None = None,
        *,
        ranks: int = 1,
        workers: Sequence[Worker] = (),
        open_now: bool = True,
        placement: str | None = None,
        **options: Any,
    ) -> Side:
        """Open the sender on ``ranks`` processes.

        Args:
            model, sizes: what the trainer holds; see ``oracle.MODELS``.
            workers: processes to open it in, instead of others.
            placement: how its tensors are cut over the ranks; see ``placements.PLACEMENTS``.
            options: of ``open_sender``.
        """
        if placement is not None:
            meeting = self.directory / f"trainer-{len(self._sides)}"
            options = {**options, "placement": placement, "rendezvous": str(meeting)}
            self.pool.preload(*PRELOAD)  # at the latest: see ``Case.imports``
            # What torch keeps of a process group isn't for the next scenario.
            workers = [self.worker(fresh=True) for _ in range(ranks)]
            for worker in workers:  # they meet before they open
                worker.patience += MEETING_SECONDS
        opening = {
            **self._common(model, sizes),
            "group_bytes": 8 << 10,
            "verify": "full",
            **options,
        }
        return self._side(ranks, workers, opening, open_now)

    def receiver(
        self,
        receiver_id: str = "replica",
        model: str = "layers",
        sizes: Mapping[str, Any] | None = None,
        *,
        ranks: int = 1,
        workers: Sequence[Worker] = (),
        open_now: bool = True,
        **options: Any,
    ) -> Side:
        """Open one replica on ``ranks`` processes.

        Args:
            options: of ``open_receiver``; ``staged``: nothing lands in place; ``holds``: which
                part of each tensor a rank holds.
        """
        opening = {**self._common(model, sizes), "receiver_id": receiver_id, **options}
        return self._side(ranks, workers, opening, open_now)

    def _common(self, model: str, sizes: Mapping[str, Any] | None) -> dict[str, Any]:
        return {
            "backend": {"backend": self.backend, **self.options},
            "session": self.url,
            "model": model,
            "sizes": dict(sizes or {}),
            "seed": self.seed,
            "memory": self.pool.device,
            "lease_ttl": _LEASE_SECONDS,
            "timeout": self.timeout,
            "open_timeout": self.timeout,
        }

    def _side(
        self, ranks: int, workers: Sequence[Worker], opening: dict[str, Any], open_now: bool
    ) -> Side:
        side = Side(workers or [self.worker() for _ in range(ranks)], opening)
        self._sides.append(side)
        if open_now:
            with self._noting_its_time():
                side.open()
        return side

    def exchange(self, sender: Side, version: int, *replicas: Side, **arguments: Any) -> None:
        """Send a version, and fail unless every replica holds it, byte for byte."""
        with self._noting_its_time():
            sending = sender.start("send", version=version, wait="applied", **arguments)
            receiving = [replica.start("receive", minimum=version) for replica in replicas]
            got = gather(*receiving, sending)
        for replica, reports in zip(replicas, got, strict=False):
            for report in reports:
                if report["version"] != version:
                    raise AssertionError(f"{replica.name} got version {report['version']}")
        for replica in replicas:
            replica.must_hold(version)

    # -------------------------------------------------------------- the end

    def close(self, *, reuse: bool) -> None:
        """End the scenario.

        Args:
            reuse: its processes may serve other scenarios.

        Raises:
            LeftBehind: something was.
        """
        problems = self._shared_process() if reuse else []
        # What a killed process held may lie around: the rig removes it.
        harmed = not reuse or any(worker.dead for worker in self._workers)
        files: set[str] = set()
        clean = []
        for worker in reversed(self._workers):  # receivers before the sender's store
            left = self._let_go(worker) if reuse and not worker.dead else _UNFIT
            files.update(left["files"])
            problems += [f"process {worker.pid}: {problem}" for problem in left["problems"]]
            if left is _UNFIT or left["problems"] or worker.fresh:
                worker.discard()
            else:
                clean.append(worker)
            files.update(worker.shared)
        problems += [f"file {path}" for path in sorted(files) if not harmed and Path(path).exists()]
        for path in files:
            with contextlib.suppress(OSError):
                Path(path).unlink(missing_ok=True)
        if not harmed:
            problems += [f"file {path}" for path in (self.directory / "tmp").rglob("*")]
        for worker in clean:
            self.pool.give_back(self.backend, worker)
        shutil.rmtree(self.directory, ignore_errors=True)
        if problems:
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            raise LeftBehind("\n".join([f"left behind: {problems[0]}{more}", *problems[1:]]))

    def _let_go(self, worker: Worker) -> dict[str, Any]:
        try:
            if worker.busy:  # a refused scenario's other side still waits
                with contextlib.suppress(RemoteError):  # or has just failed to open
                    worker.call("close", now=True)
            left: dict[str, Any] = worker.call("let_go")
        except (AssertionError, RemoteError) as error:
            return {"files": [], "problems": [f"can't be closed: {error}"]}
        return left

    def _shared_process(self) -> list[str]:
        """Sender and receivers must be processes of their own."""
        senders = {pid for side in self._sides if side.name == "the sender" for pid in side.pids}
        receivers = {pid for side in self._sides if side.name != "the sender" for pid in side.pids}
        return [f"process {pid} both sent and received" for pid in sorted(senders & receivers)]


def in_time(error: RemoteError, deadline: float) -> None:
    """Fail unless a call ended within a tenth and half a second of its deadline."""
    took_at_most(error.seconds, deadline, str(error))


def latest(deadline: float) -> float:
    """Seconds by which a call with this deadline must have ended."""
    return deadline * 1.1 + SLACK_SECONDS


def took_at_most(seconds: float, deadline: float, what: str) -> None:
    """Fail unless these are within a tenth and half a second of a deadline."""
    if seconds > latest(deadline):
        raise AssertionError(f"took {seconds:.2f} s with a deadline of {deadline:g} s: {what}")


def wait_done(call: Call | Calls, seconds: float) -> bool:
    """Whether a call ends within ``seconds``."""
    with contextlib.suppress(AssertionError):
        until(lambda: call.done, "the call ends", seconds)
    return call.done


def _free_port() -> int:
    """A port below those that the system hands out by itself."""
    for _ in range(200):
        port = random.randrange(20000, 30000)  # noqa: S311 - not a secret
        with socket.socket() as attempt:
            try:
                attempt.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise AssertionError("no free port between 20000 and 30000")
