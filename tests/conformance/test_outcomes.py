"""How a case gets its outcome."""

from __future__ import annotations

from pathlib import Path

import pytest

from weightwire.errors import ConfigError
from weightwire_conformance.capabilities import NOBODY_NEED_LISTEN, receivers
from weightwire_conformance.outcomes import ExpectedFailure, Outcome, read_expected
from weightwire_conformance.rig import Fleet
from weightwire_conformance.scenario import Case

SCENARIO = "zero-dim-tensors-arrive"
LINK = "https://github.com/faraway/faraway/issues/17"


def case(body, need=None) -> Case:
    return Case("made-up", "tensors", "nothing", body, need=need)


def nothing(fleet) -> None:
    pass


def test_what_works_and_isnt_declared_is_a_failure(lab) -> None:
    result = lab.run(case(nothing, NOBODY_NEED_LISTEN), "memory")
    assert result.outcome is Outcome.FAILED
    assert "isn't declared: a version can be sent to nobody" in result.reason


def test_a_missing_capability_must_be_refused_in_so_many_words(lab) -> None:
    def fails(fleet) -> None:
        fleet.sender(min_receivers=-1)

    result = lab.run(case(fails, NOBODY_NEED_LISTEN), "memory")
    assert result.outcome is Outcome.FAILED
    assert "must be refused with UnsupportedOperation, and got ConfigError" in result.reason


def test_a_refusal_of_what_is_declared_is_a_failure(lab) -> None:
    def refused(fleet) -> None:
        fleet.sender(min_receivers=0)

    result = lab.run(case(refused, receivers(2)), "memory")
    assert result.outcome is Outcome.FAILED
    assert "can't be refused" in result.reason


def test_a_process_on_both_sides_is_a_failure(lab) -> None:
    def both(fleet) -> None:
        sender = fleet.sender()
        fleet.receiver(workers=sender.workers)

    result = lab.run(case(both), "memory")
    assert result.outcome is Outcome.FAILED
    assert "both sent and received" in result.reason


def test_unavailable_is_never_a_pass(lab) -> None:
    result = lab.run(SCENARIO, "cant-run")
    assert result.outcome is Outcome.UNAVAILABLE
    assert "pip install faraway" in result.reason
    assert lab.run(SCENARIO, "cant-run", require=True).outcome is Outcome.FAILED


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        ("older-contract", "weightwire-older-contract 1.0 was written for contract -1"),
        ("plain-model", "weightwire-plain-model 1.0 has config .* subclass"),
    ],
)
def test_a_broken_plugin_fails_with_its_distribution_and_remedy(lab, backend, reason) -> None:
    result = lab.run(SCENARIO, backend)
    assert result.outcome is Outcome.FAILED
    import re

    assert re.search(reason, result.reason)


def test_a_probe_that_nothing_in_its_process_can_end_is_ended(lab) -> None:
    result = lab.run(SCENARIO, "holds-the-interpreter")
    assert result.outcome is Outcome.FAILED
    assert result.reason == (
        "backend 'holds-the-interpreter' holds its process while it is probed: upgrade it"
    )


def test_an_expected_failure_is_strict(lab) -> None:
    def failure(backend: str) -> list[ExpectedFailure]:
        return [ExpectedFailure(backend, SCENARIO, "drops scalars", "libfaraway", LINK)]

    broken = lab.run(SCENARIO, "loses-scalars", expected=failure("loses-scalars"))
    assert broken.outcome is Outcome.XFAIL
    assert broken.reason == f"drops scalars (fault of libfaraway: {LINK})"
    whole = lab.run(SCENARIO, "memory", expected=failure("memory"))
    assert whole.outcome is Outcome.FAILED
    assert "passes, and was expected to fail" in whole.reason
    late = "a-late-receiver-catches-up-at-once"
    expected = [ExpectedFailure("memory", late, "is early", "libfaraway", LINK)]
    refused = lab.run(late, "memory", expected=expected)
    assert refused.outcome is Outcome.FAILED
    assert "is refused, and was expected to fail" in refused.reason


ENTRY = {
    "backend": "acme",
    "scenario": SCENARIO,
    "reason": "drops scalars",
    "fault": "libfaraway",
    "link": LINK,
}


def write(path: Path, **changes: str | None) -> Path:
    entry = {key: value for key, value in {**ENTRY, **changes}.items() if value is not None}
    path.write_text("[[xfail]]\n" + "".join(f'{k} = "{v}"\n' for k, v in entry.items()))
    return path


@pytest.mark.parametrize("text", ["xfail = 3", 'xfail = ["a"]', "[[xfails]]\nbackend = 'x'"])
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"x.toml has 'xfails?': write \[\[xfail\]\] tables"):
        read_expected(tmp_path / "x.toml", [SCENARIO], ["acme"])


def test_expected_failures_are_read(tmp_path: Path) -> None:
    assert read_expected(write(tmp_path / "x.toml"), [SCENARIO], ["acme"]) == [
        ExpectedFailure(**ENTRY)
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reason": None}, "has no 'reason'"),
        ({"fault": " "}, "has no 'fault'"),
        ({"link": None}, "has no 'link'"),
        ({"link": "see our wiki"}, "isn't one"),
        ({"scenario": "nosuch"}, "no scenario 'nosuch'"),
        ({"backend": "acne"}, "no backend 'acne': the nearest are acme"),
        ({"until": "2030"}, "has 'until'"),
    ],
)
def test_an_expected_failure_needs_a_reason_a_culprit_and_a_link(
    tmp_path: Path, changes: dict[str, str | None], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_expected(write(tmp_path / "x.toml", **changes), [SCENARIO], ["acme"])


def test_the_scenario_of_the_page_passes(lab) -> None:
    """``docs/conformance.md`` shows how to add one."""
    page = (Path(__file__).parents[2] / "docs" / "conformance.md").read_text()
    source = page.partition("```python\n")[2].partition("```")[0]
    found: dict = {"Fleet": Fleet, "scenario": lambda cases: lambda body: body}
    exec(source, found)
    result = lab.run(
        case(lambda fleet: found["shards_reach_two_receivers"](fleet, "rows")), "memory"
    )
    assert result.outcome is Outcome.PASSED, result
