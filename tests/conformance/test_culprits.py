"""Every broken backend is red for the right reason, and every scenario catches one."""

from __future__ import annotations

import os
import re

import culprit_table
import culprits
import pytest

from weightwire_conformance.outcomes import Outcome
from weightwire_conformance.rig import Pool
from weightwire_conformance.scenario import cases


def rows() -> list[tuple[str, str]]:
    """For each scenario that no line of ``RED`` names: its smallest case, and a culprit."""
    named = {culprits.base(scenario) for scenario, _ in culprits.RED.values()}
    return [
        (case.name, *culprits.proof_of(case.name))
        for case in cases()
        if case.smallest and culprits.base(case.name) not in named
    ]


def test_every_culprit_is_known() -> None:
    assert set(culprits.RED) | culprits.OTHERS == set(culprits.installed())
    assert {culprit for _, culprit in rows()} <= set(culprits.RED)
    every = {culprits.base(case.name) for case in cases(large=True)}
    assert set(culprits.ALSO) <= every


@pytest.mark.parametrize("culprit", sorted(culprits.RED))
def test_a_broken_backend_is_red_for_the_right_reason(lab, culprit: str) -> None:
    scenario, reason = culprits.RED[culprit]
    result = lab.run(scenario, culprit)
    assert result.outcome is Outcome.FAILED, result
    assert re.search(reason, f"{result.reason}\n{result.detail}"), result


@pytest.mark.parametrize(
    ("scenario", "culprit"),
    [
        # Whatever compares bytes catches that one: it says least about a scenario.
        pytest.param(*row, marks=pytest.mark.soak if row[1] == culprits.ANY else ())
        for row in rows()
    ],
)
def test_no_scenario_is_vacuous(lab, scenario: str, culprit: str) -> None:
    result = lab.run(scenario, culprit)
    assert result.outcome is Outcome.FAILED, result


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_the_whole_table_of_scenarios_and_culprits(site: str) -> None:
    """Each scenario's smallest case over each broken backend; the table goes to ``results/``."""
    seed = int(os.environ.get("WEIGHTWIRE_SEED", "0"))
    table = culprit_table.Table(culprit_table.commit(), seed)
    pools = [Pool(culprit_table.PATIENCE, {"PYTHONPATH": site}) for _ in range(culprit_table.JOBS)]
    try:
        culprit_table.fill(table, pools)
    finally:
        for pool in pools:
            pool.close()
    table.save(culprit_table.RESULTS)
    assert table.faults() == []


def test_the_page_shows_a_table_without_an_empty_row() -> None:
    """Refresh it with ``python tests/conformance/culprit_table.py --docs docs/conformance.md``."""
    text = (culprit_table.ROOT / "docs" / "conformance.md").read_text()
    begin, end = culprit_table.PLACE
    rows = re.findall(
        r"^\| ([a-z0-9-]+\S*) \| (\d+) \|", text.partition(begin)[2].partition(end)[0], re.M
    )
    assert {name for name, _ in rows} <= {case.name for case in culprit_table.rows()}
    assert len(rows) > 60
    assert all(int(count) > 0 for _, count in rows)
