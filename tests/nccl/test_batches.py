"""What leaves at once: the same at both ends, whatever each of them has to stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from ends_of_two import outcome, two_ends
from torch import Tensor

from weightwire.contract import Seal
from weightwire.table import Group, Shard, TensorEntry, TensorTable
from weightwire_nccl.channels import Owner, Reader
from weightwire_nccl.wire import Wire, Work, nothing

BUCKET = 1 << 20
SIZES = (300_001, 3, 262_144, 301, 262_145, 77, 1, 1_048_576, 280_000, 400_003, 9, 1_500_000)
"""Bytes of each tensor, in one group: below 256 KiB they are packed together."""
TABLE = TensorTable(
    world_size=1,
    tensors=tuple(
        TensorEntry(f"w{i}", (size,), "uint8", (Shard(0, (0,), (size,)),))
        for i, size in enumerate(SIZES)
    ),
    groups=(Group(tuple(range(len(SIZES)))),),
)


class Recording(Wire):
    """A real wire, and how many messages were posted together."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self.device = wire.device
        self.together_: list[int] = []

    def send(self, tensor: Tensor, peer: int, tag: int) -> Work:
        return self._wire.send(tensor, peer, tag)

    def recv(self, tensor: Tensor, peer: int, tag: int) -> Work:
        return self._wire.recv(tensor, peer, tag)

    def broadcast(self, tensor: Tensor, root: int) -> Work:
        return self._wire.broadcast(tensor, root)

    def together(self, post: Callable[[], Sequence[Work]]) -> Sequence[Work]:
        works = post()
        self.together_.append(len(works))
        return works

    def abort(self) -> None:
        self._wire.abort()

    def close(self) -> None:
        self._wire.close()


def record(end: Owner | Reader) -> Recording:
    wire = Recording(end.epoch.payload)
    end.epoch._payload = wire
    return wire


def tensors_of(kind: str, *, filled: bool) -> dict[int, Tensor]:
    """Contiguous tensors travel as they lie, columns are staged."""
    found = {}
    for i, size in enumerate(SIZES):
        value = (
            torch.arange(size).mul(i + 1).to(torch.uint8) if filled else torch.zeros(size).byte()
        )
        is_column = kind == "columns" or (kind == "some" and i % 3 == 0)
        found[i] = torch.stack([value, value], 1)[:, 1] if is_column else value
    return found


@pytest.mark.parametrize("theirs", ["rows", "columns", "some"])
@pytest.mark.parametrize("ours", ["rows", "columns", "some"])
def test_both_ends_post_the_same_together(ours: str, theirs: str) -> None:
    values, memory = tensors_of(ours, filled=True), tensors_of(theirs, filled=False)
    with two_ends(TABLE, BUCKET) as ends:
        wires = [record(end) for end in (ends.owner, ends.reader)]
        jobs = [
            ends.owner.epoch.submit(
                partial(ends.owner.send_group, 0, values, Seal({0: 1}, 0), nothing)
            ),
            ends.reader.epoch.submit(partial(ends.reader.fetch_group, 0, memory, nothing)),
        ]
        for job in jobs:
            outcome(outcome(job))
        posted = [wire.together_ for wire in wires]
        staged = [end.staging.nbytes for end in (ends.owner, ends.reader)]
    assert posted[0] == posted[1]
    assert posted[0]
    assert max(posted[0]) > 1
    for i, value in values.items():
        assert torch.equal(memory[i], value), i
    for kind, nbytes in zip((ours, theirs), staged, strict=True):
        assert nbytes <= 2 * (BUCKET + 64 * len(SIZES))
        assert nbytes > 0  # small ones are packed whatever their strides
        assert kind != "columns" or nbytes >= BUCKET  # the largest message
