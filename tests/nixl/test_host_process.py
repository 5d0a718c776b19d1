"""What the backend asks of the process and machine that it runs in."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from weightwire.errors import BackendUnavailable, ConfigError
from weightwire_nixl import agent as agents
from weightwire_nixl import memory
from weightwire_nixl.arena import Slots
from weightwire_nixl.memory import available_nbytes, check_fits

CPU = torch.device("cpu")

FAILING = """
import json, logging, os
records = []
class Keep(logging.Handler):
    def emit(self, record):
        records.append((record.name, record.levelname, record.getMessage()))
logging.getLogger("weightwire").addHandler(Keep())
before = dict(os.environ)
from weightwire.errors import BackendUnavailable
from weightwire_nixl.agent import Agent
try:
    Agent("test", {"engine_config": "TLS=sm"})  # UCX can't start with this
except BackendUnavailable:
    pass
else:
    raise SystemExit("UCX started")
assert dict(os.environ) == before
assert any(
    name == "weightwire.nixl.ucx" and level == "ERROR" and "no active messages transport" in text
    for name, level, text in records
) == (CAPTURED), records
Agent("test").close()
"""


@pytest.mark.parametrize("captured", [True, False], ids=["ours", "the environment's"])
def test_what_ucx_has_to_say_reaches_our_logger_and_not_stdout(captured):
    """Unless the environment says what becomes of it."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("UCX_")}
    if not captured:
        environment["UCX_LOG_FILE"] = "stdout"
    done = subprocess.run(
        [sys.executable, "-c", FAILING.replace("CAPTURED", str(captured))],
        capture_output=True, text=True, timeout=120, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert ("no active messages transport" in done.stdout) != captured


def test_the_build_for_cuda_13_is_refused_beside_a_torch_for_cuda_12(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    found = agents.importlib.util.find_spec
    monkeypatch.setattr(
        agents.importlib.util,
        "find_spec",
        lambda name: {"nixl_cu12": None, "nixl_cu13": found("nixl_cu12")}[name],
    )
    with pytest.raises(BackendUnavailable, match=r"nixl_cu13.*CUDA 12\.8.*'weightwire\[nixl\]'"):
        agents._choose()


def test_an_arena_that_memory_would_only_promise_is_refused_before_it_is_allocated():
    """More than there is, and little enough for the kernel to hand out."""
    available = available_nbytes(CPU)
    assert available is not None
    assert available > 0
    agent = agents.Agent("test")
    try:
        with pytest.raises(ConfigError, match=r"2 slots of .* available: lower group_bytes or max"):
            Slots(agent, 2, available * 2 // 3, CPU)
        assert agent.counters.registrations == 0
    finally:
        agent.close()


HEALTHY = """
import threading, torch, weightwire
url = "file://" + DIRECTORY
target = {"w": torch.zeros(1000)}
with weightwire.open_sender("nixl", session=url, source={"w": torch.ones(1000)}) as sender:
    with weightwire.open_receiver(
        "nixl", session=url, target=target, receiver_id="r0"
    ) as receiver:
        for version in (1, 2):
            thread = threading.Thread(target=sender.send, args=(version,))
            thread.start()
            receiver.receive(minimum=version)
            thread.join()
assert target["w"].eq(1).all()
"""


def test_a_run_without_faults_writes_nothing(tmp_path):
    """NIXL's C++ part logs its errors to stderr: there must be none."""
    script = HEALTHY.replace("DIRECTORY", repr(str(tmp_path)))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (done.stdout, done.stderr) == ("", "")


@pytest.fixture
def machine(tmp_path):
    """/proc and /sys/fs/cgroup of our making."""
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 2000 kB\nMemAvailable: 1000 kB\n")
    (proc / "self/cgroup").write_text("12:cpu:/old\n0::/pod/container\n")
    (cgroups / "pod/container").mkdir(parents=True)

    def limit(group, most, current, inactive=0):
        (cgroups / group / "memory.max").write_text(f"{most}\n")
        (cgroups / group / "memory.current").write_text(f"{current}\n")
        (cgroups / group / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\n")

    return limit, lambda: available_nbytes(CPU, proc, cgroups)


def test_without_limits_the_host_decides(machine):
    limit, available = machine
    limit("pod/container", "max", 7)
    assert available() == 1000 * 1024


def test_a_container_has_what_its_groups_leave(machine):
    limit, available = machine
    limit("pod/container", 900_000, 500_000, inactive=100_000)
    assert available() == 500_000
    limit("pod", 450_000, 420_000)  # of all containers together
    assert available() == 30_000
    limit("pod", 400_000, 420_000)
    assert available() == 0


def test_where_nothing_is_known_nothing_is_refused(monkeypatch, tmp_path):
    assert available_nbytes(CPU, tmp_path, tmp_path) is None
    monkeypatch.setattr(memory, "available_nbytes", lambda device: None)
    check_fits(1 << 60, CPU, "an arena")
