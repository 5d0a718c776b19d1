"""The demo, in three steps: a real trainer, a real vLLM, a comparison that can fail."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from weightwire.report import PHASES

pytestmark = pytest.mark.vllm


def demo(*arguments: str) -> tuple[int, dict]:
    command = [str(Path(sys.executable).parent / "weightwire"), "demo", "--json", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert result.stdout, result.stderr
    return result.returncode, json.loads(result.stdout)


@pytest.mark.parametrize("backend", ["filesystem", pytest.param("nixl", marks=pytest.mark.soak)])
def test_three_steps_reach_vllm_and_equal_a_fresh_engine(backend):
    code, outcome = demo("--steps", "3", "--backend", backend)
    assert code == 0
    assert outcome["backend"] == backend
    assert outcome["model"] == "qwen3"
    assert [step["version"] for step in outcome["steps"]] == [1, 2, 3]
    for step in outcome["steps"]:
        assert 0 <= step["reward"] <= 1
        assert step["nbytes"] > 200_000
        assert step["seconds"] > 0
        assert set(step["phases"]) <= set(PHASES)
        # A stale policy shows as a mismatch; the sync takes it away.
        assert step["mismatch_after"] < 0.02 < 0.1 < step["mismatch_before"]
    assert outcome["final_equal"] is True
    assert outcome["compared_bytes"] >= outcome["steps"][-1]["nbytes"]


def test_mixture_of_experts_over_memory_and_a_flipped_bit_is_found():
    code, outcome = demo("--steps", "2", "--model", "qwen3_moe", "--backend", "memory", "--corrupt")
    assert code == 1
    assert outcome["final_equal"] is False
    assert all(step["mismatch_after"] < 0.02 for step in outcome["steps"])


def test_a_frozen_engine_keeps_its_policy():
    code, outcome = demo("--steps", "6", "--freeze")
    rewards = [step["reward"] for step in outcome["steps"]]
    assert code == 1
    assert max(rewards) - min(rewards) < 0.15
    assert outcome["steps"][-1]["mismatch_after"] > outcome["steps"][0]["mismatch_after"]
    assert outcome["final_equal"] is True
