from __future__ import annotations

import json

import pytest

from weightwire.phases import Phases
from weightwire.report import PHASES, Report


def report(**changed: object) -> Report:
    values = {
        "role": "sender",
        "backend": "memory",
        "version": 3,
        "attempt": 1,
        "incarnation": 2,
        "nbytes": 4_000_000_000,
        "seconds": 2.0,
        "phases": {"stage": 0.5},
        "digest": "ff",
        "path": "memory (pull)",
        "roster": ("a",),
    }
    return Report(**{**values, **changed})


def test_the_vocabulary_of_phases_is_the_one_that_is_documented():
    words = "offer ready stage announce wait fetch replay finalize verify commit"
    assert " ".join(PHASES) == words


def test_phases_add_up_and_those_that_did_not_occur_are_absent():
    phases = Phases()
    phases.add("stage", 0.25)
    phases.add("stage", 0.5)
    with phases.timed("verify"):
        pass
    assert phases.seconds["stage"] == 0.75
    assert set(phases.seconds) == {"stage", "verify"}


def test_a_phase_is_timed_even_when_it_fails():
    phases = Phases()
    with pytest.raises(KeyError), phases.timed("fetch"):
        raise KeyError
    assert "fetch" in phases.seconds


def test_a_phase_outside_the_vocabulary_is_a_programming_error():
    with pytest.raises(ValueError, match="'gather' isn't in the vocabulary of phases"):
        Phases().add("gather", 1.0)


def test_a_report_is_plain_data_with_its_rate():
    assert report().gbps == 2.0
    assert report(seconds=0.0).gbps == 0.0
    assert json.loads(json.dumps(report().to_dict()))["gbps"] == 2.0
