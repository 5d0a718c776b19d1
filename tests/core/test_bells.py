"""Bells: who waits for a record learns of it sooner than it would look."""

from __future__ import annotations

import threading
import time

import pytest
import torch

import weightwire
from weightwire import waiting
from weightwire.deadline import Deadline, Watch
from weightwire.session.session import Session
from weightwire.session.store import PartOfStore
from weightwire.waiting import Waiting, drive


def bell_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "weightwire-bell"]


def until(condition) -> None:
    watch = Watch()
    watch.start(Deadline(20))
    watch.until(condition, "what the test waits for")


@pytest.fixture
def pair(tmp_path):
    """A server of a session and one of its clients."""
    opened = [Session.open("tcp://127.0.0.1:0/bells", deadline=Deadline(20), serve=True)]
    opened.append(Session.open(opened[0].url, deadline=Deadline(20)))
    yield opened
    for session in reversed(opened):
        session.close()
    until(lambda: not bell_threads())


def heard(session: Session, bell: str = "senders") -> threading.Event:
    """Set by the next ring from when this returns."""
    came = threading.Event()
    session.bell(bell)(came.set)
    # Whoever begins to listen hears what rings from then on: ring until it does.
    while not came.wait(0.05):
        session.ring(bell)
    came.clear()
    return came


def test_every_listener_is_called_by_one_ring(pair):
    events = [heard(session) for session in pair]
    time.sleep(0.2)
    for event in events:
        event.clear()
    pair[1].ring("senders")
    assert all(event.wait(20) for event in events)


def test_other_bells_call_nobody(pair):
    event = heard(pair[0])
    time.sleep(0.2)
    event.clear()
    pair[1].ring("receivers")
    assert not event.wait(0.3)


def test_only_the_newest_listener_of_a_store_is_called(pair):
    old = heard(pair[0])
    new = heard(pair[0])
    time.sleep(0.2)
    old.clear()
    new.clear()
    pair[1].ring("senders")
    assert new.wait(20)
    assert not old.is_set()


def test_a_bell_of_a_part_is_another_than_the_wholes(pair):
    whole = heard(pair[0])
    part = PartOfStore(pair[0].store, "inner")
    inner = threading.Event()
    part.listen("senders", inner.set)
    while not inner.wait(0.05):
        part.ring("senders")
    time.sleep(0.2)
    whole.clear()
    inner.clear()
    PartOfStore(pair[1].store, "inner").ring("senders")
    assert inner.wait(20)
    assert not whole.is_set()


def test_bells_are_no_records(pair):
    heard(pair[0])
    assert pair[0].store.children("senders") == []
    assert pair[0].store.children(".bells") == []


def test_rings_without_a_server_raise_nothing_and_hold_nobody_up(pair):
    server, client = pair
    heard(client)
    server.close()
    until(lambda: not bell_threads())
    began = time.monotonic()
    for _ in range(3):
        client.ring("receivers")
        client.bell("senders")(lambda: None)
    assert time.monotonic() - began < 1


def test_rings_of_a_thousand_and_more_keep_calling(pair):
    event = heard(pair[0])
    for _ in range(1500):
        pair[1].ring("senders")
    pair[1].children("senders")  # the rings before it are done
    time.sleep(0.2)
    event.clear()
    pair[1].ring("senders")
    assert event.wait(20)


def test_a_ring_ends_the_pause_of_whoever_waits(monkeypatch):
    monkeypatch.setattr(waiting, "_FIRST_PAUSE", 30.0)
    monkeypatch.setattr(waiting, "_LAST_PAUSE", 30.0)
    watch = Watch()
    watch.start(Deadline(20))
    looks = []

    def bell(call):
        threading.Timer(0.05, call).start()

    def steps():
        while len(looks) < 3:
            looks.append(True)
            yield Waiting("looks", (), bell=bell)
        return len(looks)

    assert drive(steps(), watch) == 3


def test_a_ring_ends_one_pause():
    watch = Watch()
    watch.start(Deadline(20))
    watch.ring()
    watch.pause(20)
    began = time.monotonic()
    watch.pause(0.2)
    assert time.monotonic() - began >= 0.2


def test_versions_are_applied_by_bells_where_looks_are_too_far_apart(monkeypatch):
    """Each of a version's waits (offer, ready, started, applied) ends by its bell."""
    source = {"a": torch.arange(8.0)}
    target = {"a": torch.zeros(8)}
    failures = []
    with (
        weightwire.open_sender(
            "memory", session="tcp://127.0.0.1:0/run", source=source, timeout=60
        ) as sender,
        weightwire.open_receiver(
            "memory", session=sender.session_url, target=target, receiver_id="r", timeout=60
        ) as receiver,
    ):

        def follow():
            try:
                for _ in range(4):
                    receiver.receive()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=follow)
        thread.start()
        sender.send(1)  # the bells' connections come with the first waits
        until(lambda: len(bell_threads()) == 2)
        sender.send(2)
        time.sleep(1)  # they listen by now
        monkeypatch.setattr(waiting, "_FIRST_PAUSE", 50.0)
        monkeypatch.setattr(waiting, "_LAST_PAUSE", 50.0)
        began = time.monotonic()
        for version in (3, 4):
            source["a"] += 1
            sender.send(version, wait="applied")
        thread.join()
        took = time.monotonic() - began
    assert not failures
    assert torch.equal(target["a"], source["a"])
    assert took < 40, "a wait ended by its own looking"
