"""Plug-ins that are wrong, installed by pip beside those of others.

Each way of being wrong has its test in ``tests/core/test_plugins.py``; these are
about what a user sees of real distributions.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from thirdparty_bad_plugins import BAD
from thirdparty_rig import HERE, environment, weightwire


@pytest.fixture(scope="module")
def answers(site: Path, bad_site: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What became of asking for each name, and what was logged."""
    script, directory = HERE / "thirdparty_choose.py", tmp_path_factory.mktemp("answers")
    names = [*BAD, "acme", "memory", "filesystem", "unheard-of"]
    done = subprocess.run(
        [sys.executable, str(script), str(directory), *names],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment(site, bad_site),
    )
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout), "log": done.stderr}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_plugin_is_an_error_that_names_its_distribution(
    answers: dict[str, str], name: str
) -> None:
    assert answers[name].startswith("PluginError: ")
    assert f"pigeon-{name} 1.0" in answers[name].splitlines()[0]


@pytest.mark.parametrize(
    ("name", "owner"), [("acme", "weightwire-acme 0.1.0"), ("sqlite", "weightwire-sqlite 0.1.0")]
)
def test_a_name_that_two_distributions_claim_names_both(
    answers: dict[str, str], name: str, owner: str
) -> None:
    assert answers[name].startswith("PluginError: ")
    assert owner in answers[name]
    assert "pigeon-impostor 1.0" in answers[name]
    assert "uninstall one of them" in answers[name]


@pytest.mark.parametrize("name", ["memory", "filesystem"])
def test_the_others_keep_working(answers: dict[str, str], name: str) -> None:
    assert answers[name] == ""


def test_an_observer_that_raises_is_named_in_the_log_and_fails_no_version(
    answers: dict[str, str],
) -> None:
    assert answers["sent"] == "1"
    assert "pigeon-observer 1.0" in answers["log"]
    assert "the log is full" in answers["log"]


def test_an_unknown_name_lists_what_is_installed_and_what_did_not_load(
    answers: dict[str, str],
) -> None:
    first, *rest = answers["unheard-of"].splitlines()
    assert first.startswith("BackendNotFound: ")
    assert "filesystem" in first
    assert all(any(f"pigeon-{name} 1.0" in line for line in rest) for name in BAD)


def test_the_command_line_lists_them_all(site: Path, bad_site: Path) -> None:
    done = weightwire("backends", "--json", sites=(site, bad_site))
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in json.loads(done.stdout)["backends"]:
        rows.setdefault(row["name"], []).append(row)
    assert all(row["available"] for row in rows["memory"] + rows["filesystem"])
    for name in BAD:
        (row,) = rows[name]
        assert row["distribution"] == f"pigeon-{name} 1.0"
        assert not row["available"]
        assert row["distribution"] in row["reason"]
    claimants = {"weightwire-acme 0.1.0", "pigeon-impostor 1.0"}
    assert {row["distribution"] for row in rows["acme"]} == claimants
    assert not any(row["available"] for row in rows["acme"])
