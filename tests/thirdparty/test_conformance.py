"""The conformance kit proves the third party's backend and store, without an edit to any."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from thirdparty_rig import environment, weightwire


def test_acme_is_green(site: Path) -> None:
    beside = ("-k", "not vllm", "--jobs", "2")  # engines, and other tests
    done = weightwire("conformance", "acme", "--quick", "--json", *beside, sites=(site,))
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    outcomes = results["backends"]["acme"]
    assert results["counts"]["FAILED"] == results["counts"]["unavailable"] == 0
    assert results["counts"]["xfail"] == 0
    assert results["counts"]["passed"] > 40
    # Only what a backend without stored versions and without such options can't do.
    unsupported = {name for name, got in outcomes.items() if got["outcome"] == "unsupported"}
    refusals = "needs live receivers|has no option '(zero_copy|snapshot)'"
    reasons = {name: outcomes[name]["reason"] for name in unsupported}
    assert [why for why in reasons.items() if not re.search(refusals, why[1])] == []


def test_sqlite_keeps_what_a_store_promises(site: Path, tmp_path: Path) -> None:
    store = f"sqlite://{tmp_path}/{{}}.db"
    done = weightwire("conformance", "--store", store, "--json", sites=(site,))
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert results["counts"]["FAILED"] == 0
    assert results["counts"]["passed"] == len(results["stores"][store]) > 40


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_acme_is_green_in_every_case(site: Path) -> None:
    """An engine that follows a trainer over it is among them."""
    command = [Path(sys.executable).parent / "weightwire", "conformance", "acme"]
    assert subprocess.run(command, check=False, env=environment(site)).returncode == 0
