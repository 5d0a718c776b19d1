"""Warm A→B is cold B, then A→B→B and A→B→A, for every family."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from weightwire.errors import TraceError
from weightwire_vllm import inprocess
from weightwire_vllm.compare import reachable_tensors
from weightwire_vllm.families import FAMILIES
from weightwire_vllm.inprocess import on_model

SLICE = ("deepseek_v3",)  # experts, MLA, a router bias in fp32, several layer kinds
QUANTISED = (
    "qwen3@fp8_per_channel",
    "llama@fp8_per_channel",
    "qwen3@int8_per_channel_weight_only",
)


@pytest.fixture(
    params=[
        pytest.param(kind, marks=() if kind in SLICE else pytest.mark.soak)
        for kind in (*FAMILIES, *QUANTISED)
        if kind != "mamba2"
    ],
    scope="module",
)
def lab(request, labs):
    return labs(request.param)


def test_updates_equal_cold_engines(lab, record_property):
    assert lab.cold["A"].logprobs != lab.cold["B"].logprobs
    before = addresses(lab)
    lab.target.plan(lab.of("A").table)
    record_property("traced", lab.target.path)  # for the table in docs/vllm.md
    for which in ("B", "B", "A"):
        assert lab.sync(lab.of(which), poison=True) is None
        lab.is_(which)
    assert addresses(lab) == before
    assert lab.target.path.startswith("traced")


@pytest.fixture
def trainer(lab, tmp_path, world):
    """Trainer ranks that have a model's rows between them; called, waits for them."""
    command = [sys.executable, str(Path(__file__).with_name("sharded_trainer.py"))]
    ranks: list[subprocess.Popen[bytes]] = []
    for rank in range(world):
        with (tmp_path / f"rank{rank}.log").open("w") as log:
            arguments = [str(rank), str(world), str(tmp_path), lab.kind.partition("@")[0]]
            ranks.append(subprocess.Popen([*command, *arguments], stderr=log))

    def published() -> None:
        done = [rank.wait(120) for rank in ranks]
        assert done == [0] * world, (tmp_path / "rank0.log").read_text()

    yield published
    for rank in ranks:
        rank.kill()
        rank.wait()


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.soak), 3])
def test_a_sharded_trainer(lab, trainer, tmp_path):
    trainer()
    for which in ("B", "A"):
        session = f"file://{tmp_path / which}"
        inprocess.attach(
            lab.llm, session=session, backend="filesystem", receiver_id="r", timeout=60
        )
        inprocess.update(lab.llm)
        lab.is_(which)
        inprocess.detach(lab.llm)


@pytest.mark.soak
def test_a_buffer_that_nothing_refreshes_is_refused_by_name(labs):
    lab = labs("mamba2")
    with pytest.raises(TraceError, match=r"backbone\.layers\.0\.mixer\.conv_weights"):
        lab.target.plan(lab.of("B").table)
    lab.is_("A")


def addresses(lab):
    tensors = on_model(lab.llm, reachable_tensors)
    return {path: tensor.data_ptr() for path, tensor in tensors.items()}


def test_models_differ_in_every_tensor(labs):
    lab = labs("deepseek_v3")
    a, b = (lab.of(which).tensors for which in ("A", "B"))
    assert all(not torch.equal(a[name], b[name]) for name in a)
