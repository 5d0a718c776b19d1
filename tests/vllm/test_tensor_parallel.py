"""Two workers of one engine: each reads its part; they agree, also on failures, and go on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from weightwire_vllm.compare import Snapshot, compare

CHILD = Path(__file__).with_name("tp_child.py")


@pytest.mark.parametrize(
    ("kind", "cold"),
    [
        ("qwen3-tied", ""),
        *(
            pytest.param(kind, mode, marks=pytest.mark.soak)
            for kind, mode in (
                ("qwen3", "cold"),
                ("qwen3_moe", "cold"),
                ("deepseek_v3", "cold"),
                ("glm4_moe", "cold"),
                ("qwen3_moe", "cold ep"),
                ("deepseek_v3", "cold ep"),
            )
        ),
    ],
)
def test_two_workers_follow_and_recover(tmp_path, engine_room, kind, cold):
    child = subprocess.run(
        [sys.executable, str(CHILD), str(tmp_path), kind, cold],
        env=engine_room,
        capture_output=True,
        text=True,
        timeout=280,
    )
    lines = [line for line in child.stdout.splitlines() if line.startswith("STEPS ")]
    assert lines, child.stdout[-2000:] + child.stderr[-4000:]
    steps = json.loads(lines[0].removeprefix("STEPS "))
    colds = {which: seen for which, outcome, seen in steps if outcome == "cold"}
    updates = [step for step in steps if step[1] != "cold"]
    a, b = colds["cold A"], colds.get("cold B", updates[0][2])
    for mine, other in zip(a[1], b[1], strict=True):
        assert not compare(Snapshot.decode(mine), Snapshot.decode(other)).equal
    expected = {"B": b, "A": a, "other": b}  # B came before it
    for which, outcome, seen in updates:
        if which == "broken":
            # Rank 0 failed alone, between two layers; both workers run on (they were asked
            # what they hold), and the next update makes them whole.
            assert "no memory for packing" in outcome
            continue
        assert (outcome == "applied") == (which != "other"), outcome
        assert seen[0] == expected[which][0]
        for mine, wanted in zip(seen[1], expected[which][1], strict=True):
            found = compare(Snapshot.decode(mine), Snapshot.decode(wanted))
            assert found.equal, found
