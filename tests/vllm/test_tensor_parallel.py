"""Two workers of one engine: each reads its part; they agree, also on failures, and go on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


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
def test_two_workers_follow_and_recover(tmp_path, kind, cold):
    environment = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    child = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("tp_child.py")), str(tmp_path), kind, cold],
        env=environment,
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
    assert a != b
    expected = [("B", b), ("other", b), ("other", b), ("B", b), ("A", a)]
    assert [(which, seen) for which, _, seen in updates] == expected
    for which, outcome, _ in updates:
        assert outcome != "applied" if which == "other" else outcome == "applied"
