"""Sharded trainers of real torch.distributed processes reach a receiver bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import weightwire

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from layouts import LAYOUTS, full_values, layouts, model  # noqa: E402


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.fixture
def trainer(tmp_path: Path):
    started: list[subprocess.Popen[str]] = []

    def start(world: int, backends: tuple[str, ...]) -> list[subprocess.Popen[str]]:
        for rank in range(world):
            script = [sys.executable, str(HERE / "trainer_rank.py")]
            with (tmp_path / f"rank{rank}.log").open("w") as log:
                started.append(
                    subprocess.Popen(
                        [*script, str(rank), str(world), str(tmp_path), *backends],
                        stdout=subprocess.PIPE,
                        stderr=log,
                        text=True,
                    )
                )
        return started

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("world", LAYOUTS)
def test_every_layout_arrives_whole_and_each_byte_is_served_once(world, trainer, tmp_path):
    """Over each backend in turn: processes take longer to start than to send."""
    backends = ("memory", "filesystem", *(("nccl",) if world == 4 else ()))
    ranks = trainer(world, backends)
    for backend in backends:
        for layout in layouts(world, backend):
            served(backend, layout, world, ranks, tmp_path)
    for rank in ranks:
        assert rank.wait(30) == 0, (tmp_path / "rank0.log").read_text()


def served(backend, layout, world, ranks, directory):
    mine = model()
    with torch.no_grad():
        for tensor in mine.state_dict().values():
            tensor.fill_(-1)
    with weightwire.open_receiver(
        backend,
        session=(directory / f"{backend} {layout}").as_uri(),
        target=mine,
        receiver_id="replica-0",
        timeout=60,
    ) as receiver:
        # Stored versions may both be out before the receiver looks: it takes the newest.
        for version in (2,) if backend == "filesystem" else (1, 2):
            report = receiver.receive(minimum=version)
            assert report.version == version
            wanted = full_values(version)
            for name, tensor in mine.state_dict().items():
                assert raw(tensor) == raw(wanted[name]), f"{backend}, {layout}: {name}"
    total = sum(tensor.nbytes for tensor in mine.state_dict().values())
    for _ in (1, 2):
        sent = [json.loads(rank.stdout.readline()) for rank in ranks]
        assert {(line["backend"], line["layout"]) for line in sent} == {(backend, layout)}
        assert sum(line["nbytes"] for line in sent) == total
        if layout in ("fsdp", "rows", "replicated", "plain", "streamed"):
            # Nobody serves more than its share and the largest tensor's.
            largest = max(tensor.nbytes for tensor in mine.state_dict().values())
            assert max(line["nbytes"] for line in sent) <= total / world + largest
