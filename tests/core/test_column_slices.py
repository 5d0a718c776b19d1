"""Matrices lie as their readers need them, and what is read is the same whatever that is."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch

import weightwire
from weightwire import LocalShard
from weightwire.blocks import ANY, common_slices
from weightwire.errors import TransferTimeout
from weightwire.targets import MappingTarget

BACKEND = {"backend": "memory", "column_blocks": True}


class Sliced(MappingTarget):
    """Says that its ranks read slices of columns."""

    def __init__(self, mapping, slices):
        super().__init__(mapping)
        self._slices = slices

    @property
    def column_slices(self):
        return self._slices


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ((), 1),
        ((1, 1), 1),
        ((2,), 2),
        ((2, 8, 1), 8),
        ((2, 3), 6),
        ((16,), 16),
        ((8, 3), ANY),  # more blocks than for whoever doesn't say
        ((1, ANY), ANY),
    ],
)
def test_slices_of_several_readers(said, found):
    assert common_slices(said) == found


class Trainer:
    """Two ranks that have a matrix's rows between them."""

    def __init__(self, session):
        self.session = session
        self.weight = torch.randn(512, 1024)
        self.ranks = []

    def open(self, rank):
        begin = rank * 256
        held = {"w": LocalShard(self.weight[begin : begin + 256], (512, 1024), (begin, 0))}
        return weightwire.open_sender(
            BACKEND, session=self.session, source=held, rank=rank, world_size=2, timeout=30
        )

    def send(self, version):
        with contextlib.ExitStack() as stack:
            threads = [
                threading.Thread(target=self.ranks[rank].send, args=(version,)) for rank in (0, 1)
            ]
            for thread in threads:
                thread.start()
                stack.callback(thread.join)

    def __enter__(self):
        opened = threading.Thread(target=lambda: self.ranks.append(self.open(0)))
        opened.start()
        second = self.open(1)
        opened.join()
        self.ranks.append(second)
        return self

    def __exit__(self, *exc):
        for rank in reversed(self.ranks):
            rank.close()

    @property
    def blocks(self):
        first, second = (rank._ours.table for rank in self.ranks)
        assert first == second
        return first.tensors[0].blocks


def test_the_layout_is_what_the_receivers_read_by(tmp_path):
    session = f"file://{tmp_path}"
    version = 0
    with contextlib.ExitStack() as stack:
        trainer = stack.enter_context(Trainer(session))

        def follow(name, slices):
            target = {"w": torch.zeros(512, 1024)}
            receiver = weightwire.open_receiver(
                "memory",
                session=session,
                target=target if slices == 1 else Sliced(target, slices),
                receiver_id=name,
                timeout=30,
            )
            stack.callback(receiver.close)
            return receiver, target

        def arrives(*followers):
            nonlocal version
            version += 1
            trainer.weight.add_(1)
            threads = [
                threading.Thread(target=receiver.receive, kwargs={"minimum": version})
                for receiver, _ in followers
            ]
            for thread in threads:
                thread.start()
            trainer.send(version)
            for thread in threads:
                thread.join()
            for receiver, target in followers:
                assert receiver.version == version
                assert torch.equal(target["w"], trainer.weight)

        whole = follow("whole", 1)
        arrives(whole)
        assert trainer.blocks == 1, "a reader of whole matrices pays for no blocks"
        pair = follow("pair", 2)
        arrives(whole, pair)
        assert trainer.blocks == 2
        pair[0].close()
        arrives(whole)
        assert trainer.blocks == 2, "readers that come and go don't change the table"
        unsaid = follow("unsaid", ANY)
        arrives(whole, unsaid)
        assert trainer.blocks == 16


def test_a_first_version_waits_for_its_readers_and_says_so(tmp_path):
    with (
        weightwire.open_sender(
            BACKEND, session=f"file://{tmp_path}", source={"w": torch.zeros(4, 4)}
        ) as sender,
        pytest.raises(TransferTimeout, match=r"receivers \(0 of at least 1 joined\)"),
    ):
        sender.send(1, timeout=0.5)
