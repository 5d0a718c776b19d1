"""Trainer and replicas as real processes under random faults, and the observer of all of it.

A trainer of two ranks sends version after version to a changing pool of replicas of one
and two ranks, which follow it.  While a version is on its way, something happens to one of
them.  After each call a replica's memory is compared with the oracle's version of what it
names; the observer holds that against what the session says of it, and checks that

* no replica names a version whose bytes it doesn't hold,
* no call outlasts its deadline by more than a tenth and half a second, and two round trips
  where connections are slowed,
* a call fails only with an error of weightwire's tree,
* with one live sender and one live receiver there is progress.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weightwire.deadline import Deadline
from weightwire.inspection import inspect_session
from weightwire.session.lease import LeaseObserver
from weightwire.session.session import Session
from weightwire_conformance.chaos.faults import FAULTS, SLOWEST, Fault, filler_of
from weightwire_conformance.chaos.network import Proxy
from weightwire_conformance.chaos.report import ChaosReport
from weightwire_conformance.rig import Fleet, Pool, Side, posix
from weightwire_conformance.rig.fleet import latest
from weightwire_conformance.rig.worker import Calls, NoAnswer, RemoteError, WorkerDied

__all__ = ["ChaosOptions", "World", "run"]

_LEASE = 2.0
_SEND_SECONDS = 10.0
_RECEIVE_SECONDS = 4.0
_TELLING_SECONDS = 4 * SLOWEST
"""Two round trips over slowed connections: a call that ran out of time still says so."""
_USUAL_SECONDS = 0.1
"""A version's, about: faults come within them."""
_OURS = {"WeightWireError", "KeyboardInterrupt"}
_MOST_REPLICAS = 4
_SMALL_DISK = 8 << 20
_MOST_MISSES = 6
_COUNT = itertools.count()
_ATTEMPTS = 8
"""Sends, without a new fault, within which one must succeed."""


@dataclass(frozen=True)
class ChaosOptions:
    """What is asked of a run.

    Attributes:
        versions: how many must reach the pool.
        each: how often each fault must have been injected.
        seconds: end after so many, whatever is missing then; None: when all is done.
        options: of the backend.
        kinds: names of the faults; empty: all.
        session: of a server of its own, ``redis://host:port/name``, which is then reached
            through a proxy; empty: a directory.
        restart_server: ends that server, and starts it again with its data, if it can be.
        recovery: seconds within which a version must reach every live replica.
    """

    backend: str
    seed: int
    versions: int = 300
    each: int = 30
    seconds: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    kinds: tuple[str, ...] = ()
    session: str = ""
    restart_server: Callable[[], None] | None = None
    recovery: float = 60.0


def run(
    options: ChaosOptions, pool: Pool, tell: Callable[[ChaosReport], None] = lambda report: None
) -> ChaosReport:
    """Run chaos over one backend.

    Args:
        tell: called after each version.
    """
    began = time.monotonic()
    report = ChaosReport(options.backend, options.seed)
    with contextlib.ExitStack() as stack:
        world = stack.enter_context(contextlib.closing(World(options, pool, report)))
        while not world.is_done() and report.ok:
            world.step()
            report.seconds = time.monotonic() - began
            tell(report)
            if options.seconds is not None and report.seconds > options.seconds:
                break
    report.seconds = time.monotonic() - began
    return report


