"""``weightwire plan``: the same figures as running engines, without weights; bad input by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from data_parallel import answers_of_ranks

from weightwire_vllm.families import family_model
from weightwire_vllm.models import save_checkpoint

HERE = Path(__file__).parent


def plan(*arguments):
    main = "from weightwire.cli.main import main; main()"
    return run_python(main, "plan", *map(str, arguments))


def run_python(program, *arguments):
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    root = tmp_path_factory.mktemp("plan")

    def get(kind):
        if not (root / kind).exists():
            save_checkpoint(family_model(kind, 1), root / kind)
        return root / kind

    return get


EXPERTS = {"enable_expert_parallel": True}
CASES = {
    "deepseek_v3 tp=2": ("deepseek_v3", "fsdp=3", "tp=2", {"tensor_parallel_size": 2}),
    "qwen3_moe tp=2 ep=2": (
        "qwen3_moe",
        "fsdp=4,ep=2",
        "tp=2,ep=2",
        {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    ),
    "qwen3-tied": ("qwen3-tied", "fsdp=2,dp=2", "tp=1", {}),
    "glm4_moe": ("glm4_moe", "fsdp=4,ep=4", "tp=1", {}),
    "llama tp=2": ("llama", "fsdp=3,dp=2", "tp=2", {"tensor_parallel_size": 2}),
    "mixtral tp=2": ("mixtral", "fsdp=2", "tp=2", {"tensor_parallel_size": 2}),
    "deepseek_v3 tp=2 ep=2": (
        "deepseek_v3",
        "fsdp=4,ep=2",
        "tp=2,ep=2",
        {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    ),
    "qwen3_moe dp=2 ep=2": ("qwen3_moe", "fsdp=4,ep=2", "dp=2,ep=2", EXPERTS),
    "deepseek_v3 dp=2 ep=2": ("deepseek_v3", "fsdp=3", "dp=2,ep=2", EXPERTS),
    "llama pp=2": ("llama", "fsdp=2", "pp=2", {"pipeline_parallel_size": 2}),
}
SLICE = ("qwen3-tied",)


def plans_of_an_engine(command, dp, environment):
    """What each worker of a running engine plans; data-parallel ranks are a process each."""
    changed = {**environment, "VLLM_LOGGING_LEVEL": "ERROR"}
    answers = answers_of_ranks(command, dp, changed, "PLANS")
    return [plan for of_rank in answers for plan in of_rank]


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in SLICE else pytest.mark.soak) for c in CASES]
)
def test_plans_are_those_of_a_running_engine(checkpoint, tmp_path, engine_room, case):
    kind, trainer, inference, options = CASES[case]
    directory = checkpoint(kind)
    bare = tmp_path / "bare"  # the planner sees no weights
    bare.mkdir()
    (bare / "config.json").write_bytes((directory / "config.json").read_bytes())
    page = tmp_path / "plan.html"
    planned = plan(
        bare, "--trainer", trainer, "--inference", inference, "--group-bytes", 16384,
        "--json", "--html", page,
    )  # fmt: skip
    assert planned.returncode == 0, planned.stderr[-3000:]
    result = json.loads(planned.stdout)
    assert result["unmatched"] == []
    arguments = (directory, trainer, 16384, json.dumps(options), tmp_path)
    command = [sys.executable, str(HERE / "plan_child.py"), *map(str, arguments)]
    dp = 2 if "dp=2" in inference else 1
    running = plans_of_an_engine(command, dp, engine_room)
    mine = [
        [rank["nbytes"], rank["descriptors"], rank["replayed"], rank["owners"]]
        for rank in result["ranks"]
    ]
    assert mine == running
    for rank in result["ranks"]:
        assert rank["nbytes"] == sum(group["nbytes"] for group in rank["groups"])
        assert rank["nbytes"] == sum(rank["owners"].values())
        assert rank["descriptors"] == sum(group["descriptors"] for group in rank["groups"])
    largest = max(g["nbytes"] for rank in result["ranks"] for g in rank["groups"])
    assert result["largest_group_bytes"] == largest
    text = page.read_text()
    assert "<script" not in text
    assert "http" not in text
    assert f"inference rank {len(running) - 1} reads" in text


def test_one_rank_of_many_is_planned_without_the_others(checkpoint):
    arguments = ("--trainer", "fsdp=64,ep=4", "--inference", "dp=4,ep=4", "--json")
    found = plan(checkpoint("deepseek_v3"), *arguments, "--ranks", "3")
    assert found.returncode == 0, found.stderr[-3000:]
    (rank,) = json.loads(found.stdout)["ranks"]
    assert rank["rank"] == 3
    assert len(rank["owners"]) > 32


BAD = {
    "unknown axis": (("--inference", "cp=2"), "unknown axis 'cp': it takes tp, pp, dp, ep"),
    "unknown trainer axis": (("--trainer", "zero=8"), "unknown axis 'zero': it takes dp, fsdp, ep"),
    "no number": (("--inference", "tp=two"), "tp=two isn't a number of ranks"),
    "rank out of range": (("--inference", "tp=2", "--ranks", "2"), "rank 2 is out of range"),
    "ep that spans no ranks": (("--inference", "tp=2,dp=2,ep=3"), "ep=3 isn't tp x dp = 4"),
    "ep that doesn't divide": (("--trainer", "fsdp=8,ep=3"), "ep=3 doesn't divide fsdp=8"),
    "heads that don't divide": (
        ("--inference", "tp=3"),
        "so: Total number of attention heads (4) must be divisible by tensor parallel size (3)",
    ),
    "experts of a dense model": (
        ("--inference", "tp=2,ep=2"),
        "so: Number of experts in the model must be greater than 0",
    ),
    "no such engine": (("--engine", "sglang"), "no planner for engine 'sglang'"),
    "no such dtype": (("--wire-dtype", "fp4"), "--wire-dtype fp4: use one of"),
}


ALL_OF_THEM = """
import contextlib, io, json, sys
from weightwire.cli.main import main

