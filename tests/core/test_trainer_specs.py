"""What trainer ranks say they hold stays readable for as long as another rank may read it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import weightwire
from weightwire import LocalShard, TableMismatch
from weightwire.sources import WeightSource

RANKS = 4


class Rows(WeightSource):
    """One row of a matrix each; ``at`` may be another rank's."""

    def __init__(self, rank: int) -> None:
        self.at = rank

    def tensors(self):
        return {"w": LocalShard(torch.full((1, 3), float(self.at)), (RANKS, 3), (self.at, 0))}


@pytest.fixture
def trainer(tmp_path):
    sources = [Rows(rank) for rank in range(RANKS)]
    with ThreadPoolExecutor(RANKS) as threads:
        senders = list(
            threads.map(
                lambda rank: weightwire.open_sender(
                    "filesystem",
                    session=f"file://{tmp_path / 'run'}",
                    source=sources[rank],
                    rank=rank,
                    world_size=RANKS,
                    timeout=30,
                ),
                range(RANKS),
            )
        )

        def send(version):
            calls = [threads.submit(sender.send, version) for sender in senders]
            return [call.exception(60) for call in calls]

        yield sources, send
        list(threads.map(lambda sender: sender.close(), senders))


@pytest.mark.parametrize("wrong", [0, 3])
def test_a_table_that_could_not_be_made_costs_no_later_version(trainer, wrong):
    sources, send = trainer
    assert send(1) == [None] * RANKS
    sources[wrong].at = 1  # its own row is missing, and another is there twice
    for version in (2, 3):
        assert all(isinstance(error, TableMismatch) for error in send(version))
    sources[wrong].at = wrong
    assert send(4) == [None] * RANKS
    assert send(5) == [None] * RANKS


def test_a_rank_that_could_not_say_what_it_holds_costs_no_later_version(trainer):
    sources, send = trainer
    assert send(1) == [None] * RANKS
    for at, source in enumerate(sources):  # others than what the first version's ranks held
        source.at = RANKS - 1 - at
    lost, sources[2].tensors = sources[2].tensors, lambda: 1 / 0
    for version in (2, 3):
        assert all(error is not None for error in send(version))
    sources[2].tensors = lost
    assert send(4) == [None] * RANKS
