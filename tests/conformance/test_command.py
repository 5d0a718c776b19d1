"""The command's options and errors, and the plug-in that everybody's pytest loads."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from test_builtin import BIN, command

from weightwire_conformance.rig.leavings import shared_files

ROOT = Path(__file__).parents[2]


def run(*arguments: object, site: str = "", **more):
    environment = {**os.environ, "PYTHONPATH": site, "NO_COLOR": "1", "COLUMNS": "200"}
    return command(BIN / "weightwire", "conformance", *arguments, env=environment, **more)


def test_no_backend_is_a_usage_error() -> None:
    assert run().returncode == 2


def test_an_unknown_backend_lists_those_installed() -> None:
    ran = run("nosuch")
    assert ran.returncode == 2
    assert "no backend 'nosuch' is installed; installed: filesystem, memory" in ran.stderr


def test_no_scenario_that_fits_is_a_usage_error() -> None:
    ran = run("memory", "-k", "zero-dimm")
    assert ran.returncode == 2
    assert "no scenario fits -k 'zero-dimm': the nearest are" in ran.stderr
    assert "zero-dim-tensors-arrive" in ran.stderr


def test_a_report_that_cant_be_written_is_a_usage_error_before_the_run(tmp_path: Path) -> None:
    place = tmp_path / "nowhere" / "report.html"
    ran = run("memory", "-k", "zero-dim", "--html", place)
    assert ran.returncode == 2
    assert f"{place}: directory {place.parent} doesn't exist" in ran.stderr + ran.stdout
    assert "passed" not in ran.stdout


def test_places_for_reports_are_looked_at(tmp_path: Path) -> None:
    from weightwire import ConfigError
    from weightwire_conformance.reports.files import check_place
    from weightwire_conformance.reports.markdown import check_markdown

    (tmp_path / "file").write_bytes(b"\xff")
    check_place("--json", tmp_path / "new")
    check_place("--junitxml", tmp_path / "new" / "newer" / "x.xml", makes_directories=True)
    for place, message in (
        (tmp_path, "is a directory"),
        (tmp_path / "file" / "x", "isn't one"),
        (tmp_path / "new" / "x", "doesn't exist"),
        (Path("/proc/version"), "can't be written") if os.getuid() else (tmp_path, "--json"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_place("--json", place)
    with pytest.raises(ConfigError, match="can't be read"):
        check_markdown(tmp_path / "file")


def test_one_report_that_is_lost_loses_no_other(tmp_path: Path) -> None:
    """Its disk is full."""
    ran = run("memory", "-k", "zero-dim", "--html", "/dev/full", "--markdown", tmp_path / "t.md")
    assert ran.returncode == 2
    assert "/dev/full" in ran.stderr + ran.stdout
    assert "zero-dim-tensors-arrive" in ran.stdout
    assert "zero-dim-tensors-arrive" in (tmp_path / "t.md").read_text()


def test_expected_failures_of_what_there_isnt_are_a_usage_error(tmp_path: Path) -> None:
    from test_outcomes import write

    ran = run("memory", "--xfail", write(tmp_path / "x.toml", backend="memoryy"))
    assert ran.returncode == 2
    assert "there is no backend 'memoryy': the nearest are memory" in ran.stderr + ran.stdout


def test_a_wrong_option_fails_and_says_so() -> None:
    ran = run("memory", "-k", "zero-dim", "--option", "max_bytes=-1", "--json")
    assert ran.returncode == 1
    result = json.loads(ran.stdout)["backends"]["memory"]["zero-dim-tensors-arrive"]
    assert "'max_bytes'" in result["reason"]


def test_options_reach_their_backend(tmp_path: Path) -> None:
    ran = run(
        *("memory", "filesystem", "-k", "zero-dim"),
        *("--option", f"memory:directory={tmp_path}", "--option", 'filesystem:{"keep": 3}'),
    )
    assert ran.returncode == 0, ran.stdout


def test_a_broken_backend_is_red_and_the_others_go_on(site: str, tmp_path: Path) -> None:
    ran = run(
        *("older-contract", "cant-run", "loses-scalars", "memory", "-k", "zero-dim", "--quick"),
        "--json",
        site=site,
    )
    assert ran.returncode == 1
    found = json.loads(ran.stdout)
    outcomes = {name: {o["outcome"] for o in r.values()} for name, r in found["backends"].items()}
    assert outcomes == {
        "older-contract": {"FAILED"},
        "cant-run": {"unavailable"},
        "loses-scalars": {"FAILED"},
        "memory": {"passed"},
    }
    required = run("cant-run", "-k", "zero-dim", "--require", site=site)
    assert required.returncode == 1
    assert "pip install faraway" in required.stdout


def test_an_expected_failure_is_shown_as_such(site: str, tmp_path: Path) -> None:
    from test_outcomes import LINK, write

    file = write(tmp_path / "x.toml", backend="loses-scalars")
    ran = run("loses-scalars", "-k", "zero-dim", "--xfail", file, site=site)
    assert ran.returncode == 0, ran.stdout
    assert "1 xfail" in ran.stdout
    assert LINK in ran.stdout


def test_the_table_in_a_file_is_refreshed_in_its_place(tmp_path: Path) -> None:
    file = tmp_path / "README.md"
    begin, end = "<!-- weightwire conformance: themes -->", "<!-- weightwire conformance: end -->"
    file.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    assert run("memory", "-k", "zero-dim", "--markdown", file).returncode == 0
    text = file.read_text()
    assert text.startswith(f"before\n{begin}\n|")
    assert text.endswith(f"\n{end}\nafter\n")
    assert "old" not in text
    file.write_text("nothing\n")
    ran = run("memory", "-k", "zero-dim", "--markdown", file)
    assert ran.returncode == 2
    assert "has no place for a support table" in ran.stderr + ran.stdout


@pytest.mark.parametrize("page", ["README.md", "docs/conformance.md"])
def test_pages_show_the_table_of_what_there_is(page: str) -> None:
    """Its rows and columns are today's; refresh it with ``--quick --markdown PAGE``."""
    from weightwire_conformance.scenario import cases
    from weightwire_conformance.scenarios import THEMES

    text = (ROOT / page).read_text()
    _, _, rest = text.partition("<!-- weightwire conformance: themes -->\n")
    table = rest.partition("<!-- weightwire conformance: end -->")[0].splitlines()
    rows = {line.split("|")[1].strip(): line for line in table}
    assert table[0] == "|  | `memory` | `filesystem` | `nccl` | `nixl` |"
    for theme, title in THEMES.items():
        count = sum(case.theme == theme for case in cases(quick=True))
        for cell in rows[title].split("|")[2:6]:
            shown = [int(word) for word in cell.replace(",", "").split() if word.isdigit()]
            assert sum(shown) == count, f"{title}: refresh the table"
            assert "FAILED" not in cell


