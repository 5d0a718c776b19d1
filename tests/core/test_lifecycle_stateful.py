"""Random histories of senders and receivers, over the real store, with crashes anywhere.

Every invariant is checked by an observer that sees only what is written and what
the simulated weights hold: see ``lifecycle_world``.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import lifecycle_world as sim
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from weightwire.errors import PeerLost, TransferTimeout

INDEX = st.integers(0, 5)
PREEMPTIONS = st.lists(
    # After so many store operations, this process takes over, for so many steps; again and again.
    st.tuples(st.integers(0, 24), INDEX, st.sampled_from([1, 2, 4, 12, 30])),
    max_size=2,
)
WAIT = st.sampled_from(["applied", "published"])
ON_LOSS = st.sampled_from(["fail", "continue"])
FAULTS = st.sampled_from(
    [
        "crash",
        "crash between two writes",
        "stop",
        "leave",
        "deadline",
        "peer lost",
        "prepare",
        "install",
        "fetch",
        "commit",
        "rollback",
        "transfer",
    ]
)


class Lifecycle(RuleBasedStateMachine):
    flow = ""

    def __init__(self) -> None:
        super().__init__()
        memory = Path("/dev/shm")
        self.directory = tempfile.mkdtemp(
            prefix="weightwire-lifecycle-", dir=memory if memory.is_dir() else None
        )
        self.world: sim.World | None = None

    def teardown(self) -> None:
        try:
            if self.world is not None:
                self.assert_progress()
        finally:
            shutil.rmtree(self.directory, ignore_errors=True)

    def pick(self, index: int, kind: type = sim.Process) -> sim.Process | None:
        candidates = self.world.live(kind)
        return candidates[index % len(candidates)] if candidates else None

    # ------------------------------------------------------------------ what may happen

    @initialize(
        keep=st.sampled_from([1, 2]),
        max_unavailable=st.sampled_from([None, 1]),
        max_version_lag=st.sampled_from([None, 0, 1]),
    )
    def begin(self, keep: int, max_unavailable: int | None, max_version_lag: int | None) -> None:
        self.world = sim.World(
            Path(self.directory) / "session", self.flow, keep, max_unavailable, max_version_lag
        )
        sim.Sender(self.world, "sender")
        sim.Receiver(self.world, "a")
        sim.Receiver(self.world, "b")
        for process in self.world.processes:
            process.step()

    def kick(self, wait: str, on_loss: str) -> None:
        """Whoever is idle makes its next call."""
        for sender in self.world.live(sim.Sender):
            if sender.idle and not sender.stopped:
                sender.send(wait, on_loss)
        for receiver in self.world.live(sim.Receiver):
            if receiver.idle and not receiver.stopped:
                receiver.receive()

    @rule(rounds=st.integers(1, 40), wait=WAIT, on_loss=ON_LOSS)
    def everyone_works(self, rounds: int, wait: str, on_loss: str) -> None:
        self.kick(wait, on_loss)
        for turn in range(rounds):
            for process in list(self.world.processes):
                process.step()
            if turn % 4 == 3:
                self.world.tick(sim.LEASE / 16)

    @rule(index=INDEX, steps=st.integers(1, 20), preempt=PREEMPTIONS, wait=WAIT, on_loss=ON_LOSS)
    def one_works_and_others_interrupt(
        self, index: int, steps: int, preempt: list, wait: str, on_loss: str
    ) -> None:
        self.kick(wait, on_loss)
        process = self.pick(index)
        if process is not None:
            self.world.run(process, steps, [(n, self.pick(i), k) for n, i, k in preempt])

    @rule(rounds=st.integers(1, 30), preempt=PREEMPTIONS, wait=WAIT, on_loss=ON_LOSS)
    def everyone_interrupts_everyone(
        self, rounds: int, preempt: list, wait: str, on_loss: str
    ) -> None:
        self.kick(wait, on_loss)
        for _ in range(rounds):
            for process in list(self.world.processes):
                self.world.run(process, 1, [(n, self.pick(i), k) for n, i, k in preempt])

    @rule(times=st.integers(1, 8))
    def time_passes(self, times: int) -> None:
        for _ in range(times):
            self.world.tick()

    @rule(resume=st.none() | st.integers(0, 4), crash=st.booleans())
    def sender_restarts(self, resume: int | None, crash: bool) -> None:
        senders = self.world.live(sim.Sender)
        if crash:
            for sender in senders:
                sender.crash()
        if crash or len(senders) < 3:
            sim.Sender(self.world, "sender", resume)
        if crash:
            for _ in range(6):  # the predecessor's lease has to run out
                self.world.tick()
                self.world.processes[-1].step()

    @rule(name=st.sampled_from("ab"), crash=st.booleans())
    def receiver_starts(self, name: str, crash: bool) -> None:
        mine = [receiver for receiver in self.world.live(sim.Receiver) if receiver.name == name]
        if crash:
            for receiver in mine:
                receiver.crash()
        if crash or len(mine) < 2:
            sim.Receiver(self.world, name)

    @rule(index=INDEX, fault=FAULTS, writes=st.integers(0, 10), restores=st.booleans())
    def fault(self, index: int, fault: str, writes: int, restores: bool) -> None:
        process = self.pick(index)
        if process is None:
            return
        match fault:
            case "crash":
                process.crash()
            case "crash between two writes":
                process.writes_left = writes
            case "stop":
                process.stopped = True
            case "leave":
                process.leave()
            case "deadline" if process.member is not None:
                process.interrupt(TransferTimeout("injected"))
            case "peer lost" if process.member is not None:
                process.interrupt(PeerLost("injected"))
            case _:
                process.fault, process.restores = fault, restores

    @rule()
    def stopped_ones_continue(self) -> None:
        for process in self.world.processes:
            process.stopped = False

    # ------------------------------------------------------------------ what must hold

    @invariant()
    def nothing_is_claimed_that_is_not_held(self) -> None:
        if self.world is not None:
            self.world.check()

    def assert_progress(self) -> None:
        """One live sender, one live receiver, no more faults: a new version gets applied."""
        world = self.world
        for process in world.live(sim.Process):
            process.fault, process.writes_left, process.stopped = None, None, False
        sender = self._survivor(sim.Sender, "sender")
        receiver = self._survivor(sim.Receiver, "a")
        before = set(world.outcomes)
        for turn in range(600):
            if turn % 10 == 0:
                world.tick()
            if sender.idle:
                assert turn < 500, f"no version was applied; the last error: {sender.error!r}"
                sender.send("applied", "fail")
            if receiver.idle:
                receiver.receive()
            sender.step()
            receiver.step()
            world.check()
            serving = receiver.machine.serving if receiver.machine is not None else None
            if serving is not None and serving not in before and world.outcomes.get(serving):
                return
        raise AssertionError(f"stuck: sender {sender.error!r}, receiver {receiver.error!r}")

    def _survivor(self, kind: type, name: str) -> sim.Process:
        """The newest that is in; all others are gone."""
        members = [p for p in self.world.live(kind) if p.name == name and p.member is not None]
        kept = max(members, key=lambda p: p.member.incarnation, default=None)
        newest = max(
            (
                int(key.split("/")[-2])
                for key in self.world.records
                if key.startswith(f"{'senders' if kind is sim.Sender else f'receivers/{name}'}/")
                and key.endswith("/record")
            ),
            default=0,
        )
        if kept is not None and kept.member.incarnation < newest:
            kept = None  # it was taken over; its handle says so, and is opened again
        for process in self.world.live(kind):
            if process is not kept:
                process.crash()
        if kept is not None:
            kept.interrupt(TransferTimeout("the caller starts anew"))
            while kept.steps is not None and kept.alive:
                kept.step()
            return kept
        return kind(self.world, name)


def _settings(**options: object) -> settings:
    return settings(
        deadline=None,
        database=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        **options,
    )


class StoreLifecycle(Lifecycle):
    flow = "store"


class PullLifecycle(Lifecycle):
    flow = "pull"


TestStore = StoreLifecycle.TestCase
TestStore.settings = _settings(max_examples=60, stateful_step_count=40, derandomize=True)
TestPull = PullLifecycle.TestCase
TestPull.settings = _settings(max_examples=60, stateful_step_count=40, derandomize=True)


class SoakStoreLifecycle(StoreLifecycle):
    pass


class SoakPullLifecycle(PullLifecycle):
    pass


@pytest.mark.soak
@pytest.mark.timeout(3600)
class TestStoreSoak(SoakStoreLifecycle.TestCase):
    settings = _settings(max_examples=1500, stateful_step_count=80)


@pytest.mark.soak
@pytest.mark.timeout(3600)
class TestPullSoak(SoakPullLifecycle.TestCase):
    settings = _settings(max_examples=1500, stateful_step_count=80)
