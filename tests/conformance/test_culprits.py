"""Every broken backend is red for the right reason, and every scenario catches one."""

from __future__ import annotations

import re
from pathlib import Path

import culprits
import pytest

from weightwire_conformance.outcomes import Outcome
from weightwire_conformance.scenario import cases

ROOT = Path(__file__).parents[2]


def base(name: str) -> str:
    """A scenario's name without its case."""
    return name.partition("[")[0]


def rows() -> list[tuple[str, str]]:
    """For each scenario that no line of ``RED`` names: its smallest case, and a culprit."""
    named = {base(scenario) for scenario, _ in culprits.RED.values()}
    return [
        (case.name, culprits.ALSO.get(base(case.name), culprits.ANY))
        for case in cases()
        if case.smallest and base(case.name) not in named
    ]


def test_every_culprit_is_known() -> None:
    assert set(culprits.RED) | culprits.OTHERS == set(culprits.installed())
    assert {culprit for _, culprit in rows()} <= set(culprits.RED)
    every = {base(case.name) for case in cases(large=True)}
    assert set(culprits.ALSO) <= every


@pytest.mark.parametrize("culprit", sorted(culprits.RED))
def test_a_broken_backend_is_red_for_the_right_reason(lab, culprit: str) -> None:
    scenario, reason = culprits.RED[culprit]
    result = lab.run(scenario, culprit)
    assert result.outcome is Outcome.FAILED, result
    assert re.search(reason, f"{result.reason}\n{result.detail}"), result


@pytest.mark.parametrize(("scenario", "culprit"), rows())
def test_no_scenario_is_vacuous(lab, scenario: str, culprit: str) -> None:
    result = lab.run(scenario, culprit)
    assert result.outcome is Outcome.FAILED, result


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_the_whole_table_of_scenarios_and_culprits(lab) -> None:
    """Each scenario's smallest case over each broken backend; the table goes to ``results/``."""
    names = sorted(culprits.RED)
    caught: dict[str, list[str]] = {}
    for case in [case for case in cases() if case.smallest]:
        caught[case.name] = [
            culprit for culprit in names if lab.run(case, culprit).outcome is Outcome.FAILED
        ]
    table = ["| scenario | culprits that it catches |", "| --- | --- |"]
    table += [f"| {scenario} | {', '.join(found)} |" for scenario, found in caught.items()]
    print("\n".join(table))
    (ROOT / "results").mkdir(exist_ok=True)
    (ROOT / "results" / "conformance_culprits.md").write_text("\n".join(table) + "\n")
    assert not [scenario for scenario, found in caught.items() if not found]
    assert set(names) == {culprit for found in caught.values() for culprit in found}
