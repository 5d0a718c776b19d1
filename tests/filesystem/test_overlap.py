"""Two buffers on each side: a group is staged while the last is written, and read ahead."""

from __future__ import annotations

import torch

import weightwire


class Staged(weightwire.MappingTarget):
    """Nothing lands in place: what arrives lies in the receiver's buffers first."""

    def landing(self, region):
        return None


def test_groups_that_are_cast_and_read_ahead_arrive_bit_for_bit(tmp_path):
    generator = torch.Generator().manual_seed(3)
    source = {f"layers.{i}.weight": torch.randn(1024, 1500, generator=generator) for i in range(6)}
    held = {name: torch.zeros(1024, 1500, dtype=torch.bfloat16) for name in source}
    url = f"file://{tmp_path}/session"
    options = {"overlap": True, "timeout": 60.0}
    with (
        weightwire.open_sender(
            "filesystem",
            session=url,
            source=source,
            wire_dtype="bfloat16",
            group_bytes=4 << 20,  # a group each, and large enough for several threads
            verify="full",
            **options,
        ) as sender,
        weightwire.open_receiver(
            "filesystem", session=url, target=Staged(held), receiver_id="replica", **options
        ) as receiver,
    ):
        for version in range(1, 4):
            for tensor in source.values():
                tensor.normal_(generator=generator)
            sender.send(version)
            assert receiver.receive(minimum=version).version == version
            for name, tensor in source.items():
                assert torch.equal(held[name], tensor.bfloat16()), name
