"""Bells: who waits for a record learns sooner that it was announced than it would look."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from weightwire.deadline import Deadline, Watch
from weightwire.errors import Cancelled, PeerLost
from weightwire.session.session import Session
from weightwire.session.store import PartOfStore
from weightwire.waiting import Run, Waiting


@pytest.fixture
def pair():
    """A server of a session and one of its clients."""
    opened = [Session.open("tcp://127.0.0.1:0/bells", deadline=Deadline(20), serve=True)]
    opened.append(Session.open(opened[0].url, deadline=Deadline(20)))
    yield opened
    for session in reversed(opened):
        session.close()


def test_each_ring_is_counted_for_everybody(pair):
    server, client = pair
    before = [session.bell("senders")() for session in pair]
    client.ring("senders")
    server.ring("senders")
    assert [session.bell("senders")() for session in pair] == [count + 2 for count in before]
    assert client.bell("receivers")() == 0


def test_a_bell_of_a_part_is_another_than_the_wholes(pair):
    part, same = (PartOfStore(session.store, "inner") for session in pair)
    part.ring("senders")
    assert same.rings("senders") == 1
    assert pair[0].bell("senders")() == 0


def test_bells_are_no_records(pair):
    pair[0].ring("senders")
    pair[0].bell("receivers")()
    assert pair[1].children("senders") == []
    assert pair[1].store.children(".bells") == []


def test_a_store_that_counts_none_is_looked_at(tmp_path):
    session = Session.open(f"file://{tmp_path / 'run'}", deadline=Deadline(20))
    session.ring("senders")
    assert session.bell("senders") is None
    session.close()


# ---------------------------------------------------------------------- waiting


def watch() -> Watch:
    running = Watch()
    running.start(Deadline(60))
    return running


def doze(running: Watch, said, heard: int | None, pause: float = 50.0):
    answers = iter(said)
    step = Waiting("offer", (), bell=lambda: next(answers))
    return Run(iter(()), running)._doze(step, pause, 1.0, heard)


def test_a_bell_that_rings_ends_the_pause():
    assert doze(watch(), [3, 3, 4], heard=3) == (4, True)


def test_what_rang_before_the_pause_isnt_missed():
    assert doze(watch(), [4], heard=3) == (4, True)


def test_who_has_heard_nothing_yet_looks_at_once():
    assert doze(watch(), [7], heard=None) == (7, False)


def test_a_bell_that_is_still_leaves_the_pause_as_long_as_it_is():
    began = time.monotonic()
    assert doze(watch(), [3] * 1000, heard=3, pause=0.2) == (3, False)
    assert time.monotonic() - began >= 0.2


@pytest.mark.parametrize("end", ["fail", "cancel"])
def test_a_failure_ends_it_too(end):
    running = watch()
    error = PeerLost("gone") if end == "fail" else "the caller"
    threading.Timer(0.05, getattr(running, end), (error,)).start()
    with pytest.raises(PeerLost if end == "fail" else Cancelled):
        doze(running, [3] * 100000, heard=3)


# ---------------------------------------------------------------------- processes

SCRIPT = """
import threading, torch, weightwire
source, target = {"a": torch.ones(8)}, {"a": torch.zeros(8)}
with weightwire.open_sender("memory", session="tcp://127.0.0.1:0/run", source=source) as sender:
    with weightwire.open_receiver(
        "memory", session=sender.session_url, target=target, receiver_id="r"
    ) as receiver:
        following = threading.Thread(target=receiver.receive)
        following.start()
        sender.send(1)
        following.join()
assert torch.equal(*(side["a"] for side in (source, target)))
"""


def test_a_process_over_tcp_ends_in_good_order():
    """Nothing of ours is left in a library's call when the interpreter ends."""
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0, done.stderr
        assert "terminate called" not in done.stderr
