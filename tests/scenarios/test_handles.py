"""Handles of one process, where a call ends at an odd moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from process_rig import free_port
from torch import Tensor

import weightwire
from weightwire.errors import (
    ConfigError,
    PeerLost,
    SessionError,
    TransferError,
    TransferTimeout,
    WeightWireError,
)
from weightwire.memory.receiver import MemoryReceiver
from weightwire.memory.sender import MemorySender
from weightwire.replica import Replica
from weightwire.views import Operand, Step, View
from weightwire_filesystem.receiver import FilesystemReceiver

SECONDS = 30.0


@pytest.fixture
def session(tmp_path: Path) -> str:
    return f"file://{tmp_path / 'run'}"


def together(*calls: Callable[[], Any]) -> list[Any]:
    """What each returned or raised, all of them under way at once."""
    found: list[Any] = [None] * len(calls)

    def run(number: int) -> None:
        try:
            found[number] = calls[number]()
        except WeightWireError as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def open_ranks(session: str) -> list[Any]:
    """A replica of two ranks."""

    def open_rank(rank: int) -> weightwire.WeightReceiver:
        return weightwire.open_receiver(
            "memory",
            session=session,
            target={"w": torch.zeros(8)},
            receiver_id="r",
            rank=rank,
            world_size=2,
            timeout=SECONDS,
        )

    return together(lambda: open_rank(0), lambda: open_rank(1))


class Follower:
    """A receiver that takes every version, on a thread of its own, until it is closed."""

    def __init__(self, session: str, name: str) -> None:
        self.weights = {"w": torch.full((8,), -1.0)}
        self.receiver = weightwire.open_receiver(
            "memory", session=session, target=self.weights, receiver_id=name, timeout=SECONDS
        )
        self._ends = False
        self._thread = threading.Thread(target=self._follow)
        self._thread.start()

    def _follow(self) -> None:
        while not self._ends:
            try:
                self.receiver.receive(timeout=1)
            except WeightWireError:
                continue

    def close(self) -> None:
        self._ends = True
        self._thread.join()
        self.receiver.close()


class Failing(weightwire.WeightSource):
    """Fails when it is read for the n-th time from now."""

    def __init__(self) -> None:
        self.weights = {"w": torch.zeros(8)}
        self.fails_in = 0

    def tensors(self) -> Mapping[str, Tensor]:
        self.fails_in -= 1
        if self.fails_in == 0:
            raise RuntimeError("the optimizer has it")
        return self.weights


@pytest.fixture
def followers(session: str) -> Iterator[list[Follower]]:
    made: list[Follower] = []
    try:
        made += [Follower(session, name) for name in ("a", "b")]
        yield made
    finally:
        for follower in made:
            follower.close()


@pytest.mark.parametrize("verify", ["off", "sample"])
def test_a_version_that_ends_between_its_waves_leaves_nobody_out_of_the_next(
    session: str, followers: list[Follower], verify: Any
) -> None:
    source = Failing()
    with weightwire.open_sender(
        "memory",
        session=session,
        source=source,
        verify=verify,
        min_receivers=2,
        max_unavailable=1,
        timeout=SECONDS,
    ) as sender:
        sender.send(1)
        source.weights["w"].fill_(2)
        source.fails_in = 2
        with pytest.raises(RuntimeError, match="the optimizer has it"):
            sender.send(2)
        source.weights["w"].fill_(3)
        report = sender.send(3)
    assert (report.roster, report.waves) == (("a", "b"), 2)
    assert [float(follower.weights["w"][0]) for follower in followers] == [3.0, 3.0]


@pytest.mark.parametrize("backend", ["memory", "filesystem", "nccl", "nixl"])
def test_a_version_that_was_refused_for_its_shapes_is_followed_by_one_as_before(
    session: str, backend: str
) -> None:
    source, target = {"w": torch.zeros(4)}, {"w": torch.zeros(4)}
    options: dict[str, Any] = {"session": session, "timeout": SECONDS / 2}
    with (
        weightwire.open_sender(backend, source=source, **options) as sender,
        weightwire.open_receiver(backend, target=target, receiver_id="r", **options) as receiver,
    ):
        for version, size in ((1, 4), (2, 5), (3, 4)):
            source["w"] = torch.full((size,), float(version))
            sent, received = together(
                lambda number=version: sender.send(number, wait="applied"),  # type: ignore[misc]
                receiver.receive,
            )
            if version == 2:
                assert isinstance(sent, weightwire.TableMismatch)
                assert isinstance(received, weightwire.TableMismatch)
                continue
            assert (sent.version, received.version) == (version, version)
            assert torch.equal(target["w"], source["w"])


def test_a_version_that_isnt_where_a_receiver_looks_is_an_error_that_says_where_it_was_written(
    session: str, tmp_path: Path
) -> None:
    """Also where the call's deadline comes before a listing has to show it."""
    with (
        weightwire.open_sender(
            {"backend": "filesystem", "directory": str(tmp_path / "here")},
            session=session,
            source={"w": torch.ones(4)},
        ) as sender,
        weightwire.open_receiver(
            {"backend": "filesystem", "directory": str(tmp_path / "there"), "visible_within": 60},
            session=session,
            target={"w": torch.zeros(4)},
            receiver_id="r",
        ) as receiver,
    ):
        sender.send(1)
        with pytest.raises(TransferError, match=rf"the sender writes to {tmp_path}/here; set"):
            receiver.receive(timeout=1)
        assert receiver.version is None