class World:
    """One session under chaos.

    Attributes:
        sender_must_restart, must_restart: who is gone, or is to go, when the call has ended.
        excused: processes that were stopped: their calls may take longer.
        proxy: what lies before the session's server, if it has one.
        damaged: the newest stored version was: nobody can take it.
        slowed: in how many versions, this one first, calls may meet slowed connections.
        fault: the newest one, for messages.
    """

    lease = _LEASE

    def __init__(self, options: ChaosOptions, pool: Pool, report: ChaosReport) -> None:
        self.options = options
        self.report = report
        self.dice = random.Random(options.seed)  # noqa: S311 - not a secret
        describing = pool.take(options.backend)
        declared = describing.call("describe", backend=options.backend)["capabilities"]
        pool.give_back(options.backend, describing)
        name = f"chaos-{next(_COUNT)}"
        self.fleet = Fleet(
            pool, options.backend, options.options, declared, name, seed=options.seed
        )
        self.proxy: Proxy | None = None
        if options.session:
            self.proxy = Proxy(options.session)
            self.fleet.url = f"{self.proxy.url}-{os.getpid()}-{name}"
        self._missed: Counter[str] = Counter()
        self.versions = self.fleet.directory / "versions"
        self.versions.mkdir(mode=0o700)
        self.has_small_disk = self.fleet.stores and _mount(self.versions)
        if self.fleet.stores:
            self.fleet.options["directory"] = str(self.versions)
        self.replicas: dict[str, Side] = {}
        self.following: dict[str, Calls] = {}
        self.sender_must_restart = False
        self.must_restart: set[str] = set()
        self.excused: set[int] = set()
        self.damaged = self.slow = False
        self.slowed = 0
        self.fault = "at the start"
        self.version = 0
        self.finished = 0
        self._names = 0
        self.sender = self._open_sender(None)
        self.session = Session.open(self.fleet.url, deadline=Deadline(30.0), read_only=True)
        self.observer = LeaseObserver(self.session)
        self.faults: list[Fault] = []
        for fault in FAULTS:
            if options.kinds and fault.name not in options.kinds:
                continue
            if why := fault.possible(self):
                report.impossible[fault.name] = why
            else:
                self.faults.append(fault)
        self.add_replica("solo", ranks=1)
        self.add_replica("pair", ranks=2)

    # -------------------------------------------------------------- who is there

    def _open_sender(self, workers: Side | None) -> Side:
        resume = self.finished if self.finished and self.fleet.stores else None
        return self.fleet.sender(
            ranks=2,
            workers=workers.workers if workers is not None else (),
            lease_ttl=_LEASE,
            min_receivers=0 if self.fleet.stores else 1,
            on_receiver_loss=self.dice.choice(["fail", "continue"]),
            resume_from=resume,
        )

    def new_name(self) -> str:
        self._names += 1
        return f"guest-{self._names}"

    def any_replica(self) -> Side:
        return self.replicas[self.dice.choice(sorted(self.replicas))]

    def add_replica(self, name: str, *, ranks: int) -> None:
        """A replica joins, and follows."""
        while len(self.replicas) >= _MOST_REPLICAS:
            self.let_leave(self.any_replica())
        side = self.fleet.receiver(name, ranks=ranks, lease_ttl=_LEASE)
        self.replicas[name] = side
        self.following[name] = side.start("follow", timeout=_RECEIVE_SECONDS)

    def let_leave(self, replica: Side) -> None:
        """A replica closes in good order, whatever it is doing."""
        del self.replicas[replica.name]
        for worker in replica.workers:
            self.ask(worker, "close", now=True)
        self._end(self.following.pop(replica.name), replica.name)
        self._judge(replica)

    def ask(self, worker: Any, do: str, **arguments: Any) -> Any:
        """A worker's answer, or None where it has died or refuses."""
        try:
            return worker.call(do, **arguments)
        except WorkerDied:
            return None
        except RemoteError as error:
            if "WeightWireError" not in error.kinds:
                self.report.problems.append(f"{do}: {error}")
            return None

    # -------------------------------------------------------------- one version

    def is_done(self) -> bool:
        missing = [f for f in self.faults if self.report.faults[f.name] < self.options.each]
        return self.report.versions >= self.options.versions and not missing

    def step(self) -> None:
        """Send versions until one has reached everybody; something happens to the first."""
        least = min(self.report.faults[fault.name] for fault in self.faults)
        rarest = [fault for fault in self.faults if self.report.faults[fault.name] == least]
        fault = self.dice.choice(rarest if self.dice.random() < 0.5 else self.faults)
        self.fault = fault.name
        sending = self._start_sending()
        time.sleep(self.dice.random() * _USUAL_SECONDS)
        happened = time.monotonic()
        if fault.inject(self) is False:
            self._miss(fault)
        else:
            self.report.faults[fault.name] += 1
        failed = not self._send_ended(sending)
        if failed:
            self.report.detection.setdefault(fault.name, []).append(time.monotonic() - happened)
        self._mend()
        for _ in range(_ATTEMPTS):
            if not failed and not self.damaged:
                break
            self.damaged = False
            failed = not self._send_ended(self._start_sending())
            if failed:
                self._mend()
        else:
            self._fail(f"{_ATTEMPTS} sends failed after {fault.name}: no progress")
            return
        if self._all_hold(self.version):
            self.report.versions += 1
            self.report.recovery.setdefault(fault.name, []).append(time.monotonic() - happened)
        else:
            self._fail(f"version {self.version} didn't reach everybody after {fault.name}")
        for replica in list(self.replicas.values()):
            self._judge(replica)
        self._judge_session()
        self.excused.clear()
        self.slowed = max(0, self.slowed - 1)

    def _miss(self, fault: Fault) -> None:
        """There was nothing to do it to; where that is always so, it can't be had."""
        self._missed[fault.name] += 1
        if self._missed[fault.name] >= _MOST_MISSES and not self.report.faults[fault.name]:
            self.report.impossible[fault.name] = "there is nothing to do it to"
            self.faults.remove(fault)

    def _start_sending(self) -> Calls:
        self.version += 1
        wait = self.dice.choice(["applied", "published"]) if self.fleet.stores else "applied"
        return self.sender.start(
            "send", version=self.version, wait=wait, timeout=_SEND_SECONDS, scribble=True
        )

    def _send_ended(self, sending: Calls) -> bool:
        finished = self._end(sending, "the sender")
        if finished:
            self.finished = self.version
        return finished

    def _mend(self) -> None:
        """Start again whoever is gone, and undo what would last."""
        if self.proxy is not None:
            self.proxy.delay = 0.0
        filler_of(self).unlink(missing_ok=True)
        if self.slow:
            self.slow = False
            self.ask(self.sender.first, "disarm", now=True)
        dead = any(worker.dead for worker in self.sender.workers)
        if dead or self.sender_must_restart:
            old = None if dead else self.sender
            if dead:
                self.sender.kill()
            else:
                self._end(self.sender.start("close"), "the sender")
            self.sender = self._open_sender(old)
            self.sender_must_restart = False
        for name, replica in list(self.replicas.items()):
            if name in self.must_restart or any(worker.dead for worker in replica.workers):
                self._judge(replica)
                replica.kill()
                del self.replicas[name], self.following[name]
                self.add_replica(name, ranks=len(replica.workers))
        self.must_restart.clear()
        if not self.replicas:
            self.add_replica(self.new_name(), ranks=1)

    def _all_hold(self, version: int) -> bool:
        """Wait until every live replica names this version or a later one."""
        deadline = time.monotonic() + self.options.recovery
        behind = dict(self.replicas)
        while behind:
            for name, replica in list(behind.items()):
                if any(call.done for call in self.following[name].calls):
                    self._fail(f"{name} follows no more: {_tail(replica)}")
                    return False
                held = [self.ask(worker, "version", now=True) for worker in replica.workers]
                if all(number is not None and number >= version for number in held):
                    del behind[name]
            if not behind:
                break
            if time.monotonic() > deadline:
                return False
            # Whoever was left behind gets the next one.
            if not self.fleet.stores:
                self._send_ended(self._start_sending())
            time.sleep(0.02)
        return True

    # -------------------------------------------------------------- the observer

    def _end(self, calls: Calls, who: str) -> bool:
        """Wait for a call on every rank; True if it succeeded on all."""
        succeeded = True
        for call in calls.calls:
            pid = call.worker.pid
            try:
                call.result(_SEND_SECONDS * 4)
                seconds = call.seconds()
            except WorkerDied:
                succeeded = False
                continue
            except NoAnswer as error:
                self._fail(f"{who} hangs: {error}")
                return False
            except RemoteError as error:
                succeeded = False
                seconds = error.seconds
                if not _OURS & set(error.kinds):
                    self._fail(f"{who} failed with an error of somebody else: {error}")
            if call.do == "send":
                self._judge_wait(who, pid, seconds, _SEND_SECONDS)
        return succeeded

    def _judge_wait(self, who: str, pid: int, seconds: float, deadline: float) -> None:
        if pid in self.excused:
            return
        self.report.note_wait(seconds, deadline)
        if seconds > latest(deadline) + (_TELLING_SECONDS if self.slowed else 0.0):
            self._fail(f"{who}'s call took {seconds:.2f} s, its deadline is {deadline:g} s")

    def _judge(self, replica: Side) -> None:
        """What a replica's ranks found after each of their calls."""
        for rank, worker in enumerate(replica.workers):
            for event in worker.drain():
                if event["event"] != "followed":
                    continue
                self.report.checks += 1
                named, difference = event["version"], event["difference"]
                if named is not None and difference is not None:
                    self.report.wrong.append(
                        f"{replica.name} rank {rank} names version {named}: {difference}"
                    )
                if named is None and event["tainted"] is None and not event["pristine"]:
                    self._fail(f"{replica.name} rank {rank} holds a mixture, and doesn't say so")
                kinds = event["error"]
                if kinds and not _OURS & set(kinds):
                    self._fail(f"{replica.name} rank {rank}: {kinds[0]}: {event['message']}")
                self._judge_wait(replica.name, worker.pid, event["seconds"], _RECEIVE_SECONDS)

    def _judge_session(self) -> None:
        """The session names no later version than a replica holds."""
        view = inspect_session(self.session, self.observer, limit=4)
        for why in view.unreadable:
            self._fail(f"the session holds a record that can't be read: {why}")
        for member in view.receivers:
            replica = self.replicas.get(member.member_id)
            if replica is None or member.serving is None:
                continue
            held = self.ask(replica.first, "version", now=True)
            if held is not None and held < member.serving:
                self._fail(
                    f"the session says that {member.member_id} serves {member.serving}, "
                    f"it holds {held}"
                )

    def _fail(self, problem: str) -> None:
        self.report.problems.append(f"at version {self.version}, {self.fault}: {problem}")

    # -------------------------------------------------------------- the end

    def close(self) -> None:
        """End the session in good order, and every process."""
        with contextlib.suppress(Exception):
            self.session.close()
        if self.report.ok:
            for replica in list(self.replicas.values()):
                self.let_leave(replica)
        if self.has_small_disk:  # lazily: some processes still have files open there
            command = ["umount", "-l", str(self.versions)]
            subprocess.run(command, check=False)
        self.fleet.close(reuse=False)
        if self.proxy is not None:
            self.proxy.close()


def _mount(directory: Path) -> bool:
    """Make ``directory`` a small disk, if this process may."""
    if not posix.is_root():
        return False
    command = ["mount", "-t", "tmpfs", "-o", f"size={_SMALL_DISK},mode=0700", "tmpfs"]
    return subprocess.run([*command, str(directory)], capture_output=True).returncode == 0


def _tail(replica: Side) -> str:
    return "; ".join(worker.tail()[-400:] for worker in replica.workers)
