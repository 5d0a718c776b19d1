"""Every broken backend is red for the right reason, and every scenario catches one."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

import culprit_table
import culprits
import pytest
from culprit_lab import Lab

from weightwire_conformance.outcomes import Outcome
from weightwire_conformance.scenario import cases

JOBS = 3


def test_every_culprit_is_known() -> None:
    assert set(culprits.CULPRITS) | culprits.OTHERS == set(culprits.installed())
    known = {case.name for case in cases(large=True)} | culprits.ENGINES
    assert {proof.scenario for proof in culprits.PROOFS} <= known


def test_every_scenario_has_a_culprit() -> None:
    """Its smallest case, the one that ``--quick`` runs, has one of its own."""
    smallest = {case.name for case in cases(large=True) if case.smallest}
    assert smallest - {proof.scenario for proof in culprits.PROOFS} == set()


@pytest.fixture(scope="session")
def ahead(lab: Lab, request: pytest.FixtureRequest) -> Lab:
    """Runs what was selected, several at once."""
    asked = [getattr(item, "callspec", None) for item in request.session.items]
    proofs = [spec.params["proof"] for spec in asked if spec and "proof" in spec.params]
    lab.begin(proofs, JOBS)
    return lab


@pytest.mark.parametrize(
    "proof",
    [
        pytest.param(
            proof,
            id=f"{proof.culprit}-{proof.scenario}",
            marks=[pytest.mark.soak, pytest.mark.timeout(900)] if proof.soak else (),
        )
        for proof in culprits.PROOFS
        if proof.scenario in {case.name for case in cases(large=True)}
    ],
)
def test_a_broken_backend_is_red_for_the_right_reason(ahead: Lab, proof: culprits.Proof) -> None:
    result = ahead.prove(proof)
    assert result.outcome is Outcome.FAILED, result
    assert re.search(proof.reason, f"{result.reason}\n{result.detail}"), result


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_the_whole_table_of_scenarios_and_culprits() -> None:
    """Each scenario's smallest case over each broken backend; the table goes to ``results/``."""
    seed = int(os.environ.get("WEIGHTWIRE_SEED", "0"))
    table = culprit_table.Table(culprit_table.commit(), seed)
    with tempfile.TemporaryDirectory() as site:
        culprit_table.fill(table, Path(site))
    table.save(culprit_table.RESULTS)
    assert table.faults() == []


def test_the_page_shows_every_scenario_and_what_it_catches() -> None:
    """Refresh it with ``python tests/conformance/culprit_table.py --docs docs/conformance.md``."""
    text = (culprit_table.ROOT / "docs" / "conformance.md").read_text()
    begin, end = culprit_table.PLACE
    shown = re.findall(
        r"^\| ([a-z0-9-]+\S*) \| (\d+) \| (\S*)",
        text.partition(begin)[2].partition(end)[0],
        re.M,
    )
    # Where vLLM isn't installed there is no such scenario; `make soak` runs its culprit.
    names = {name for name, _, _ in shown}
    rows = {case.name for case in culprit_table.rows()}
    assert names - culprits.ENGINES == rows - culprits.ENGINES, "refresh the table"
    every = {culprits.base(case.name) for case in cases(large=True)}
    assert {culprits.base(name) for name in names} - culprits.ENGINES == every - culprits.ENGINES
    for name, count, first in shown:
        assert int(count) > 0, name
        assert first.rstrip(",") in culprits.proofs_of(name), f"{name}: refresh the table"
