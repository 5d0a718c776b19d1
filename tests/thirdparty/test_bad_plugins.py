"""Plug-ins that are wrong, as real distributions beside good ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from thirdparty_bad_plugins import BAD, HANGS, Bad
from thirdparty_rig import HERE, environment, weightwire

from weightwire import plugins

PROBES_FAIL = {bad.name for bad in BAD if bad.error == "BackendUnavailable"}


@pytest.fixture(scope="module")
def chosen(
    site: Path, bad_site: Path, slow_site: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What became of asking for each name, and what was logged."""
    names = [*(bad.name for bad in BAD), "acme", "memory", "filesystem", "unheard-of"]
    script = str(HERE / "thirdparty_choose.py")
    done = subprocess.run(
        [sys.executable, script, str(tmp_path_factory.mktemp("chosen")), *names],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment(site, bad_site, slow_site),
    )
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout), "log": done.stderr}


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.name)
def test_a_bad_plugin_is_named_with_the_remedy_when_it_is_asked_for(
    chosen: dict[str, Any], bad: Bad
) -> None:
    got = chosen["backends"][bad.name]
    assert got["error"] == bad.error
    if bad.name not in PROBES_FAIL:
        assert bad.distribution in got["message"]
    at = 0
    for part in bad.says:
        at = got["message"].index(part, at)


def test_a_name_that_two_distributions_claim_names_both(chosen: dict[str, Any]) -> None:
    for got in (chosen["backends"]["acme"]["message"], chosen["sqlite"]):
        assert "pigeon-impostor 1.0" in got
        assert "uninstall one of them" in got
    assert "weightwire-acme 0.1.0" in chosen["backends"]["acme"]["message"]
    assert "weightwire-sqlite 0.1.0" in chosen["sqlite"]


@pytest.mark.parametrize("name", ["memory", "filesystem"])
def test_the_others_keep_working(chosen: dict[str, Any], name: str) -> None:
    assert chosen["backends"][name]["error"] == ""


def test_an_observer_that_raises_is_logged_and_fails_nothing(chosen: dict[str, Any]) -> None:
    assert chosen["sent"] == 1
    assert "pigeon-observer 1.0" in chosen["log"]
    assert "the log is full" in chosen["log"]


def test_an_unknown_name_lists_what_is_installed_and_what_did_not_load(
    chosen: dict[str, Any],
) -> None:
    got = chosen["backends"]["unheard-of"]
    assert got["error"] == "BackendNotFound"
    first, *rest = got["message"].splitlines()
    assert "acme" in first
    assert "filesystem" in first
    assert any("pigeon-misspelt 1.0" in line for line in rest)


def test_a_probe_may_not_take_half_a_minute() -> None:
    assert plugins.PROBE_SECONDS < 30


def test_the_command_line_lists_them_all(site: Path, bad_site: Path) -> None:
    done = weightwire("backends", "--json", sites=(site, bad_site))
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in json.loads(done.stdout)["backends"]:
        rows.setdefault(row["name"], []).append(row)
    assert {row["available"] for row in rows["memory"] + rows["filesystem"]} == {True}
    for bad in BAD:
        if f"pigeon-{bad.name}" == HANGS:
            continue
        (row,) = rows[bad.name]
        assert row["distribution"] == bad.distribution
        assert not row["available"]
        assert all(part in row["reason"] for part in bad.says)
    assert {row["distribution"] for row in rows["acme"]} == {
        "weightwire-acme 0.1.0",
        "pigeon-impostor 1.0",
    }
