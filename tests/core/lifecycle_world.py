"""Many processes of one session in one thread: scheduled, stopped and crashed at will.

The protocols are production's own, over the real ``file://`` store; simulated are
the scheduler, the clock and the data plane.  Everything that a process writes is
seen by an outside observer (``World.records``), which judges it on the spot.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from weightwire.contract import Capabilities, Policy
from weightwire.errors import TransferError, TransferTimeout, WeightWireError
from weightwire.lifecycle.acts import Commit, Fetch, Install, Prepare, Rollback, Transfer
from weightwire.lifecycle.receiver import ReceiverMachine
from weightwire.lifecycle.retention import Retention
from weightwire.lifecycle.rollout import Terms
from weightwire.lifecycle.sender import Offering, SenderMachine, lost_readers
from weightwire.session import membership
from weightwire.session.file import FileStore
from weightwire.session.lease import LeaseKeeper, LeaseObserver
from weightwire.session.records import Applied
from weightwire.session.session import Session
from weightwire.session.store import SessionStore
from weightwire.waiting import Act, Waiting

GROUPS = 3
DERIVED = -1
LEASE = 8.0
ERRORS = (WeightWireError, RuntimeError)

CAPABILITIES = {
    "store": Capabilities(
        flow="store",
        default_wait="published",
        needs_live_receivers=False,
        serves_finished=True,
        ranged_reads=True,
        lands_in_place=True,
        elastic=True,
    ),
    "pull": Capabilities(
        flow="pull",
        default_wait="applied",
        needs_live_receivers=True,
        serves_finished=False,
        ranged_reads=True,
        lands_in_place=True,
        elastic=True,
    ),
}


class Crash(BaseException):
    """The simulated process is gone: nothing it does from here on has any effect."""


class World:
    """A session directory, a clock, a data plane, and the observer's notes."""

    def __init__(
        self,
        directory: Path,
        flow: str,
        keep: int = 1,
        max_unavailable: int | None = None,
        max_version_lag: int | None = None,
        max_receivers: int | None = None,
    ) -> None:
        self.directory = directory
        self.flow = flow
        self.keep = keep
        self.max_unavailable = max_unavailable
        self.max_version_lag = max_version_lag
        self.max_receivers = max_receivers
        self.most_out = 0
        self.capabilities = CAPABILITIES[flow]
        self.now = 0.0
        self.processes: list[Process] = []
        self.records: dict[str, dict] = {}
        self.outcomes: dict[Policy, bool] = {}
        self.waves: set[Policy] = set()
        self.commits: set[tuple[Policy, str]] = set()
        self.disk: dict[Policy, dict[int, Policy]] = {}
        self.announced: dict[Policy, Sender] = {}
        self.credits: dict[Policy, set[str]] = {}
        self.preemptions: list[tuple[int, Process, int]] = []

    # ------------------------------------------------------------------ scheduling

    def live(self, kind: type[Process]) -> list[Process]:
        return [p for p in self.processes if isinstance(p, kind) and p.alive]

    def tick(self, seconds: float = LEASE / 4) -> None:
        """Time passes; whoever isn't stopped renews its lease, as its thread would."""
        self.now += seconds
        for process in self.processes:
            process.renew()

    def run(self, process: Process, steps: int, preemptions: list) -> None:
        """Run a process; others take over between its store operations.

        Args:
            preemptions: (after so many operations, this other one, for so many steps).
        """
        others = [entry for entry in preemptions if entry[1] is not process]
        for _ in range(steps):
            self.preemptions = others
            process.step()
            others, self.preemptions = self.preemptions, []

    def before_operation(self, process: Process) -> None:
        waiting, self.preemptions = self.preemptions, []
        rest = []
        for operations, intruder, steps in waiting:
            if operations > 0:
                rest.append((operations - 1, intruder, steps))
                continue
            for _ in range(steps):
                intruder.step()
            self.note_acceptable()
        self.preemptions = rest

    # ------------------------------------------------------------------ the observer

    def written(self, process: Process, key: str, value: bytes) -> None:
        body = json.loads(value)["body"]
        self.records[key] = body
        if match := re.fullmatch(r"versions/(\d+)/(\d+)\.(\d+)/outcome", key):
            self._judge_outcome(process, Policy(*map(int, match.groups())), body)
        if key.endswith("/status"):
            assert isinstance(process, Receiver)
            process.judge_status()
            self._judge_pool(process, body["state"])

    def _judge_pool(self, process: Receiver, state: str) -> None:
        """No more are taken out of service at a time than may be."""
        if state == "serving":
            process.taken_out_by = 0
        elif state == "installing" and process.serves:
            process.taken_out_by = process.reading_from
        process.serves = state == "serving"
        if state != "installing":
            return
        newest = max(process.taken_out_by for process in self.live(Receiver))
        out = [
            process.name
            for process in self.live(Receiver)
            if process.leased and process.taken_out_by == newest > 0
        ]
        self.most_out = max(self.most_out, len(out))
        if self.max_unavailable is not None:
            assert len(out) <= self.max_unavailable, f"{out} are out of service at once"

    def forgotten(self, key: str) -> None:
        self.records.pop(key, None)
        prefix = f"{key}/"
        for name in [name for name in self.records if name.startswith(prefix)]:
            del self.records[name]

    def _judge_outcome(self, process: Process, policy: Policy, body: dict) -> None:
        finished = body.get("error") is None
        assert policy not in self.outcomes, f"{policy} has two outcomes"
        self.outcomes[policy] = finished
        if not finished:
            return
        if body.get("more"):
            self.waves.add(policy)
        others = [
            other
            for other, done in self.outcomes.items()
            if done
            and other != policy
            and other not in self.waves
            and (other.incarnation, other.version) == (policy.incarnation, policy.version)
        ]
        assert not others, f"{policy} finished, and so did {others}"
        assert isinstance(process, Sender)
        assert process.member is not None
        assert process.member.incarnation == policy.incarnation
        if self.flow == "store":
            assert len(self.disk[policy]) == GROUPS, f"{policy} finished with holes"
        if process.wait == "applied" and process.on_loss == "fail":
            for name in self._record(policy, "started")["readers"]:
                assert (policy, name) in self.commits, f"{policy} finished before {name}"

    def roster(self, policy: Policy) -> list[str]:
        return self._record(policy, "offer")["offer"]["roster"]

    def _record(self, policy: Policy, what: str) -> dict:
        return self.records.get(
            f"versions/{policy.incarnation:06d}/{policy.version:012d}.{policy.attempt:04d}/{what}"
        )

    def note_acceptable(self) -> None:
        """Which versions may be taken at this moment, for whoever looks right now."""
        for process in self.processes:
            if isinstance(process, Receiver) and process.running:
                process.acceptable |= self.acceptable(process.name)

    def acceptable(self, name: str) -> set[Policy]:
        senders = {
            int(match[1]): body
            for key, body in self.records.items()
            if (match := re.fullmatch(r"senders/(\d+)/record", key))
        }
        if not senders:
            return set()
        newest = max(senders)
        limits, limit = {}, senders[newest].get("resume_from")
        for older in range(newest - 1, 0, -1):
            if limit is None or older not in senders:
                break
            limits[older] = limit
            before = senders[older].get("resume_from")
            limit = None if before is None else min(limit, before)
        found = set()
        for key in self.records:
            match = re.fullmatch(r"versions/(\d+)/(\d+)\.(\d+)/offer", key)
            if match is None:
                continue
            policy = Policy(*map(int, match.groups()))
            outcome = self.outcomes.get(policy)
            if self.flow == "pull":
                good = (
                    policy.incarnation == newest and outcome is None and name in self.roster(policy)
                )
            elif policy.incarnation == newest:
                good = self._record(policy, "started") is not None and outcome is not False
            else:
                good = outcome is True and policy.version <= limits.get(policy.incarnation, -1)
            if good:
                found.add(policy)
        return found

    def check(self) -> None:
        """What must hold whenever nobody is in the middle of a step."""
        for process in self.live(Receiver):
            process.judge_status()

    # ------------------------------------------------------------------ data plane

    def drop(self, sender: Sender, policy: Policy) -> None:
        for process in self.live(Receiver):
            assert not (process.reading == policy and process.leased), (
                f"{policy} was dropped under {process.name}"
            )
        own = [
            p for p, done in self.outcomes.items() if done and p.incarnation == policy.incarnation
        ]
        if sender.member.incarnation == policy.incarnation:
            assert policy != max(own, default=None), f"{policy}, the newest, was dropped"
        self.disk.pop(policy, None)