class Transposed(weightwire.WeightSource):
    """Its checkpoint has ``q``, which is ``m`` transposed."""

    def __init__(self) -> None:
        self.weights = {"m": torch.zeros(4, 4), "z": torch.zeros(4, 4)}

    def fill(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for tensor in self.weights.values():
            tensor.copy_(torch.randn(4, 4, generator=generator))

    def tensors(self) -> Mapping[str, Tensor]:
        return self.weights

    def views(self, given: Mapping[str, Tensor]) -> tuple[View, ...]:
        del given
        return (View("q", (Operand("m", (Step("permute", (1, 0)),)),)),)


def test_a_replica_that_failed_to_catch_up_plans_the_next_version_anew(
    session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Transposed()
    target = {"q": torch.zeros(4, 4), "z": torch.zeros(4, 4)}
    options: dict[str, Any] = {"session": session, "catch_up": "filesystem", "timeout": SECONDS}
    with (
        weightwire.open_sender("memory", source=source, verify="full", **options) as sender,
        weightwire.open_receiver("memory", target=target, receiver_id="r", **options) as receiver,
    ):
        source.fill(1)
        together(lambda: sender.send(1), receiver.receive)
        receiver.invalidate("its memory was given away")

        def refuse(*arguments: object) -> None:
            raise TransferError("the disk is away")

        with monkeypatch.context() as patch:
            patch.setattr(FilesystemReceiver, "set_plan", refuse)
            with pytest.raises(TransferError, match="the disk is away"):
                receiver.receive()
        source.fill(2)
        together(lambda: sender.send(2), lambda: receiver.receive(minimum=2))
        assert receiver.version == 2
    assert torch.equal(target["q"], source.weights["m"].T)
    assert torch.equal(target["z"], source.weights["z"])


def test_a_stored_version_that_a_new_sender_didnt_take_up_isnt_reported_as_an_older_one(
    session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = {"w": torch.zeros(8)}

    def open_sender(**options: Any) -> weightwire.WeightSender:
        return weightwire.open_sender(
            "memory", session=session, source=weights, catch_up="filesystem", **options
        )

    follower = Follower(session, "early")
    senders = [open_sender(timeout=SECONDS)]
    try:
        weights["w"].fill_(1)
        senders[0].send(1)
        target = {"w": torch.full((8,), -1.0)}
        with weightwire.open_receiver(
            "memory", session=session, target=target, receiver_id="late", catch_up="filesystem"
        ) as late:
            part = late._late
            assert part is not None
            begin = part._begin

            def begin_late(minimum: int) -> Any:
                """Meanwhile version 2 finishes, and a new sender goes on from version 1."""
                weights["w"].fill_(2)
                senders[0].offer_only_to(lambda name, _: name == "early")
                senders[0].send(2)
                offer = begin(minimum)
                senders[0].close()
                senders.append(open_sender(resume_from=1))
                return offer

            monkeypatch.setattr(part, "_begin", begin_late)
            with pytest.raises(PeerLost, match=r"version 2, which was stored .*: receive again"):
                late.receive(timeout=SECONDS)
            assert late.version is None
            monkeypatch.setattr(part, "_begin", begin)
            assert late.receive(timeout=SECONDS).version == 1
        assert float(target["w"][0]) == 1.0
    finally:
        follower.close()
        for sender in senders:
            sender.close()


def test_a_replica_whose_ranks_dont_all_come_back_waits_no_longer_than_its_deadline() -> None:
    url = f"tcp://127.0.0.1:{free_port()}/run"
    source = {"w": torch.zeros(8)}

    with weightwire.open_sender("memory", session=url, source=source):
        ranks = open_ranks(url)
    try:
        with (
            weightwire.open_sender("memory", session=url, source=source),
            pytest.raises(TransferTimeout),
        ):
            ranks[0].receive(timeout=1)  # rank 1 doesn't call
        began = time.monotonic()
        with pytest.raises((TransferTimeout, SessionError)):
            ranks[0].receive(timeout=1)
        assert time.monotonic() - began < SECONDS
    finally:
        for receiver in ranks:
            receiver.close()


def test_a_target_stays_tainted_when_joining_a_new_session_fails_at_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = f"tcp://127.0.0.1:{free_port()}/run"
    source, target = {"w": torch.zeros(8)}, {"w": torch.ones(8)}
    with weightwire.open_sender("memory", session=url, source=source):
        receiver = weightwire.open_receiver("memory", session=url, target=target, receiver_id="r")
        receiver.invalidate("its memory was given away")
    open_catch_up = weightwire.WeightReceiver._open_catch_up
    failures = [SessionError("the store is away for a moment")]

    def fails_once(self: weightwire.WeightReceiver) -> Any:
        if failures:
            raise failures.pop()
        return open_catch_up(self)

    monkeypatch.setattr(weightwire.WeightReceiver, "_open_catch_up", fails_once)
    with weightwire.open_sender("memory", session=url, source=source), receiver:
        with pytest.raises(TransferTimeout):
            receiver.receive(timeout=3)
        assert not failures
        assert receiver.tainted == "its memory was given away"


_READER = """
import sys, torch, weightwire
receiver = weightwire.open_receiver(
    "memory", session=sys.argv[1], target={"w": torch.zeros(8)}, receiver_id="dies"
)
print("joined", flush=True)
receiver.receive()
"""


@pytest.mark.parametrize("on_loss", ["continue", "fail"])
def test_a_reader_that_dies_before_its_memory_is_mapped_is_gone_on_without(
    session: str, monkeypatch: pytest.MonkeyPatch, on_loss: Any
) -> None:
    (Path(session.removeprefix("file://")).parent).mkdir(exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-c", _READER, session], stdout=subprocess.PIPE, text=True
    )
    begin = MemorySender.begin

    def begin_late(self: MemorySender, *arguments: Any) -> None:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        # Whoever joins removes what the dead have left.
        weightwire.open_receiver(
            "memory", session=session, target={"w": torch.zeros(8)}, receiver_id="third"
        ).close()
        begin(self, *arguments)

    monkeypatch.setattr(MemorySender, "begin", begin_late)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "joined\n"
        target = {"w": torch.zeros(8)}
        with (
            weightwire.open_receiver(
                "memory", session=session, target=target, receiver_id="stays"
            ) as receiver,
            weightwire.open_sender(
                "memory",
                session=session,
                source={"w": torch.ones(8)},
                min_receivers=2,
                on_receiver_loss=on_loss,
            ) as sender,
        ):
            sent, received = together(
                lambda: sender.send(1, timeout=SECONDS), lambda: receiver.receive(SECONDS)
            )
            if on_loss == "continue":
                assert (sent.roster, sent.left_out) == (("dies", "stays"), ("dies",))
                assert (receiver.version, float(target["w"][0])) == (1, 1.0)
            else:
                assert isinstance(sent, PeerLost)
                assert str(sent).startswith("receiver 'dies'")
                assert "restart it" in str(sent)
                assert isinstance(received, WeightWireError)
                assert receiver.version is None
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def test_a_receiver_that_cant_be_opened_has_closed_its_transport(
    session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[MemoryReceiver] = []
    close = MemoryReceiver.close

    def noted(self: MemoryReceiver) -> None:
        closed.append(self)
        close(self)

    monkeypatch.setattr(MemoryReceiver, "close", noted)
    with pytest.raises(ConfigError, match="snapshot='host' and catch_up serve late receivers"):
        weightwire.open_receiver(
            {"backend": "memory", "snapshot": "host"},
            session=session,
            target={"w": torch.zeros(8)},
            receiver_id="r",
            catch_up="filesystem",
        )
    assert len(closed) == 1


def test_a_rank_that_says_what_is_no_fingerprint_is_named(
    session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Replica, "_fingerprint", lambda self, offer: b"\x91\x01")
    ranks = open_ranks(session)
    try:
        with weightwire.open_sender("memory", session=session, source={"w": torch.ones(8)}) as s:
            found = together(
                lambda: s.send(1, timeout=SECONDS),
                lambda: ranks[0].receive(SECONDS),
                lambda: ranks[1].receive(SECONDS),
            )
        assert [receiver.version for receiver in ranks] == [None, None]
        assert all(isinstance(error, WeightWireError) for error in found)
        assert "what rank 0 says can't be read" in str(found[1])
    finally:
        for receiver in ranks:
            receiver.close()
