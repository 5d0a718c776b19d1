"""Slots in blocks of columns, read and written over real NIXL, by targets of any strides."""

from __future__ import annotations

import threading

import pytest
import torch

import weightwire
from weightwire.targets import MappingTarget


class Unsaid(MappingTarget):
    """Doesn't say how it reads."""

    column_slices = 0


@pytest.mark.parametrize("direction", ["pull", "push"])
def test_matrices_in_blocks_of_columns_arrive(tmp_path, direction):
    weight, bias = torch.randn(512, 1024), torch.randn(1024).bfloat16()
    target = {"w": torch.zeros(1024, 512, dtype=torch.bfloat16).t(), "b": torch.zeros_like(bias)}
    url = f"file://{tmp_path / 'session'}"
    backend = {"backend": "nixl", "direction": direction, "column_blocks": True}
    with (
        weightwire.open_sender(
            backend,
            session=url,
            source={"w": weight, "b": bias},
            wire_dtype="bfloat16",
            verify="full",
            group_bytes=300 << 10,
        ) as sender,
        weightwire.open_receiver(
            backend, session=url, target=Unsaid(target), receiver_id="r0", timeout=30
        ) as receiver,
    ):
        for version in (1, 2):
            weight.add_(1)
            thread = threading.Thread(target=receiver.receive, kwargs={"minimum": version})
            thread.start()
            sender.send(version, timeout=30)
            thread.join()
            assert torch.equal(target["w"], weight.bfloat16())
            assert torch.equal(target["b"], bias)
        assert [entry.blocks for entry in sender._ours.table.tensors] == [4, 1]