class CrashingStore(SessionStore):
    """The real store, until the process that uses it crashes."""

    def __init__(self, inner: SessionStore, process: Process) -> None:
        self.inner = inner
        self.process = process
        self.url = inner.url
        self.directory = inner.directory

    def _enter(self, *, writes: bool) -> None:
        process = self.process
        if process.crashed:
            raise Crash
        process.world.before_operation(process)
        if writes and process.writes_left is not None:
            if process.writes_left == 0:
                process.crashed = True
                raise Crash
            process.writes_left -= 1

    def get(self, key):
        self._enter(writes=False)
        return self.inner.get(key)

    def put(self, key, value, *, durable=True):
        self._enter(writes=True)
        self.inner.put(key, value, durable=durable)
        self.process.world.written(self.process, key, value)

    def create(self, key, value):
        self._enter(writes=True)
        made = self.inner.create(key, value)
        if made:
            self.process.world.written(self.process, key, value)
        return made

    def delete(self, key):
        self._enter(writes=True)
        self.inner.delete(key)
        self.process.world.forgotten(key)

    def children(self, prefix):
        self._enter(writes=False)
        return self.inner.children(prefix)

    def delete_tree(self, prefix):
        self._enter(writes=True)
        self.inner.delete_tree(prefix)
        self.process.world.forgotten(prefix)

    def close(self):
        self.inner.close()


