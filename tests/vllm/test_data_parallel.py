"""Two data-parallel ranks of one engine, experts spread over both: each follows the trainer."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from data_parallel import answers_of_ranks

import weightwire
from weightwire_vllm.compare import Difference, Snapshot, compare
from weightwire_vllm.families import family_model
from weightwire_vllm.models import save_checkpoint

CHILD = Path(__file__).with_name("dp_child.py")


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3"])
def test_every_rank_holds_its_own_experts(tmp_path, engine_room, kind):
    models = {which: family_model(kind, seed) for which, seed in (("A", 1), ("B", 2))}
    for which, model in models.items():
        save_checkpoint(model, tmp_path / which)
    session = f"file://{tmp_path / 'run'}"
    with (
        weightwire.open_sender(
            "memory", session=session, source=models["B"], min_receivers=2, timeout=200
        ) as sender,
        ThreadPoolExecutor(1) as beside,
    ):
        sending = beside.submit(sender.send, 1)
        warm = start(tmp_path, "A", engine_room)
        # Replicas of equal shapes, and of other experts: their bits aren't compared.
        assert sorted(sending.result().roster) == ["r-dp0", "r-dp1"]
    cold = start(tmp_path, "B", engine_room)
    for mine, other in zip(warm, cold, strict=True):
        assert not difference(mine["before"], other["before"]).equal
        found = difference(mine["after"], other["before"])
        assert found.equal, found
    apart = difference(warm[0]["after"], warm[1]["after"]).differing
    assert any("experts" in path for path in apart)
    assert not any("self_attn" in path for path in apart)


def difference(mine: str, other: str) -> Difference:
    return compare(Snapshot.decode(mine), Snapshot.decode(other))


def start(directory: Path, which: str, room: dict[str, str]) -> list[dict[str, str]]:
    return answers_of_ranks([sys.executable, str(CHILD), str(directory), which], 2, room, "STATE")
