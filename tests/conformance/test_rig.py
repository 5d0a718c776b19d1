"""The rig leaves no process, file or directory, however a scenario ends."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from weightwire_conformance.execute import Bench, prepare
from weightwire_conformance.outcomes import Outcome
from weightwire_conformance.rig import Pool, leavings
from weightwire_conformance.rig.leavings import shared_files
from weightwire_conformance.scenario import Case


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def raises(fleet) -> None:
    sender, replica = fleet.sender(), fleet.receiver()
    fleet.exchange(sender, 1, replica)
    replica.arm("receiver.fetch")
    sender.start("send", version=2)
    replica.start("receive")
    replica.first.until_at("receiver.fetch")
    raise AssertionError("in the midst of a version")


@pytest.mark.parametrize("backend", ["memory", "filesystem"])
def test_nothing_is_left_of_a_scenario_that_fails(backend: str) -> None:
    pids: list[int] = []

    def body(fleet) -> None:
        try:
            raises(fleet)
        finally:
            pids.extend(worker.pid for worker in fleet._workers)
            held.extend(path for w in fleet._workers for path in shared_files(w.pid))

    held: list[str] = []
    with contextlib.closing(Pool()) as pool:
        result = Bench(pool).run(Case("x", "tensors", "", body), prepare(pool, backend, {}))
        assert result.outcome is Outcome.FAILED
        assert result.reason == "in the midst of a version"
        deadline = time.monotonic() + 10  # a killed process closes its connection, and then goes
        while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not any(alive(pid) for pid in pids)
        assert not [path for path in held if Path(path).exists()]
    assert not pool.directory.exists()


def test_a_child_that_is_left_is_named_by_its_command_line(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(leavings, "_SETTLE_SECONDS", 0.0)
    with subprocess.Popen(["sleep", "61"]) as child:
        found = leavings.Leavings().problems()
        child.kill()
    assert f"child process {child.pid} still runs: sleep 61" in found


def test_workers_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    """Even when that is killed."""
    script = (
        "import time; from weightwire_conformance.rig import Pool; pool = Pool();"
        "print(pool._first.pid, pool.take('memory').pid, pool.directory, flush=True);"
        "time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as run:
        first, worker, directory = run.stdout.readline().split()
        run.kill()
    end = time.monotonic() + 10
    while (alive(int(first)) or alive(int(worker))) and time.monotonic() < end:
        time.sleep(0.02)
    assert not alive(int(first))
    assert not alive(int(worker))
    assert not Path(directory).exists()


def test_a_run_in_the_background_interrupts_its_workers(lab) -> None:
    """Shells let what runs there ignore Ctrl-C, and processes inherit that."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        pool = Pool()
    finally:
        signal.signal(signal.SIGINT, before)
    case = lab.cases["an-interrupted-receiver-tells-its-sender"]
    result = Bench(pool).run(case, prepare(pool, "memory", {}))
    pool.close()
    assert result.outcome is Outcome.PASSED, result


def test_a_warm_process_serves_the_next_scenario() -> None:
    pool = Pool()
    backend = prepare(pool, "memory", {})
    pids: list[set[int]] = []

    def body(fleet) -> None:
        sender, replica = fleet.sender(), fleet.receiver()
        fleet.exchange(sender, 1, replica)
        pids.append({worker.pid for worker in fleet._workers})

    for _ in range(2):
        assert Bench(pool).run(Case("x", "tensors", "", body), backend).outcome is Outcome.PASSED
    assert pids[0] == pids[1]
    pool.close()
