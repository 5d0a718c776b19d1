"""Each example, in a short form, as its own words say to run it."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm

EXAMPLES = Path(__file__).parents[2] / "examples"
SECONDS = 280


def ran(name: str, *arguments: str) -> str:
    """What an example says; it and what it started are gone afterwards."""
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLES / name), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"},
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=SECONDS)
    except BaseException:
        os.killpg(process.pid, signal.SIGINT)  # it ends what it has started
        try:
            said, _ = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said, _ = process.communicate()
        print(said)
        raise
    assert process.returncode == 0, said
    return said


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs the extra 'examples'")
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")
def test_trls_grpo_trainer_with_its_weight_sync_replaced() -> None:
    said = ran("trl_grpo.py", "2")
    # One version before each step, and the last one's.
    assert re.findall(r"version (\d+): the server was paused", said) == ["1", "2", "3"]
    steps = re.findall(r"step (\d+): reward ([\d.]+), drift ([\d.]+)", said)
    assert [number for number, _, _ in steps] == ["1", "2"]
    # Were the server's weights a step old, or not those of the trainer, it would be far off.
    assert all(0 < float(drift) < 0.05 for _, _, drift in steps)
    assert "the server serves version 3" in said


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")
def test_a_checkpoint_engine_in_verls_manner() -> None:
    said = ran("verl_engine.py", "2")
    assert [int(n) for n in re.findall(r"step (\d+): [\d.]+ s out of service", said)] == [1, 2]
    compared = re.search(r"the rollout holds version 2: (\d+) tensors compared", said)
    assert compared is not None
    assert int(compared[1]) >= 5
