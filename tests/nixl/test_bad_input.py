"""What isn't right is refused at set-up, with the remedy."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from nixl_rig import WAYS, NixlFleet, exchange

import weightwire
from weightwire.errors import BackendUnavailable, ConfigError, TransferError, WeightWireError
from weightwire_nixl import agent as agents
from weightwire_nixl.arena import Slots, numbered
from weightwire_nixl.config import NixlConfig
from weightwire_nixl.discovery import frame, unframe

MakeFleet = Callable[..., NixlFleet]


@pytest.mark.parametrize("cut", [0, 3, 16, 31, 40])
def test_truncated_metadata_names_its_sender(cut: int) -> None:
    framed = frame(b"metadata of a NIXL agent")
    with pytest.raises(TransferError, match=r"^receiver 'r' rank 1 sent"):
        unframe(framed[:cut], "receiver 'r' rank 1")


def test_corrupt_metadata_is_found_by_its_checksum() -> None:
    framed = bytearray(frame(b"metadata of a NIXL agent"))
    framed[-3] ^= 1
    with pytest.raises(TransferError, match="corrupt"):
        unframe(bytes(framed), "sender rank 0")
    assert unframe(frame(b"metadata"), "sender rank 0") == b"metadata"


def test_pull_over_tcp_must_be_asked_for_twice(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(WAYS[1])
    config = {"direction": "pull"}
    sender, replica = fleet.sender(config=config), fleet.receiver(config=config)
    receiving = replica.start("receive", timeout=10.0)
    error = sender.start("send", version=1, wait="applied", timeout=10.0).error()
    assert "ConfigError" in {error.kind, receiving.error().kind}
    assert "unsafe_pull" in error.message + receiving.error().message


def test_options_that_differ_are_refused_by_name(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(WAYS[0])
    sender = fleet.sender(config={"direction": "push"})
    replica = fleet.receiver(config={"direction": "pull"})
    receiving = replica.start("receive", timeout=10.0)
    error = sender.start("send", version=1, wait="applied", timeout=10.0).error()
    other = receiving.error()
    assert "ConfigError" in {error.kind, other.kind}
    assert "'direction'" in error.message + other.message
    assert replica.holds(1) == "pristine"
    replica.close()
    exchange(sender, 2, fleet.receiver("alike", config={"direction": "push"}))


def test_ranks_that_stage_differently_are_refused(tmp_path: Path) -> None:
    """One stages blocks of columns, the other rows."""
    errors: list[WeightWireError] = []

    def send(rank: int) -> None:
        half = weightwire.LocalShard(torch.zeros(256, 1024), (512, 1024), (256 * rank, 0))
        with weightwire.open_sender(
            {"backend": "nixl", "column_blocks": bool(rank)},
            session=f"file://{tmp_path / 'session'}", source={"w": half}, rank=rank, world_size=2,
        ) as sender:  # fmt: skip
            try:
                sender.send(1, timeout=30)
            except WeightWireError as error:
                errors.append(error)

    threads = [threading.Thread(target=send, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [type(error) for error in errors] == [ConfigError, ConfigError]
    assert all("give all ranks the same group_bytes and options" in str(e) for e in errors)


def test_an_arena_larger_than_memory_is_refused() -> None:
    agent = agents.Agent("test")
    try:
        with pytest.raises(ConfigError, match=r"can't be allocated, .* lower group_bytes"):
            Slots(agent, 1, 1 << 50, torch.device("cpu"))
    finally:
        agent.close()


def test_memory_that_cant_be_registered_is_refused() -> None:
    """Host memory isn't device memory, nor is there a device here."""
    agent = agents.Agent("test")
    memory = torch.zeros(4096, dtype=torch.uint8)
    try:
        with pytest.raises(TransferError, match="expandable segments"):
            agent.register_pieces([(memory.data_ptr(), memory.nbytes, 0)], "cuda")
    finally:
        agent.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device here")
def test_a_device_that_isnt_there_is_refused() -> None:
    for name in ("cuda", "cuda:3"):
        with pytest.raises(ConfigError, match=f"device='{name}': torch sees 0 CUDA devices"):
            numbered(torch.device(name))
    assert numbered(torch.device("cpu")) == torch.device("cpu")


@pytest.mark.parametrize(
    "options",
    [
        {"direction": "sideways"},
        {"max_retired_slots": -1},
        {"retries": 3},
        {"column_blocks": True, "zero_copy": True},
    ],
)
def test_options_are_checked(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        NixlConfig(**options)  # type: ignore[arg-type]


def test_the_build_for_another_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(BackendUnavailable, match=r"CUDA 13\.0.*weightwire\[nixl-cu13\]"):
        agents._choose()
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert agents._choose() == "nixl_cu12"


def test_without_nixl_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BackendUnavailable, match=r"pip install 'weightwire\[nixl\]'"):
        agents._choose()


IMPORT = """
import logging, os, sys, tempfile
log = tempfile.NamedTemporaryFile()
handler = logging.FileHandler(log.name, mode="w")
logging.getLogger().addHandler(handler)
before = dict(os.environ)
import weightwire_nixl
assert not any(name.startswith("nixl_cu") for name in sys.modules), "imports NIXL"
from weightwire_nixl.agent import Agent
Agent("test").close()
assert logging.raiseExceptions
assert dict(os.environ) == before
logging.getLogger().error("still heard")
handler.flush()
assert "still heard" in open(log.name).read(), "the host's handler was closed"
assert not logging.getLogger("nixl").handlers
"""


def test_an_agent_changes_nothing_of_the_process_that_makes_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
