"""Shards that trainer ranks exchange, wherever they lie; this process is every rank."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

import weightwire
from weightwire import LocalShard

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
RANKS = 3
CASES = {
    "rows": ((7, 5), 0),
    "columns": ((5, 4), 1),  # one rank has none
    "columns-of-nothing": ((0, 4), 1),
    "rows-of-nothing": ((0, 4), 0),
}


def local_shard(whole: torch.Tensor, dim: int, rank: int) -> LocalShard:
    """As torch cuts it: equal parts, and less or nothing at the end."""
    size = -(-whole.shape[dim] // RANKS)
    begin = min(rank * size, whole.shape[dim])
    local = whole.narrow(dim, begin, min(size, whole.shape[dim] - begin)).clone()
    offsets = [begin if d == dim else 0 for d in range(whole.dim())]
    return LocalShard(local, tuple(whole.shape), tuple(offsets))


def send(session: str, whole: torch.Tensor, dim: int) -> list[BaseException]:
    """Two versions, from fp32 masters; the wire has bf16."""
    failures: list[BaseException] = []

    def send_as(rank: int) -> None:
        shard = local_shard(whole, dim, rank)
        try:
            with weightwire.open_sender(
                "filesystem",
                session=session,
                source={"w": shard},
                rank=rank,
                world_size=RANKS,
                wire_dtype=torch.bfloat16,
                verify="full",
                timeout=30,
            ) as sender:
                for version in (1, 2):
                    shard.local.add_(version)
                    sender.send(version)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=send_as, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures


@pytest.mark.parametrize("target_device", ["cpu", pytest.param("cuda", marks=gpu)])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
@pytest.mark.parametrize("case", CASES)
def test_shards_come_together_bit_for_bit(
    tmp_path: Path, case: str, device: str, target_device: str
) -> None:
    shape, dim = CASES[case]
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(device)
    session = f"file://{tmp_path / 'run'}"
    assert not send(session, whole, dim)
    target = {"w": torch.zeros(shape, dtype=torch.bfloat16, device=target_device)}
    with weightwire.open_receiver(
        "filesystem", session=session, target=target, receiver_id="r", timeout=30
    ) as receiver:
        assert receiver.receive().version == 2
    expected = ((whole + 1) + 2).bfloat16().to(target_device)
    assert torch.equal(target["w"].view(torch.int16), expected.view(torch.int16))
