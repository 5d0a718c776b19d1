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
    st.tuples(st.integers(0, 24), INDEX, st.integers(1, 12)), max_size=2
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

    @initialize(keep=st.sampled_from([1, 2]))
    def begin(self, keep: int) -> None:
        self.world = sim.World(Path(self.directory) / "session", self.flow, keep)
        sim.Sender(self.world, "sender")
        sim.Receiver(self.world, "a")
        self.run_all(3)

    @rule(resume=st.none() | st.integers(0, 3))
    def start_sender(self, resume: int | None) -> None:
        if len(self.world.live(sim.Sender)) < 3:
            sim.Sender(self.world, "sender", resume)

    @rule(name=st.sampled_from("ab"))
    def start_receiver(self, name: str) -> None:
        if len(self.world.live(sim.Receiver)) < 4:
            sim.Receiver(self.world, name)

    @rule(
        index=INDEX,
        wait=st.sampled_from(["applied", "published"]),
        on_loss=st.sampled_from(["fail", "continue"]),
    )
    def send(self, index: int, wait: str, on_loss: str) -> None:
        sender = self.pick(index, sim.Sender)
        if sender is not None and sender.idle:
            sender.send(wait, on_loss)

    @rule()
    def everyone_receives(self) -> None:
        for receiver in self.world.live(sim.Receiver):
            if receiver.idle:
                receiver.receive()

    @rule(index=INDEX, steps=st.integers(1, 12), preemptions=PREEMPTIONS)
    def run(self, index: int, steps: int, preemptions: list) -> None:
        process = self.pick(index)
        if process is not None:
            others = [(n, self.pick(i), k) for n, i, k in preemptions]
            self.world.run(process, steps, others)

    @rule(rounds=st.integers(1, 12))
    def run_all(self, rounds: int) -> None:
        for _ in range(rounds):
            for process in list(self.world.processes):
                process.step()

    @rule(times=st.integers(1, 6))
    def time_passes(self, times: int) -> None:
        for _ in range(times):
            self.world.tick()

    @rule(index=INDEX)
    def crash(self, index: int) -> None:
        process = self.pick(index)
        if process is not None:
            process.crash()

    @rule(index=INDEX, writes=st.integers(0, 8))
    def crash_between_writes(self, index: int, writes: int) -> None:
        process = self.pick(index)
        if process is not None:
            process.writes_left = writes

    @rule(
        index=INDEX,
        where=st.sampled_from(["prepare", "install", "fetch", "commit", "rollback", "transfer"]),
        restores=st.booleans(),
    )
    def inject(self, index: int, where: str, restores: bool) -> None:
        process = self.pick(index, sim.Sender if where == "transfer" else sim.Receiver)
        if process is not None:
            process.fault, process.restores = where, restores

    @rule(index=INDEX, error=st.sampled_from([TransferTimeout, PeerLost]))
    def interrupt(self, index: int, error: type[Exception]) -> None:
        process = self.pick(index)
        if process is not None and process.member is not None:
            process.interrupt(error("injected"))

    @rule(index=INDEX)
    def stop_or_continue(self, index: int) -> None:
        process = self.pick(index)
        if process is not None:
            process.stopped = not process.stopped

    @rule(index=INDEX)
    def leave(self, index: int) -> None:
        process = self.pick(index)
        if process is not None:
            process.leave()

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
TestStore.settings = _settings(max_examples=40, stateful_step_count=40, derandomize=True)
TestPull = PullLifecycle.TestCase
TestPull.settings = _settings(max_examples=40, stateful_step_count=40, derandomize=True)


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
