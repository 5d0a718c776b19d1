"""Real processes over three third-party distributions: a backend, a session, an observer."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
from thirdparty_rig import Peer, World, answers, weightwire


def exchange(version: int, senders: list[Peer], *replicas: list[Peer]) -> None:
    ranks = [rank for replica in replicas for rank in replica]
    for rank in ranks:
        rank.start("receive", minimum=version)
    for rank in senders:
        rank.start("send", version=version, timeout=30)
    reports = answers([*ranks, *senders])
    assert {report["version"] for report in reports} == {version}
    assert all(rank.call("holds", version=version) for rank in ranks)
    assert not any(rank.call("holds", version=version - 1) for rank in ranks)


def test_the_command_line_lists_acme_and_where_it_comes_from(site: Path) -> None:
    listed = json.loads(weightwire("backends", "--json", sites=(site,)).stdout)["backends"]
    (acme,) = [row for row in listed if row["name"] == "acme"]
    assert acme["distribution"] == "weightwire-acme 0.1.0"
    assert acme["available"]
    assert acme["capabilities"]["flow"] == "pull"
    assert not acme["capabilities"]["ranged_reads"]


@pytest.mark.parametrize(
    ("senders", "replicas", "overlap"),
    [(1, (1,), False), (2, (1, 2), True), (3, (2,), False), (4, (1, 1), True)],
)
def test_versions_in_a_row_arrive_bit_for_bit(
    world: World, senders: int, replicas: tuple[int, ...], overlap: bool
) -> None:
    trainer = world.sender(senders, min_receivers=len(replicas), overlap=overlap)
    receivers = [
        world.receiver(f"replica-{i}", ranks, overlap=overlap) for i, ranks in enumerate(replicas)
    ]
    for version in (1, 2, 7):
        exchange(version, trainer, *receivers)
    for rank in [*trainer, *(rank for replica in receivers for rank in replica)]:
        assert rank.call("close") == []
    seen = world.events(3 * (1 + len(replicas)))
    names = {f"replica-{i}" for i in range(len(replicas))}
    for version in (1, 2, 7):
        lines = [line for line in seen if line["version"] == version]
        assert {line["member"] for line in lines if line["event"] == "applied"} == names
        assert [line["member"] for line in lines if line["event"] == "published"] == ["sender"]
        assert all(line["report"]["backend"] == "acme" for line in lines)
        assert all(line["session"] == world.session and not line["error"] for line in lines)


def test_inspect_reads_the_session(world: World, site: Path) -> None:
    trainer, replica = world.sender(), world.receiver("replica-0")
    exchange(3, trainer, replica)
    shown = json.loads(weightwire("inspect", world.session, "--json", sites=(site,)).stdout)
    assert [(v["version"], v["state"]) for v in shown["versions"]] == [(3, "finished")]


def test_a_killed_receiver_ends_the_version_and_is_named(world: World) -> None:
    trainer, replica = world.sender(2), world.receiver("replica-0")
    exchange(1, trainer, replica)
    for rank in trainer:
        rank.start("send", version=2, timeout=30)
    assert replica[0].call("begin") == 2
    replica[0].kill()
    for failure in [rank.failure() for rank in trainer]:
        assert "PeerLost" in failure.kinds
        assert "'replica-0'" in failure.message
        assert failure.seconds < 10
    aborted = world.events(3)[-1]
    assert (aborted["event"], aborted["version"]) == ("aborted", 2)
    assert aborted["error"].startswith("PeerLost: ")
    exchange(3, trainer, world.receiver("replica-0"))


def test_the_others_go_on_without_a_killed_receiver(world: World) -> None:
    trainer = world.sender(2, min_receivers=2, on_receiver_loss="continue")
    killed, lives = world.receiver("killed"), world.receiver("lives", 2)
    for rank in trainer:
        rank.start("send", version=1, timeout=30)
    for rank in lives:
        rank.start("receive")
    assert killed[0].call("begin") == 1
    killed[0].kill()
    assert [report["version"] for report in answers([*trainer, *lives])] == [1] * 4
    assert all(rank.call("holds", version=1) for rank in lives)


def test_a_killed_trainer_rank_is_named_and_its_successor_is_followed(world: World) -> None:
    trainer, replica = world.sender(2), world.receiver("replica-0")
    exchange(1, trainer, replica)
    for rank in trainer:
        rank.start("send", version=2, timeout=4)
    assert replica[0].call("begin", timeout=30) == 2
    trainer[1].kill()
    failure = replica[0].start("fetch").failure()
    assert "PeerLost" in failure.kinds
    assert "trainer rank 1" in failure.message
    # It was noticed before the first byte changed.
    assert replica[0].call("version") == 1
    assert replica[0].call("holds", version=1)
    assert "TransferError" in trainer[0].failure().kinds
    trainer[0].kill()
    exchange(3, world.sender(2), replica)


def test_a_trainer_rank_that_stood_still_is_waited_for_again_once_it_goes_on(world: World) -> None:
    trainer, replica = world.sender(2, lease_ttl=1), world.receiver("replica-0")
    exchange(1, trainer, replica)
    for rank in trainer:
        rank.start("send", version=2, timeout=30)
    assert replica[0].call("begin", timeout=30) == 2
    trainer[1].signal(signal.SIGSTOP)
    failure = trainer[0].failure()
    assert "PeerLost" in failure.kinds
    assert "rank 1" in failure.message
    assert replica[0].start("fetch").failure().kinds[0] in ("PeerLost", "TransferError")
    trainer[1].signal(signal.SIGCONT)
    assert trainer[1].failure().kinds
    # Its rank 0 calls first, and hears nothing of it for a while.
    trainer[0].start("send", version=3, timeout=30)
    replica[0].start("receive", timeout=30)
    time.sleep(0.3)
    trainer[1].start("send", version=3, timeout=30)
    assert [report["version"] for report in answers([*trainer, *replica])] == [3] * 3
    assert replica[0].call("holds", version=3)


def test_a_stopped_trainer_is_named_when_the_deadline_has_passed(world: World) -> None:
    # Its lease outlives the deadline: nothing but the wait itself can notice.
    trainer, replica = world.sender(lease_ttl=60), world.receiver("replica-0")
    trainer[0].start("send", version=1, timeout=30)
    assert replica[0].call("begin", timeout=1.5) == 1
    trainer[0].signal(signal.SIGSTOP)
    began = time.monotonic()
    failure = replica[0].start("fetch").failure()
    assert failure.kinds[0] == "TransferTimeout"
    assert "from trainer rank 0 within 1.5 s" in failure.message
    assert time.monotonic() - began < 1.5 * 1.1 + 0.5
    trainer[0].signal(signal.SIGCONT)