def test_an_interrupted_run_leaves_nothing_and_still_reports() -> None:
    """A supervisor ends the command alone, in the midst of scenarios.

    As a shell's background job it ignores SIGINT from the start, and so would its pytest.
    """
    directory = Path(tempfile.mkdtemp(prefix="weightwire-"))  # short: it holds a socket
    # The shell ignores it; what it becomes inherits that.
    background = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh"]
    process = subprocess.Popen(
        [*background, BIN / "weightwire", "conformance", "memory", "-k", "not vllm"],
        env={**os.environ, "TMPDIR": str(directory)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.read(1) == ".", "no scenario ever ended"
        mapped: set[str] = set()
        deadline = time.monotonic() + 60
        while not mapped and time.monotonic() < deadline:
            time.sleep(0.05)
            mapped = {path for pid in processes_of(directory) for path in shared_files(pid)}
            mapped = {path for path in mapped if "/weightwire-" in path}
        assert mapped, "no scenario ever ran again"
        process.terminate()
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        for pid in processes_of(directory):
            os.kill(pid, signal.SIGKILL)
    assert process.returncode == 130
    assert "memory: " in out
    assert not [path for path in mapped if Path(path).exists()]
    assert not list(directory.iterdir())
    directory.rmdir()


def processes_of(directory: Path) -> list[int]:
    """Processes that were started with ``directory`` for their temporary files."""
    wanted, found = f"TMPDIR={directory}".encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def test_a_pytest_that_proves_nothing_loads_nothing(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import sys\n"
        "def test_it():\n"
        "    assert 'weightwire_conformance.options' in sys.modules\n"
        "    heavy = {'torch', 'weightwire', 'weightwire_conformance.plugin'}\n"
        "    assert not heavy & set(sys.modules)\n"
    )
    ran = command(
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tmp_path, cwd=tmp_path
    )
    assert ran.returncode == 0, ran.stdout


def test_the_package_without_a_backend_is_a_usage_error(tmp_path: Path) -> None:
    ran = command(
        *(sys.executable, "-m", "pytest", "--pyargs", "weightwire_conformance"),
        *("-p", "no:cacheprovider"),
        cwd=tmp_path,
    )
    assert ran.returncode in (2, 4)
    assert "give --weightwire-backend NAME" in ran.stdout + ran.stderr


def test_without_pytest_the_command_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import importlib.util

    from weightwire.cli import main

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["weightwire", "conformance", "memory"])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 1
    assert "pip install 'weightwire[conformance]'" in capsys.readouterr().err