class Process:
    """One simulated process: a protocol, and the act that it is in the middle of."""

    kind = ""

    def __init__(self, world: World, name: str, resume_from: int | None = None) -> None:
        self.world = world
        self.name = name
        self.resume_from = resume_from
        self.crashed = self.stopped = self.left = self.running = False
        self.writes_left: int | None = None
        self.fault: str | None = None
        self.restores = True
        self.error: BaseException | None = None
        self.waits_for: Sequence[str] = ()
        self.member = None
        self.renewed = float("-inf")
        self.steps = None
        self.task: Iterator | None = None
        world.processes.append(self)
        self._guarded(self._open)

    def _open(self) -> None:
        self.session = Session(CrashingStore(FileStore(self.world.directory), self), None)
        self.observer = LeaseObserver(self.session, clock=lambda: self.world.now)
        self.steps = membership.claim(
            self.session,
            self.observer,
            self.kind,
            member_id=self.name,
            world_size=1,
            backend="simulated",
            lease_ttl=LEASE,
            resume_from=self.resume_from,
        )

    @property
    def alive(self) -> bool:
        return not (self.crashed or self.left)

    @property
    def idle(self) -> bool:
        return self.alive and self.member is not None and self.steps is None

    @property
    def leased(self) -> bool:
        """Whether nobody can have taken it for dead yet."""
        return self.alive and self.world.now <= self.renewed + LEASE

    def renew(self) -> None:
        if self.alive and not self.stopped and not self.running and self.member is not None:
            self._guarded(self._renew)

    def _renew(self) -> None:
        self.keeper.renew()
        self.renewed = self.world.now

    def step(self) -> None:
        """Resume the protocol once, or perform one slice of the act that it asked for."""
        if not self.alive or self.stopped or self.running or self.steps is None:
            return
        self._guarded(self._advance)

    def interrupt(self, error: BaseException) -> None:
        """What the watch does when the deadline passes, the peer dies or the caller gives up."""
        if self.alive and not self.running and self.steps is not None:
            self.task = None
            self._guarded(lambda: self._resume("throw", error))

    def crash(self) -> None:
        self.crashed = True
        if self.steps is not None and not self.running:
            self.steps.close()
        self.steps = self.task = None

    def leave(self) -> None:
        if self.idle:
            self._guarded(lambda: membership.leave(self.session, self.member))
            self.left = True

    def _guarded(self, work) -> None:
        self.running = True
        self.world.note_acceptable()
        try:
            work()
        except Crash:
            self.crashed = True
        finally:
            self.running = False
        if self.crashed:
            self.crash()

    def _advance(self) -> None:
        if self.task is None:
            self._resume("send", None)
            return
        try:
            next(self.task)
            return
        except StopIteration as stop:
            how, value = "send", stop.value
        except ERRORS as error:
            how, value = "throw", error
        self.task = None
        self._resume(how, value)

    def _resume(self, how: str, value: object) -> None:
        try:
            step = getattr(self.steps, how)(value)
        except StopIteration as stop:
            self.steps = None
            self.ended(stop.value)
        except ERRORS as error:
            self.steps = None
            self.failed(error)
        else:
            self.task = self.perform(step) if isinstance(step, Act) else None
            self.waits_for = step.missing if isinstance(step, Waiting) else ()

    def injected(self, where: str) -> None:
        if self.fault == where:
            self.fault = None
            raise RuntimeError(f"injected failure of {where}")

    def ended(self, result: object) -> None:
        if self.member is None:
            self.member = result
            self.keeper = LeaseKeeper(self.session, self.member)
            self._renew()
            self.joined()

    def failed(self, error: BaseException) -> None:
        self.error = error
        if self.member is None:
            self.left = True  # its process ends, the name was taken

    def joined(self) -> None: ...

    def perform(self, act: Act) -> Iterator: ...


