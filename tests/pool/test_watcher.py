"""A watcher whose session, claims or output fail; its engines aren't needed for that."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from weightwire.deadline import Deadline
from weightwire.errors import ConfigError, TransferTimeout
from weightwire.session import membership
from weightwire.session.lease import LeaseObserver
from weightwire.session.records import MemberRecord
from weightwire.session.session import Session
from weightwire_vllm.watch import Watcher, WatchOptions
from weightwire_vllm.watch.claim import Claims
from weightwire_vllm.watch.voice import Voice


@pytest.fixture
def session(tmp_path):
    return f"file://{tmp_path / 'run'}"


def test_a_watcher_that_waits_for_a_session_ends_when_it_is_told_to():
    async def run(port: int) -> int:
        session, engines = f"tcp://127.0.0.1:{port}/x", {"a": "http://127.0.0.1:1"}
        watcher = Watcher(WatchOptions(session, engines, "filesystem"))
        running = asyncio.create_task(watcher.run())
        await asyncio.sleep(0.5)
        watcher.stop()
        return await running

    with socket.socket() as taken:  # which nobody answers
        taken.bind(("127.0.0.1", 0))
        began = time.monotonic()
        asyncio.run(run(taken.getsockname()[1]))
    assert time.monotonic() - began < 30


def test_a_claim_that_was_taken_meanwhile_is_noticed(session):
    claims = Claims(session, ["r", "s"])
    asyncio.run(claims.hold(20))
    other = Session.open(session, deadline=Deadline(10))
    record = MemberRecord("r", 2, 1, "watch", 10.0, "elsewhere", 77, "p", 0.0, "n")
    other.write("watchers/r/000002/record", record)
    other.close()
    asyncio.run(claims.hold(20, "s"))
    with pytest.raises(ConfigError, match="'r' is watched already, by process 77 on elsewhere"):
        asyncio.run(claims.hold(20, "r"))
    claims.release()


def test_engines_that_see_a_new_session_together_claim_it_once(session, tmp_path, monkeypatch):
    claims = Claims(session, ["r", "s"])
    asyncio.run(claims.hold(20))
    (tmp_path / "run").rename(tmp_path / "old")
    Session.open(session, deadline=Deadline(10)).close()
    together = threading.Barrier(2)
    is_replaced = Session.is_replaced

    def seen_together(self):
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait(1)
        return is_replaced(self)

    monkeypatch.setattr(Session, "is_replaced", seen_together)

    async def both() -> None:
        await asyncio.gather(claims.hold(20, "r"), claims.hold(20, "s"))

    asyncio.run(both())
    claims.release()


def test_a_claim_that_failed_half_way_is_not_held(session, monkeypatch):
    claims = Claims(session, ["r", "s"])
    enter = membership.enter

    def late(session, observer, watch, kind, **rest):
        if kind == "watchers/s":
            raise TransferTimeout("late")
        return enter(session, observer, watch, kind, **rest)

    with monkeypatch.context() as patch:
        patch.setattr(membership, "enter", late)
        for _ in range(2):
            with pytest.raises(TransferTimeout):
                asyncio.run(claims.hold(20))
    asyncio.run(claims.hold(20))
    looking = Session.open(session, deadline=Deadline(10), read_only=True)
    for name in ("r", "s"):
        claimed = membership.newest(looking, f"watchers/{name}")
        assert claimed is not None
        assert LeaseObserver(looking).is_alive(claimed)
    looking.close()
    claims.release()


@pytest.mark.parametrize("as_json", [False, True])
def test_output_that_cannot_be_written_ends_nothing(monkeypatch, caplog, as_json):
    voice = Voice(1, as_json=as_json)
    with Path("/dev/full").open("w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        voice.says("waiting", "for something")
        voice.says("waiting", "for something else")
        sys.stdout.close()
        with contextlib.suppress(OSError):
            full.close()
    (told,) = caplog.records
    assert "standard output can't be written" in told.getMessage()


def test_what_a_server_said_is_data_on_the_terminal(capsys):
    Voice(1, as_json=False).says("out", "\x1b[2Jr: no")
    assert "\\x1b[2Jr: no" in capsys.readouterr().out
