"""Two workers of one engine: they agree, also on failures, and go on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def test_two_workers_follow_and_recover(tmp_path):
    environment = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    child = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("tp_child.py")), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    lines = [line for line in child.stdout.splitlines() if line.startswith("STEPS ")]
    assert lines, child.stdout[-2000:] + child.stderr[-4000:]
    steps = json.loads(lines[0].removeprefix("STEPS "))
    cold_a, b = steps[0][2], steps[1][2]
    assert cold_a != b
    expected = [("A", cold_a), ("B", b), ("other", b), ("other", b), ("B", b), ("A", cold_a)]
    assert [(which, logprobs) for which, _, logprobs in steps] == expected
    for which, outcome, _ in steps[1:]:
        assert "wrong shape" in outcome if which == "other" else outcome == "applied"
