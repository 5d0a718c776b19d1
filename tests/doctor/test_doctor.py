"""``weightwire doctor``: everything works here, and each thing that is broken is found."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from doctor_rig import (
    broken_filesystem,
    checks_of,
    command,
    examine,
    needs,
    verdict_of,
    write_module,
    write_plugin,
)

import weightwire
from weightwire.cli.doctor import _broken
from weightwire.deadline import Deadline
from weightwire.doctor import Check, CheckOptions, Examination, Finding, Verdict, directory
from weightwire.session.records import Record
from weightwire.session.session import Session

WORK = (
    "host", "torch.tensors", "torch.gloo", "directory", "session", "memory",
    "nixl.probe", "nixl.transports", "nixl.read",
)  # fmt: skip
KEYS = {"name", "group", "title", "state", "asked", "summary", "remedy", "seconds", "details"}


def test_what_works_here_is_usable(tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'run'}"
    with weightwire.open_sender("memory", session=url, source={"w": torch.zeros(2)}):
        result = command("--json", "--session", url, *WORK)
    found = json.loads(result.stdout)
    assert result.returncode == 0, found
    assert found["usable"] is True
    assert found["schema"] == 1
    assert all(set(check) == KEYS for check in found["checks"])
    checks = checks_of(result)
    assert {name for name, check in checks.items() if check["state"] == "failed"} == set()
    ok = ("torch.tensors", "torch.gloo", "nixl.read", "memory.share", "directory.rename")
    assert {checks[name]["state"] for name in (*ok, "session.reach")} == {"ok"}
    assert {"tcp", "cma"} <= set(checks["nixl.transports"]["details"]["transports"])
    assert checks["session.reach"]["asked"] is True
    assert "its memory backend isn't tried" in checks["session.reach"]["summary"]
    (member,) = checks["session.reach"]["details"]["members"]
    assert (member["id"], member["host"]) == ("sender", socket.gethostname())
    assert list(tmp_path.iterdir()) == [tmp_path / "run"]
    assert [p.name for p in (tmp_path / "run").iterdir() if "doctor" in p.name] == []


def test_wrong_usage_exits_2_and_names_what_there_is() -> None:
    result = command("nixl.nonsense")
    assert result.returncode == 2
    assert "vllm" in result.stderr
    assert "--json" in command("--help").stdout


def test_what_is_named_and_not_here_is_broken() -> None:
    """No directory is named: that matters only to who asks for it."""
    result = command("directory.fsync", "host.clock")
    assert result.returncode == 1
    assert "remedy name one: --directory DIR" in result.stdout
    assert "broken: directory.fsync" in result.stdout


@pytest.mark.parametrize(
    ("asked", "states", "broken"),
    [
        ((), {"torch.cuda": "absent", "nixl.probe": "absent", "nixl.read": "absent"}, []),
        (("torch",), {"torch.cuda": "absent", "torch.gloo": "ok"}, []),
        (("torch.cuda",), {"torch.cuda": "absent", "torch.gloo": "ok"}, ["torch.cuda"]),
        (("nixl",), {"nixl.probe": "absent", "nixl.ports": "ok"}, ["nixl.probe"]),
        (("vllm",), {"vllm.engine": "absent"}, ["vllm.engine"]),
        (("host",), {"host.shm": "warning", "torch.gloo": "failed"}, ["torch.gloo"]),
    ],
)
def test_what_breaks_is_what_failed_or_was_missed(
    asked: tuple[str, ...], states: dict[str, str], broken: list[str]
) -> None:
    findings = [
        Finding(Check(name, name, "a:b"), Verdict(state, "so it is", "do this"), 0.1)
        for name, state in states.items()
    ]
    assert [found.check.name for found in _broken(findings, set(asked))] == broken


PATIENT = """
import pathlib, tempfile, time
import weightwire
from weightwire.doctor import Check

