"""Experts fused and sharded at the trainer arrive one by one: no rank ever gathers them."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import weightwire

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")

TRAINER = Path(__file__).with_name("fused_trainer.py")


@pytest.fixture
def trainer(tmp_path):
    ranks: list[subprocess.Popen[bytes]] = []

    def start(world: int, backend: str) -> list[subprocess.Popen[bytes]]:
        for rank in range(world):
            command = [sys.executable, str(TRAINER), str(rank), str(world), str(tmp_path), backend]
            with (tmp_path / f"rank{rank}.log").open("w") as log:
                ranks.append(subprocess.Popen(command, stdout=log, stderr=log))
        return ranks

    yield start
    for process in ranks:
        process.kill()
        process.wait()


@pytest.mark.parametrize("backend", ["memory", "filesystem"])
def test_experts_of_a_sharded_trainer_arrive_under_checkpoint_names(trainer, tmp_path, backend):
    from transformers.core_model_loading import revert_weight_conversion

    from weightwire_vllm.families import family_model

    ranks = trainer(3, backend)
    for kind in ("qwen3_moe", "mixtral"):
        model = family_model(kind, 5)
        wanted = revert_weight_conversion(model, dict(model.state_dict()))
        target = {name: torch.zeros_like(value) for name, value in wanted.items()}
        with weightwire.open_receiver(
            backend,
            session=f"file://{tmp_path / kind}",
            target=target,
            receiver_id="replica-0",
            timeout=90,
        ) as receiver:
            assert receiver.receive().version == 1
        for name, value in wanted.items():
            assert torch.equal(target[name].view(torch.int16), value.view(torch.int16)), name
    logs = "".join(path.read_text() for path in tmp_path.glob("rank*.log"))
    assert [rank.wait(30) for rank in ranks] == [0, 0, 0], logs