class Sender(Process):
    kind = "senders"
    wait = "published"
    on_loss = "fail"
    finished: int | None = None

    def joined(self) -> None:
        self.machine = SenderMachine(
            self.session, self.member, self.observer, self.world.capabilities
        )
        self.retention = Retention(
            self.session,
            self.member,
            self.observer,
            keep=self.world.keep,
            stores=self.world.flow == "store",
        )

    def send(self, wait: str, on_loss: str) -> None:
        last = self.machine.last
        if last is None:
            version = (self.resume_from or 0) + 1
        elif self.finished == last.version or (
            self.world.outcomes.get(last) is True and last not in self.world.waves
        ):
            version = last.version + 1
        else:
            version = last.version
        self.wait, self.on_loss, self.error = wait, on_loss, None
        self.machine.begin()
        self._send(version)

    def _send(self, version: int) -> None:
        terms = Terms(
            on_receiver_loss=self.on_loss,
            max_receivers=self.world.max_receivers,
            max_unavailable=self.world.max_unavailable,
            max_version_lag=self.world.max_version_lag,
            ready_within=0.0,
        )
        self.steps = self.machine.send(
            Offering(version, "table", 1, (b"",), "off", self.wait, terms)
        )

    def ended(self, result: object) -> None:
        claimed = self.member is None
        super().ended(result)
        if not claimed:
            self.retention.retire(lambda policy: self.world.drop(self, policy))
            if self.machine.more:
                self._send(self.machine.last.version)
            else:
                self.finished = self.machine.last.version

    def perform(self, act: Act) -> Iterator:
        assert isinstance(act, Transfer)
        policy = act.offer.policy
        if self.world.flow == "store":
            for group in range(GROUPS):
                yield
                self.injected("transfer")
                self.world.disk.setdefault(policy, {})[group] = policy
            return
        self.world.announced[policy] = self
        try:
            waits_for = set(act.readers)
            while waits_for - self.world.credits.get(policy, set()):
                yield
                self.injected("transfer")
                lost = lost_readers(self.session, self.observer, policy)
                for name in waits_for.intersection(lost):
                    if self.on_loss == "fail":
                        raise TransferError(f"receiver {name} is gone")
                    waits_for.discard(name)
        finally:
            self.world.announced.pop(policy, None)


