"""Kills, stops, restarts and interruptions at random moments, many times over."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable

import pytest
from process_rig import Calls, Fleet, RemoteError, Side, exchange

MakeFleet = Callable[..., Fleet]

pytestmark = pytest.mark.soak

REPETITIONS = 20
LEASE = 1.0


def assert_honest(replica: Side, *versions: int) -> None:
    for worker in replica.workers:
        named = worker.call("version")
        held = worker.call("holds", versions=list(versions))
        if named is not None:
            assert held == named
        elif held == "mixed":
            assert worker.call("tainted") is not None


def end(calls: Calls, seconds: float) -> None:
    """Results or errors of the library, never a hang and never a stranger's error."""
    for call in calls.calls:
        try:
            call.result(seconds)
        except RemoteError as error:
            if not {"WeightWireError", "KeyboardInterrupt", "WorkerDied"} & set(error.kinds):
                raise


@pytest.fixture
def dice() -> random.Random:
    seed = int(os.environ.get("WEIGHTWIRE_SOAK_SEED", random.randrange(1 << 30)))
    print(f"WEIGHTWIRE_SOAK_SEED={seed}")
    return random.Random(seed)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("what", ["kill", "stop", "interrupt"])
@pytest.mark.parametrize("victim", ["sender", "receiver"])
def test_members_that_fail_at_random_moments_never_leave_a_mixed_model_serving(
    make_fleet: MakeFleet,
    backend: str,
    scheme: str,
    what: str,
    victim: str,
    dice: random.Random,
) -> None:
    if (victim, what, scheme) == ("sender", "stop", "tcp"):
        pytest.skip("a stopped sender keeps serving its tcp session: nobody can replace it")
    fleet = make_fleet(backend, scheme)
    options = {
        "lease_ttl": LEASE, "model": "wide", "group_bytes": 256 << 10, "min_receivers": 2
    }  # fmt: skip
    sender = fleet.sender(**options)
    replicas = [fleet.receiver(f"replica-{i}", lease_ttl=LEASE, model="wide") for i in range(2)]
    version = 1
    exchange(sender, version, *replicas)
    for _ in range(REPETITIONS):
        version += 1
        following = [replica.start("follow", minimum=version, seconds=30.0) for replica in replicas]
        sending = sender.start("send", version=version, wait="applied", timeout=15.0)
        time.sleep(dice.random() * 0.08)  # any moment will do
        side = sender if victim == "sender" else replicas[0]
        if what == "kill":
            side.kill()
        elif what == "interrupt":
            side.first.interrupt()
        else:
            side.first.stop()
            time.sleep(LEASE * 1.6)
        if victim == "sender" and what != "interrupt":
            if what == "stop":
                old, sender = sender, fleet.sender(open_timeout=20.0, **options)
                old.first.resume()
                end(sending, 20)
                old.first.call("close")
            else:
                sender = fleet.sender(open_timeout=20.0, **options)
        elif what == "kill":
            replicas[0] = fleet.receiver("replica-0", lease_ttl=LEASE, model="wide")
        elif what == "stop":
            side.first.resume()
        if not sending.calls[0].worker.dead:
            end(sending, 20)
        # Whoever has failed calls again, as any loop does, and gets the next version.
        version += 1
        catching_up = [
            replica.start("follow", minimum=version, seconds=30.0) for replica in replicas
        ]
        sender.start("lead", version=version, seconds=30.0).results()
        for calls in [*following, *catching_up]:
            end(calls, 30)
        assert [replica.version for replica in replicas] == [version] * 2
        for replica in replicas:
            assert_honest(replica, *range(max(1, version - 4), version + 1))
        version += 1
        exchange(sender, version, *replicas)


@pytest.mark.timeout(900)
def test_two_hundred_versions_over_two_by_two_ranks_stay_flat(
    make_fleet: MakeFleet, backend: str, scheme: str
) -> None:
    fleet = make_fleet(backend, scheme)
    sender, replica = fleet.sender(ranks=2), fleet.receiver(ranks=2)
    workers = [*sender.workers, *replica.workers]
    before = []
    for version in range(1, 201):
        receiving = replica.start("receive", minimum=version)
        sender.send(version, wait="applied")
        receiving.results()
        if version == 40:
            before = [worker.call("usage") for worker in workers]
    for old, worker in zip(before, workers, strict=True):
        new = worker.call("usage")
        assert (new["fds"], new["threads"], new["maps"]) == (
            old["fds"], old["threads"], old["maps"]
        )  # fmt: skip
        assert new["rss"] - old["rss"] < 8 << 20
    assert replica.holds(200) == 200
