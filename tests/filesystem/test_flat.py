"""Nothing grows: descriptors, threads, memory and directories after 50 versions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(sys.platform != "linux", reason="counts with /proc/self")
def test_fifty_versions(versions):
    loop = Path(__file__).with_name("flat_loop.py")
    done = subprocess.run(
        [sys.executable, str(loop), str(versions)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    tenth, fiftieth = map(json.loads, done.stdout.splitlines())
    growth = fiftieth.pop("resident") - tenth.pop("resident")
    assert fiftieth == tenth
    assert growth < 8 << 20
    assert len(os.listdir(versions)) == 2
