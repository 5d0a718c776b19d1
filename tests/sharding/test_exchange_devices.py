"""Shards that trainer ranks exchange, wherever they lie; this process is every rank."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import weightwire
from weightwire import LocalShard

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
RANKS = 2
SHAPE = (6, 5)


def send(
    session: str, whole: torch.Tensor, failures: list[BaseException]
) -> list[threading.Thread]:
    """Each rank holds some rows, as fp32 masters; the wire has bf16."""

    def rank(number: int) -> None:
        rows = SHAPE[0] // RANKS
        local = whole[number * rows : (number + 1) * rows].clone()
        source: dict[str, Any] = {"w": LocalShard(local, SHAPE, (number * rows, 0))}
        try:
            with weightwire.open_sender(
                "filesystem",
                session=session,
                source=source,
                rank=number,
                world_size=RANKS,
                wire_dtype=torch.bfloat16,
                verify="full",
                timeout=30,
            ) as sender:
                for version in (1, 2):
                    local.add_(version)
                    sender.send(version)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(RANKS)]
    for thread in threads:
        thread.start()
    return threads


@pytest.mark.parametrize("target_device", ["cpu", pytest.param("cuda", marks=gpu)])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
def test_shards_come_together_bit_for_bit(tmp_path: Path, device: str, target_device: str) -> None:
    generator = torch.Generator().manual_seed(3)
    whole = torch.randn(SHAPE, generator=generator).to(device)
    failures: list[BaseException] = []
    session = f"file://{tmp_path / 'run'}"
    for thread in send(session, whole, failures):
        thread.join()
    assert not failures
    target = {"w": torch.zeros(SHAPE, dtype=torch.bfloat16, device=target_device)}
    with weightwire.open_receiver(
        "filesystem", session=session, target=target, receiver_id="r", timeout=30
    ) as receiver:
        assert receiver.receive().version == 2
    expected = ((whole + 1) + 2).bfloat16().to(target_device)
    assert torch.equal(target["w"].view(torch.uint8), expected.view(torch.uint8))
