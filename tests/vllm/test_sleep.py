"""Engines that sleep: woken for what an update needs, and never taken for what they lost.

vLLM's CPU workers ignore sleep, and so keep their memory.  All else is vLLM's own: its routes,
the core's and the executor's states.  What is said of discarded weights here would be true of
a GPU's.
"""

from __future__ import annotations

import contextlib
import time
import urllib.request

import pytest
from server_rig import Server, checkpoint, model
from watch_rig import Watch

import weightwire
from weightwire.deadline import Deadline
from weightwire.inspection import inspect_session
from weightwire.session.lease import LeaseObserver
from weightwire.session.session import Session
from weightwire.vllm import Pool, UpdateFailed

PROMPT = [5, 6, 7, 9]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    root = tmp_path_factory.mktemp("server")
    made = Server(checkpoint("A", root), root / "A.log")
    try:
        made.start()
        made.ready()
        yield made
    finally:
        made.client.close()
        made.stop()


@pytest.fixture
def session(tmp_path):
    return f"file://{tmp_path / 'run'}"


def send(session, version, which, **options):
    with weightwire.open_sender(
        "filesystem", session=session, source=model(which), **options
    ) as sender:
        sender.send(version)


def serves(server, version, which, seen):
    """It generates, as what it says that it holds; equal weights are equal all the time."""
    assert not server.paused
    assert server.version == str(version)
    sums = (server.checksums(), server.generate(PROMPT)["token_ids"])
    assert seen.setdefault(which, sums) == sums
    assert len({str(held) for held in seen.values()}) == len(seen)


def told(session):
    """What the session says that the replica serves."""
    with contextlib.closing(Session.open(session, deadline=Deadline(10), read_only=True)) as opened:
        (receiver,) = inspect_session(opened, LeaseObserver(opened)).receivers
    return receiver.serving


def test_a_sleeping_engine_is_woken_for_an_update_and_serves_afterwards(server, session):
    seen = {}
    with Pool({"r": server.url}, session=session, backend="filesystem", timeout=60) as pool:
        pool.attach()
        send(session, 1, "B")
        report = pool.update(1)
        assert "wake" not in report.updated[server.url].seconds
        serves(server, 1, "B", seen)

        server.call("/sleep?level=1")
        refused = server.post("/start_weight_update")
        assert refused.status_code == 500
        assert "asleep: wake it up first (POST /wake_up?tags=weights" in refused.text
        refused = server.post("/resume")
        assert refused.status_code == 500
        assert "asleep: wake it up first (POST /wake_up?tags=kv_cache&tags=weights" in refused.text
        assert pool.update(1).held == (server.url,)  # it holds it, and sleeps on
        assert server.paused
        send(session, 2, "A")
        report = pool.update(2)
        assert report.updated[server.url].seconds.keys() >= {"wake", "update", "resume"}
        serves(server, 2, "A", seen)

        # Somebody else woke the weights alone: the rest follows with the update.
        server.call("/sleep?level=1")
        assert server.call("/wake_up?tags=weights")["status"] == "sleeping"
        send(session, 3, "B")
        pool.update(3)
        serves(server, 3, "B", seen)
        pool.detach()


def test_what_a_sleep_discards_is_neither_named_nor_served(server, session, tmp_path):
    seen = {}
    with Pool({"r": server.url}, session=session, backend="filesystem", timeout=60) as pool:
        pool.attach()
        send(session, 1, "B")
        pool.update(1)
        serves(server, 1, "B", seen)

        server.call("/sleep?level=2")
        assert told(session) is None
        woken = server.post("/wake_up")
        assert woken.status_code == 500
        assert "its weights were discarded by sleep(level=2): update it" in woken.text
        assert server.paused
        assert "discarded" in server.post("/resume").text
        pool.update(1)  # the same version, once more
        assert told(session) == 1
        serves(server, 1, "B", seen)

        # An update that fails leaves nothing that may be served, whatever it did.
        server.call("/sleep?level=2")
        send(session, 2, "A")
        newest = max((tmp_path / "run" / "versions").iterdir(), key=lambda path: path.name)
        shard = max(newest.glob("*.safetensors"), key=lambda path: path.stat().st_size)
        shard.chmod(0o600)
        with shard.open("r+b") as file:
            file.seek(-3, 2)
            file.write(bytes([file.read(1)[0] ^ 1]))
        with pytest.raises(UpdateFailed):
            pool.update(2)
        assert not pool.replicas["r"].whole
        assert server.post("/resume").status_code == 500
        assert told(session) is None
        send(session, 3, "A")
        pool.update(3)
        serves(server, 3, "A", seen)
        pool.detach()


def test_a_watcher_lets_an_engine_sleep_until_there_is_a_new_version(server, session):
    with contextlib.ExitStack() as stack:
        options = ("--session", session, "--engine", f"r={server.url}", "--timeout", "40")
        watch = Watch(*options, "--metrics-port", "0")
        stack.callback(watch.close)
        send(session, 1, "A")
        watch.await_("version", version=1)
        page = watch.await_("metrics")["message"]
        sample = f'weightwire_watch_in_service{{engine="{server.url}"}}'
        server.call("/sleep?level=2")
        deadline = time.monotonic() + 30
        while f"{sample} 0.0" not in scraped(page):
            assert time.monotonic() < deadline, scraped(page)
            time.sleep(0.05)
        assert server.paused
        send(session, 2, "B")
        watch.await_("version", version=2)
        assert not server.paused
        assert server.version == "2"
        assert sum(line["event"] == "version" for line in watch.lines) == 2
        assert f"{sample} 1.0" in scraped(page)
        assert watch.end() == 0
    server.call("/shutdown_weight_transfer_engine")


def scraped(url):
    with urllib.request.urlopen(url) as answer:
        return answer.read().decode()
