"""A built-in backend is green by both commands; all have the capabilities they are known by.

Every scenario over every built-in backend is ``weightwire conformance``'s own run, beside
the tests: here one of them shows what the command makes of it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from weightwire.contract import Capabilities
from weightwire.plugins import registry
from weightwire_conformance.scenario import cases

BIN = Path(sys.executable).parent
NOBODY_LISTENS = {
    "a-late-receiver-catches-up-at-once",
    "a-receiver-that-is-behind-takes-the-newest",
    "a-resumed-sender-voids-what-came-after",
    "a-version-sent-to-nobody-is-read-later",
    "finished-versions-outlive-their-sender",
}
NO_SUCH_OPTION = "zero-copy-changes-nothing-but-the-copies[on]"


def command(*arguments: object, **more) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(argument) for argument in arguments],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        **more,
    )


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[Mapping, Path]:
    """One run, with every report; engines have tests of their own.  Other tests run beside it."""
    out = tmp_path_factory.mktemp("reports")
    ran = command(
        *(BIN / "weightwire", "conformance", "memory", "--quick", "-k", "not vllm"),
        *("--jobs", 2, "--json"),
        *(
            "--html",
            out / "page.html",
            "--markdown",
            out / "table.md",
            "--junit",
            out / "junit.xml",
        ),
    )
    assert ran.returncode == 0, ran.stderr[-8000:]
    return json.loads(ran.stdout), out


def test_a_builtin_backend_is_conformant(quick) -> None:
    results, _ = quick
    names = {case.name for case in cases(quick=True) if "vllm" not in case.name}
    assert set(results["backends"]) == {"memory"}
    found = results["backends"]["memory"]
    assert set(found) == names
    odd = {scenario for scenario, result in found.items() if result["outcome"] != "passed"}
    assert odd == {*NOBODY_LISTENS, NO_SUCH_OPTION}
    assert results["counts"] == {
        "passed": len(names) - len(odd),
        "FAILED": 0,
        "unsupported": len(odd),
        "xfail": 0,
        "unavailable": 0,
    }


def test_the_reports_show_every_result(quick) -> None:
    results, out = quick
    page = (out / "page.html").read_text()
    table = (out / "table.md").read_text()
    junit = (out / "junit.xml").read_text()
    for scenario in results["backends"]["memory"]:
        assert f">{scenario}<" in page
        assert f"| {scenario} |" in table
        assert f'name="weightwire_scenario" value="{scenario}"' in junit
    assert "<script src" not in page
    assert "<link" not in page
    assert junit.count('name="weightwire_outcome" value="unsupported"') == len(NOBODY_LISTENS) + 1


def test_pytest_gives_the_same_result(tmp_path: Path) -> None:
    """From any folder, without a conftest or a configuration."""
    ran = command(
        *(sys.executable, "-m", "pytest", "--pyargs", "weightwire_conformance"),
        *("--weightwire-backend", "memory", "--weightwire-quick", "-p", "no:cacheprovider"),
        *("-k", "sent-to-nobody or zero-dim", "--weightwire-json", tmp_path / "out.json"),
        cwd=tmp_path,
    )
    assert ran.returncode == 0, ran.stdout
    assert "1 passed, 1 unsupported" in ran.stdout
    found = json.loads((tmp_path / "out.json").read_text())["backends"]["memory"]
    assert {name: result["outcome"] for name, result in found.items()} == {
        "zero-dim-tensors-arrive": "passed",
        "a-version-sent-to-nobody-is-read-later": "unsupported",
    }


LIVE = {
    "default_wait": "applied",
    "needs_live_receivers": True,
    "serves_finished": False,
    "ranged_reads": True,
    "lands_in_place": True,
    "elastic": True,
    "whole_tensors": False,
    "devices": frozenset({"cpu"}),
    "max_receivers": None,
    "max_tensor_nbytes": None,
}
STORED = {
    "default_wait": "published",
    "needs_live_receivers": False,
    "serves_finished": True,
    "whole_tensors": True,
}
ANY_DEVICE = frozenset({"cpu", "cuda"})
PINNED = {
    "memory": {**LIVE, "flow": "pull"},
    "filesystem": {**LIVE, **STORED, "flow": "store"},
    "nccl": {**LIVE, "flow": "collective", "elastic": False, "devices": ANY_DEVICE},
    "nixl": {**LIVE, "flow": "pull", "lands_in_place": False, "devices": ANY_DEVICE},
}


@pytest.mark.parametrize("backend", PINNED)
def test_capabilities_are_pinned(backend: str) -> None:
    """Declaring less would turn failures into refusals: it takes an edit here, too."""
    assert registry().backend(backend).capabilities == Capabilities(**PINNED[backend])


@pytest.mark.soak
@pytest.mark.parametrize("backend", PINNED)
@pytest.mark.timeout(1200)
def test_every_case_over_a_builtin_backend(backend: str, tmp_path: Path) -> None:
    ran = subprocess.run(
        [BIN / "weightwire", "conformance", backend, "--large"], check=False, timeout=1100
    )
    assert ran.returncode == 0
