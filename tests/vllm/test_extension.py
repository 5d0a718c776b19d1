"""The worker extension, in an engine that has no weight transfer engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_collective_rpc_updates_an_engine_without_a_transfer_config(tmp_path):
    child = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("extension_child.py")), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=200,
    )
    lines = [line for line in child.stdout.splitlines() if line.startswith("SEEN ")]
    assert lines, child.stderr[-4000:]
    seen = json.loads(lines[0].removeprefix("SEEN "))
    assert seen["A"] != seen["B"]
    assert seen["updated"] == seen["B"]
    assert seen["version"] == [7]
    assert "init_info.colour" in seen["wrong"]
