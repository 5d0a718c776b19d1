"""Versions over a redis:// session whose server, or whose trainer, goes and comes back."""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent


class Peer:
    """A process of ``redis_peer.py``."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "redis_peer.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, do: str, **arguments: object) -> None:
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()

    def answer(self, seconds: float = 90) -> dict:
        assert select.select([self.process.stdout], [], [], seconds)[0], "no answer"
        return json.loads(self.process.stdout.readline())

    def call(self, do: str, **arguments: object) -> dict:
        self.start(do, **arguments)
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def peers() -> Iterator[Callable[[], Peer]]:
    started: list[Peer] = []

    def start() -> Peer:
        started.append(Peer())
        return started[-1]

    yield start
    for peer in started:
        peer.kill()


def exchange(sender: Peer, receiver: Peer, version: int) -> None:
    sender.start("send", version=version, timeout=60)
    receiver.start("receive", timeout=60)
    # Together: where one waits in vain, the other's answer says why.
    sent, received = {"version": version}, {"version": version, "same": True}
    answers = sender.answer(), receiver.answer()
    assert answers == (sent, received), answers


def test_a_restart_of_the_server_holds_nobody_longer_than_it_takes(run_redis, peers):
    """Once it is away for longer than a lease: nobody may be taken for dead for that."""
    server = run_redis(keep=True)
    sender, receiver = peers(), peers()
    shared = {"backend": "memory", "session": server.url(), "lease_ttl": 2.0}
    sender.start("open_sender", **shared)
    receiver.start("open_receiver", receiver_id="one", **shared)
    assert sender.answer() == receiver.answer() == {"ok": True}
    exchange(sender, receiver, 1)
    server.restart()
    exchange(sender, receiver, 2)
    server.kill()
    back = threading.Timer(3.0, server.start)
    back.start()
    exchange(sender, receiver, 3)  # begun while nobody is there
    back.join()
    sender.start("send", version=4, timeout=60)
    time.sleep(0.3)
    server.restart()  # in the midst of a version that waits for its receiver
    assert receiver.call("receive", timeout=60) == {"version": 4, "same": True}
    assert sender.answer() == {"version": 4}


def test_a_session_whose_records_are_lost_ends_the_call_with_that_reason(run_redis, peers):
    server = run_redis()
    receiver = peers()
    opened = receiver.call(
        "open_receiver", receiver_id="one", backend="memory", session=server.url(), lease_ttl=1.0
    )
    assert opened == {"ok": True}
    receiver.start("receive", timeout=60)
    server.restart()
    answer = receiver.answer(30)
    assert answer["error"] == "SessionError"
    assert "lost its records (Redis came back without its data" in answer["message"]


def test_receivers_outlive_their_trainer_and_take_up_the_next(run_redis, peers, tmp_path):
    """What a store that outlives its members is for."""
    server = run_redis(keep=True)
    backend = {"backend": "filesystem", "directory": str(tmp_path / "versions")}
    shared = {"backend": backend, "session": server.url(), "lease_ttl": 1.0}
    first, second, receiver = peers(), peers(), peers()
    assert first.call("open_sender", **shared) == {"ok": True}
    assert first.call("send", version=5, timeout=60) == {"version": 5}
    assert receiver.call("open_receiver", receiver_id="one", **shared) == {"ok": True}
    assert receiver.call("receive", timeout=60) == {"version": 5, "same": True}
    receiver.start("receive", timeout=60)
    first.kill()
    server.restart()
    assert second.call("open_sender", resume_from=5, **shared) == {"ok": True}
    assert second.call("send", version=6, timeout=60) == {"version": 6}
    assert receiver.answer() == {"version": 6, "same": True}