class Receiver(Process):
    def __init__(self, world: World, name: str) -> None:
        self.kind = f"receivers/{name}"
        # The groups, and what post-load processing derives from them.
        self.weights: dict[int, Policy | None] = dict.fromkeys([*range(GROUPS), DERIVED])
        self.reading: Policy | None = None
        self.acceptable: set[Policy] = set()
        self.machine: ReceiverMachine | None = None
        self.serves = False
        self.taken_out_by = self.reading_from = 0  # incarnations of the sender
        super().__init__(world, name)

    def joined(self) -> None:
        self.machine = ReceiverMachine(
            self.session, self.member, self.observer, self.world.capabilities
        )

    def receive(self) -> None:
        self.error = None
        self.steps = self.machine.receive()

    def step(self) -> None:
        self.acceptable = set()
        super().step()

    def ended(self, result: object) -> None:
        super().ended(result)
        self.reading = None

    def failed(self, error: BaseException) -> None:
        super().failed(error)
        self.reading = None

    def judge_status(self) -> None:
        """Neither the record nor the machine names what the weights don't wholly hold."""
        if self.machine is None:
            return
        status = self.world.records.get(self.member.key("status"), {})
        named = status.get("serving")
        if named is not None:
            assert status["state"] == "serving"
            self._assert_holds(Policy(**named), "its status")
        if self.machine.serving is not None:
            assert self.machine.tainted is None
            self._assert_holds(self.machine.serving, "its machine")
        elif self.steps is None and len(set(self.weights.values())) > 1:
            assert self.machine.tainted is not None, f"{self.name} holds a mixture in silence"
            assert status["state"] == "tainted"
            assert status["error"]["message"] == self.machine.tainted.message

    def _assert_holds(self, policy: Policy, who: str) -> None:
        assert set(self.weights.values()) == {policy}, (
            f"{who} says that {self.name} serves {policy}, it holds {self.weights}"
        )

    def perform(self, act: Act) -> Iterator:
        match act:
            case Prepare(offer):
                # The protocol has just looked: what it takes was to be had while it did.
                allowed = self.acceptable | self.world.acceptable(self.name)
                assert offer.policy in allowed, f"{self.name} takes {offer.policy}: void"
                self.reading_from = offer.policy.incarnation
                return self._prepare()
            case Install(offer):
                self.reading = offer.policy
                return self._nothing()
            case Fetch(offer):
                return self._fetch(offer)
            case Commit(offer):
                return self._commit(offer.policy)
            case Rollback():
                return self._roll_back()
        raise AssertionError(act)

    def _nothing(self) -> Iterator:
        yield
        self.injected("install")

    def _prepare(self) -> Iterator:
        yield
        self.injected("prepare")
        return (b"",)

    def _fetch(self, offer) -> Iterator:
        policy = offer.policy
        self.before, self.committed = dict(self.weights), False
        for group in range(GROUPS):
            yield
            if group == 1:
                self.injected("fetch")
            while not self._available(policy, group):
                failure = self.machine.sender_failure(offer)
                if failure is not None:
                    raise failure
                yield
            self.weights[group] = policy
        self.world.credits.setdefault(policy, set()).add(self.name)

    def _available(self, policy: Policy, group: int) -> bool:
        if self.world.flow == "store":
            if group in self.world.disk.get(policy, {}):
                return True
            assert not self.leased, f"group {group} of {policy} is gone under {self.name}"
            raise TransferError("the version was dropped while this process was stopped")
        if self.world.outcomes.get(policy) is True:
            raise TransferTimeout("nothing was announced")
        sender = self.world.announced.get(policy)
        return sender is not None and sender.alive

    def _commit(self, policy: Policy) -> Iterator:
        yield
        self.injected("commit")
        self.committed = True
        self.weights[DERIVED] = policy
        self.reading = None
        assert set(self.weights.values()) == {policy}
        self.world.commits.add((policy, self.name))
        return Applied()

    def _roll_back(self) -> Iterator:
        yield
        self.reading = None
        self.injected("rollback")
        before = getattr(self, "before", None)
        if before is None or before == self.weights:
            return True
        if self.committed or not self.restores:
            return False
        self.weights = dict(before)
        return True