def waits(options):
    for child in pathlib.Path(tempfile.gettempdir()).glob("weightwire-doctor-*/child-*"):
        (child / "waits").touch()
    time.sleep(600)

@weightwire.hookimpl
def weightwire_describe_checks():
    return [Check("patient.waits", "waits", "patient_plugin:waits", 300.0, "wait")]
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interruption_ends_the_children_and_leaves_nothing(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    site = write_plugin(tmp_path / "site", "patient", PATIENT)
    place = tmp_path / "place"
    place.mkdir()
    program = str(Path(sys.executable).parent / "weightwire")
    process = subprocess.Popen(
        [program, "doctor", "patient"],
        env={**os.environ, "TMPDIR": str(place), "PYTHONPATH": str(site)},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        # Where tests run in a shell's background, SIGINT would be ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not list(place.glob("weightwire-doctor-*/child-*/waits")):
            assert time.monotonic() < deadline, "no child has begun"
            time.sleep(0.02)
        process.send_signal(number)
        assert process.wait(60) == code
    finally:
        process.kill()
        process.wait()
    assert list(place.iterdir()) == []
    mine = str(place).encode()
    assert [p for p in Path("/proc").glob("[0-9]*/cmdline") if mine in _command_line(p)] == []


def _command_line(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


# ------------------------------------------------------------------------ the host


def test_memory_that_cannot_be_had() -> None:
    needs("prlimit")
    result = command("host.shm", "memory.share", "--json", before=["prlimit", "--fsize=1000000"])
    assert result.returncode == 1
    checks = checks_of(result)
    assert checks["host.shm"]["state"] == "failed"
    assert "can't be reserved" in checks["host.shm"]["summary"]
    assert "--shm-size" in checks["host.shm"]["remedy"]
    assert checks["memory.share"]["state"] == "failed"
    assert not list(Path("/dev/shm").glob("weightwire-doctor-*"))


def test_memory_that_cannot_be_locked() -> None:
    needs("prlimit", "setpriv")
    # root may lock beyond its limit, unless that capability is taken away.
    drop = ["setpriv", "--bounding-set=-ipc_lock"] if os.geteuid() == 0 else []
    before = [*drop, "prlimit", "--memlock=65536:65536"]
    check = checks_of(command("host.memlock", "--json", before=before))["host.memlock"]
    has_rdma = Path("/sys/class/infiniband").is_dir()
    assert check["state"] == ("failed" if has_rdma else "warning")
    assert "can't be locked" in check["summary"]
    assert "ulimit -l unlimited" in check["remedy"]
    assert check["details"]["soft_bytes"] == 65536


@pytest.mark.parametrize(
    ("clock", "state", "fragment"),
    [
        ("real() + 3600", "warning", "+3600.0 s away"),
        ("1e9", "failed", "0.000 s by the wall clock"),
    ],
)
def test_a_wall_clock_that_is_wrong(tmp_path: Path, clock: str, state: str, fragment: str) -> None:
    body = f"import time\nreal = time.time\ntime.time = lambda: {clock}\n"
    site = write_module(tmp_path / "site", "sitecustomize", body)
    found = verdict_of(examine("host.clock", path=site)["host.clock"])
    assert found[0] == state
    assert fragment in found[1]
    assert "chrony" in found[2]


# ------------------------------------------------------------------------ libraries


def test_a_torch_that_does_not_import(tmp_path: Path) -> None:
    site = write_module(tmp_path / "site", "torch", "raise ImportError('libtorch.so is gone')")
    found = examine("torch.tensors", "torch.gloo", "nixl.read", "host.clock", path=site)
    for name, hint in {"torch.tensors": "pytorch.org", "torch.gloo": "pytorch.org",
                       "nixl.read": "weightwire[nixl]"}.items():  # fmt: skip
        state, summary, remedy = verdict_of(found[name])
        assert (state, hint in remedy) == ("failed", True)
        assert "libtorch.so is gone" in summary
    assert verdict_of(found["host.clock"])[0] == "ok"  # it needs no torch


def test_a_weightwire_that_does_not_start(tmp_path: Path) -> None:
    site = write_module(tmp_path / "site", "msgspec", "raise ImportError('built for another')")
    state, summary, remedy = verdict_of(examine("host.clock", path=site)["host.clock"])
    assert (state, "built for another" in summary) == ("failed", True)
    assert "import weightwire" in remedy


def test_transports_that_cannot_be_used(tmp_path: Path) -> None:
    fake = tmp_path / "bin"
    fake.mkdir()
    (fake / "nvidia-smi").write_text("#!/bin/sh\n")
    (fake / "nvidia-smi").chmod(0o755)
    found = examine(
        "torch.cuda", "torch.gloo", "nixl.transports", "nixl.read", "nccl.broadcast",
        PATH=f"{fake}:{os.environ['PATH']}", GLOO_SOCKET_IFNAME="nowhere0", UCX_TLS="sm",
    )  # fmt: skip
    for name in ("torch.cuda", "torch.gloo", "nixl.transports", "nixl.read"):
        state, _, remedy = verdict_of(found[name])
        if name == "torch.cuda" and torch.version.cuda:
            continue  # here the driver is real
        assert state == "failed", name
        assert {"torch.cuda": "CUDA build", "torch.gloo": "GLOO_SOCKET_IFNAME"}.get(
            name, "UCX_TLS"
        ) in remedy
    assert torch.cuda.is_available() or verdict_of(found["nccl.broadcast"])[0] == "absent"


def test_a_host_on_which_memory_goes_over_tcp() -> None:
    state, summary, remedy = verdict_of(
        examine("nixl.transports", UCX_TLS="tcp")["nixl.transports"]
    )
    assert state == "warning"
    assert "UCX_TLS=tcp" in summary
    assert "ptrace" in remedy


@pytest.mark.parametrize(
    ("body", "fragment"),
    [
        ("raise ImportError('libucp.so is gone')", "libucp.so is gone"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "was ended by SIGSEGV"),
    ],
)
def test_a_nixl_that_is_broken(tmp_path: Path, body: str, fragment: str) -> None:
    site = tmp_path / "site"
    (site / "nixl_cu12").mkdir(parents=True)
    (site / "nixl_cu12" / "__init__.py").write_text("")
    (site / "nixl_cu12" / "_bindings.py").write_text(body)
    found = examine("nixl.transports", "nixl.read", "host.clock", path=site)
    for name in ("nixl.transports", "nixl.read"):
        state, summary, remedy = verdict_of(found[name])
        assert state == "failed"
        assert fragment in summary
        assert "weightwire[nixl]" in remedy
    assert found["host.clock"].verdict.state == "ok"


def test_an_adapter_whose_device_is_not_passed_in(tmp_path: Path) -> None:
    port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    verbs = tmp_path / "sys/class/infiniband_verbs/uverbs0"
    verbs.mkdir(parents=True)
    (verbs / "ibdev").write_text("mlx5_0\n")
    check = Check("nixl.ports", "ports", "weightwire_nixl.checks:ports", arguments=[str(tmp_path)])
    state, summary, remedy = verdict_of(examine(check)["nixl.ports"])
    assert (state, "mlx5_0" in summary, "--device=/dev/infiniband" in remedy) == (
        "failed", True, True,
    )  # fmt: skip
    device = tmp_path / "dev/infiniband/uverbs0"
    device.parent.mkdir(parents=True)
    device.touch()
    state, summary, _ = verdict_of(examine(check)["nixl.ports"])
    assert state == "ok"
    assert "mlx5_0:1 (400 Gb/s)" in summary


def test_vllm_and_its_routes(tmp_path: Path) -> None:
    names = ("vllm.engine", "vllm.routes")
    found = examine(*names, VLLM_PLUGINS="nothing", VLLM_SERVER_DEV_MODE="1")
    state, summary, remedy = verdict_of(found["vllm.engine"])
    assert state == "failed"
    assert "'weightwire'" in summary
    assert "VLLM_PLUGINS" in remedy
    assert found["vllm.engine"].verdict.details["dp_sync_interval"] == 16
    assert verdict_of(found["vllm.routes"])[0] == "ok"
    assert "/update_weights" in found["vllm.routes"].verdict.details["routes"]
    working = examine(*names, VLLM_SERVER_DEV_MODE="0")
    assert verdict_of(working["vllm.engine"])[0] == "ok"
    state, _, remedy = verdict_of(working["vllm.routes"])
    assert state == "warning"
    assert "VLLM_SERVER_DEV_MODE=1" in remedy
    site = write_module(tmp_path / "site", "vllm", "raise ImportError('no _C here')")
    for finding in examine(*names, path=site).values():
        state, summary, remedy = verdict_of(finding)
        assert (state, "no _C here" in summary) == ("failed", True)
        assert "reinstall vLLM" in remedy


# ------------------------------------------------------------------------ a directory


@pytest.mark.parametrize(
    ("broken", "check", "state", "fragment", "remedy"),
    [
        ("rename", "directory.rename", "failed", "torn", "atomic renames"),
        ("fsync", "directory.fsync", "failed", "Input/output error", "another directory"),
        ("link", "directory.lock", "failed", "hard links can't be made", "redis://"),
        ("flock", "directory.lock", "warning", "flock doesn't exclude", "Hugging Face"),
    ],
)
def test_a_filesystem_that_misbehaves(
    tmp_path: Path, broken: str, check: str, state: str, fragment: str, remedy: str
) -> None:
    library = broken_filesystem(tmp_path)
    place = tmp_path / "place"
    place.mkdir()
    finding = examine(check, directory=place, LD_PRELOAD=str(library), BREAKS=broken)[check]
    found = verdict_of(finding)
    assert found[0] == state, found
    assert fragment in found[1]
    assert remedy in found[2]
    assert list(place.iterdir()) == []


DIES = """
import os, signal
from weightwire.doctor.directory import _place

def dies(options):
    with _place(options) as place:
        (place / "record").touch()
        print("x" * 10_000 + "last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_check_that_is_killed_leaves_nothing_in_the_directory(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    check = Check("directory.dies", "dies", "dies:dies")
    path = write_module(tmp_path / "path", "dies", DIES)
    finding = examine(check, directory=place, path=path)["directory.dies"]
    assert "SIGKILL" in finding.verdict.summary
    assert finding.verdict.details["log"].endswith("last words\n")
    assert len(finding.verdict.details["log"]) <= 4000
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("check", [directory.rename, directory.lock])
def test_what_fails_in_a_child_names_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check: Callable[[CheckOptions], Verdict]
) -> None:
    def full(*_: object) -> None:
        raise RuntimeError("OSError: [Errno 28] No space left on device\nTraceback")

    monkeypatch.setattr(directory, "together", full)
    verdict = check(CheckOptions(str(tmp_path), directory=str(tmp_path)))
    why = "OSError: [Errno 28] No space left on device"
    assert verdict.summary == f"{tmp_path} can't be used ({why})"
    assert "space" in verdict.remedy


@pytest.mark.parametrize("option", ["--directory", "--session"])
def test_bytes_that_are_no_text_are_wrong_usage(option: str) -> None:
    wide = {"COLUMNS": "200"}
    result = command("directory.fsync", option, "/tmp/\udcff", environment=wide)
    assert result.returncode == 2
    assert f"{option} '/tmp/\\udcff' isn't valid Unicode" in result.stderr


def test_what_others_wrote_is_data_on_the_terminal(tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'run'}"
    session = Session.open(url, deadline=Deadline(10))
    evil = type("\x1b[2J[bold]", (Record,), {}, frozen=True)
    session.write("senders/000001/record", evil())
    session.close()
    result = command("session", "--session", url)
    assert result.returncode == 1
    assert "\x1b[2J" not in result.stdout
    assert "is a '\\x1b[2J[bold]', not a MemberRecord: is something else" in result.stdout


def test_a_directory_that_no_session_could_make(tmp_path: Path) -> None:
    for place, state in ((tmp_path / "new", "ok"), (tmp_path / "mistyped" / "new", "failed")):
        finding = examine("directory.fsync", directory=str(place))["directory.fsync"]
        assert verdict_of(finding)[0] == state, finding
        assert not place.exists()


def test_a_directory_that_cannot_be_written() -> None:
    names = ("directory.rename", "directory.fsync", "directory.lock")
    for finding in examine(*names, directory="/sys/kernel").values():
        state, summary, remedy = verdict_of(finding)
        assert state == "failed"
        assert "/sys/kernel can't be used" in summary
        assert "another directory" in remedy


# ------------------------------------------------------------------------ a session


def test_sessions_that_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    quick = Check("session.reach", "reach", "weightwire.doctor.session:reach", 8.0)

    def reach(url: str, **environment: str) -> tuple[str, str, str]:
        return verdict_of(examine(quick, session=url, **environment)["session.reach"])

    state, summary, remedy = reach(f"tcp://127.0.0.1:{port}/run")
    assert (state, "127.0.0.1" in summary) == ("failed", True)
    assert "port is open" in remedy
    state, _, remedy = reach(f"file://{tmp_path}/none")
    assert (state, "start the sender" in remedy) == ("warning", True)
    state, _, remedy = reach("memory://here")
    assert (state, "file://" in remedy) == ("absent", True)
    state, summary, remedy = reach("gopher://host/x")
    assert (state, "gopher" in summary, bool(remedy)) == ("failed", True, True)
    monkeypatch.setenv("WEIGHTWIRE_TOKEN", "secret")
    url = f"file://{tmp_path / 'run'}"
    with weightwire.open_sender("filesystem", session=url, source={"w": torch.zeros(2)}):
        state, _, remedy = reach(url, WEIGHTWIRE_TOKEN="another")
    assert (state, "WEIGHTWIRE_TOKEN" in remedy) == ("failed", True)


def test_shared_memory_is_not_reached_from_another_host(tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'run'}"
    site = write_module(
        tmp_path / "site", "sitecustomize", "import socket\nsocket.gethostname = lambda: 'far'\n"
    )
    with weightwire.open_sender("memory", session=url, source={"w": torch.zeros(2)}):
        finding = examine("session.reach", session=url, path=site)["session.reach"]
    state, summary, remedy = verdict_of(finding)
    assert state == "failed"
    assert "shared memory belongs to one host" in summary
    assert "nixl" in remedy


# ------------------------------------------------------------------------ plug-ins

CHECKS = """
import os, signal, time
import weightwire
from weightwire.doctor import Check, Verdict

def fine(options):
    return Verdict.ok("pigeons fly", count=3)
def wrong(options):
    return "fine"
def raises(options):
    raise weightwire.BackendUnavailable("pigeons are out: open the loft")
def crashes(options):
    print("coo", flush=True)
    os.abort()
def hangs(options):
    while True: time.sleep(60)

NAMES = ("fine", "crashes", "wrong", "hangs", "raises")

@weightwire.hookimpl
def weightwire_describe_checks():
    where = "pigeon_plugin"
    return [Check(f"pigeon.{n}", n, f"{where}:{n}", 2.0, "feed them") for n in NAMES]
"""


def test_what_a_plug_in_brings_may_crash_and_hang(tmp_path: Path) -> None:
    site = write_plugin(tmp_path / "site", "pigeon", CHECKS)
    result = command("pigeon", "--json", environment={"PYTHONPATH": str(site)})
    assert result.returncode == 1
    checks = checks_of(result)
    assert list(checks) == [
        f"pigeon.{name}" for name in ("fine", "crashes", "wrong", "hangs", "raises")
    ]
    assert checks["pigeon.fine"]["state"] == "ok"
    assert checks["pigeon.fine"]["details"] == {"count": 3}
    for name, fragment in {
        "crashes": "SIGABRT", "wrong": "not a Verdict", "hangs": "no verdict within 2 s",
    }.items():  # fmt: skip
        found = checks[f"pigeon.{name}"]
        assert found["state"] == "failed"
        assert fragment in found["summary"]
        assert found["remedy"] == "feed them"
    assert "coo" in checks["pigeon.crashes"]["details"]["log"]
    assert checks["pigeon.raises"]["state"] == "absent"


def test_plug_ins_that_end_or_hold_whoever_loads_them_are_named(tmp_path: Path) -> None:
    site = write_plugin(tmp_path / "site", "deadly", "import os; os._exit(7)")
    write_plugin(site, "endless", "import time\nwhile True: time.sleep(60)")
    write_plugin(site, "silly", "import weightwire\n@weightwire.hookimpl\n"
                 "def weightwire_describe_checks(): return 3\n")  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(site)}
    with Examination(environment=environment, loading_seconds=15) as here:
        checks, findings = here.known()
    broken = {finding.check.name: verdict_of(finding)[1] for finding in findings}
    assert set(broken) == {"plugins.deadly", "plugins.endless", "plugins.silly"}
    assert "ended with code 7" in broken["plugins.deadly"]
    assert "doesn't end within 15 s" in broken["plugins.endless"]
    assert "returned a int" in broken["plugins.silly"]
    names = {check.name for check in checks}
    assert {"host.shm", "memory.probe", "nixl.read", "nccl.broadcast"} <= names


def test_children_end_with_their_examination(tmp_path: Path) -> None:
    site = write_module(
        tmp_path / "site", "sleeper",
        f"""
        import os, subprocess, time
        def sleep(options):
            child = subprocess.Popen(["sleep", "600"])
            open({str(tmp_path / "pids")!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
            time.sleep(600)
        """,
    )  # fmt: skip
    finding = examine(Check("a.b", "sleeps", "sleeper:sleep", 1.5), path=site)["a.b"]
    assert "it hangs" in finding.verdict.summary
    assert finding.took < 30
    pids = (tmp_path / "pids").read_text().split()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() and _runs(pid) for pid in pids):
        assert time.monotonic() < deadline, "a child of the doctor is still running"
        time.sleep(0.05)


def _runs(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_of_processes_that_work_together_the_one_that_failed_is_named(tmp_path: Path) -> None:
    site = write_module(
        tmp_path / "site", "pair",
        """
        import os, time
        from weightwire.doctor import Step, Verdict, together
        def waits(): time.sleep(600)
        def raises(): raise ValueError("no such fabric")
        def ends(): os._exit(3)
        def works(number): return {"number": number}
        def check(options, how):
            steps = [Step("pair:waits"), Step(f"pair:{how}")]
            if how == "works":
                steps = [Step("pair:works", [1]), Step("pair:works", [2])]
            found = together(steps, options.scratch, options.seconds - 1)
            return Verdict.ok("both", found=found)
        """,
    )  # fmt: skip
    checks = [
        Check(f"pair.{how}", how, "pair:check", 60.0, "mend it", [how])
        for how in ("raises", "ends", "works")
    ]
    found = examine(*checks, path=site)
    assert "no such fabric" in verdict_of(found["pair.raises"])[1]
    assert "ends ended with code 3" in verdict_of(found["pair.ends"])[1]
    assert all(finding.took < 30 for finding in found.values())
    assert found["pair.works"].verdict.details == {"found": [{"number": 1}, {"number": 2}]}


def test_a_failure_without_a_remedy_is_a_programming_error() -> None:
    with pytest.raises(ValueError, match="needs a remedy"):
        Verdict("failed", "it is broken")