ends = []
for sys.argv in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            main()
            code = 0
        except SystemExit as error:
            code = error.code
        except BaseException as error:
            code = repr(error)
    ends.append((code, said.getvalue()))
print("ENDS " + json.dumps(ends))
"""


@pytest.fixture(scope="module")
def ends(checkpoint):
    """Exit code and errors of each command line; one process, which imports vLLM once."""
    directory = str(checkpoint("qwen3-tied"))
    lines = [["weightwire", "plan", directory, *arguments] for arguments, _ in BAD.values()]
    done = run_python(ALL_OF_THEM, json.dumps(lines))
    found = [line for line in done.stdout.splitlines() if line.startswith("ENDS ")]
    assert found, done.stderr[-3000:]
    return dict(zip(BAD, json.loads(found[0].removeprefix("ENDS ")), strict=True))


@pytest.mark.parametrize("bad", BAD)
def test_bad_input_is_one_line_and_exit_code_1(ends, bad):
    code, stderr = ends[bad]
    assert code == 1
    assert BAD[bad][1] in stderr
    assert "Traceback" not in stderr


def test_unknown_architectures_and_directories_are_named(tmp_path):
    found = plan(tmp_path)
    assert found.returncode == 1
    assert f"{tmp_path} has no config.json" in found.stderr.replace("\n", "")
    (tmp_path / "config.json").write_text('{"model_type": "nonesuch", "architectures": ["None"]}')
    found = plan(tmp_path)
    assert found.returncode == 1
    assert "nonesuch" in found.stderr
    assert "Traceback" not in found.stderr


def test_without_vllm_nothing_takes_its_place(checkpoint, monkeypatch):
    from weightwire.errors import BackendUnavailable
    from weightwire.planning import PlanRequest
    from weightwire.topology import Inference, Trainer
    from weightwire_vllm import compat
    from weightwire_vllm.planning import plan_ranks

    monkeypatch.setattr(compat, "vllm_version", lambda: None)
    request = PlanRequest(checkpoint("qwen3-tied"), Trainer(), Inference(), (0,))
    with pytest.raises(BackendUnavailable, match="vLLM isn't installed: install vllm"):
        next(plan_ranks(request))
