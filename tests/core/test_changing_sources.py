"""Sources are what they are at each send: moved, offloaded, cut anew, or wrong by now."""

from __future__ import annotations

import threading

import pytest
import torch

import weightwire
from weightwire import LocalShard, WeightSource
from weightwire.errors import TableMismatch, WeightWireError
from weightwire.targets import MappingTarget

SHAPE = (7, 3)


def value(version):
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(version))


class Changing(WeightSource):
    def __init__(self):
        self.current = {}

    def tensors(self):
        return self.current


class World:
    """Two trainer ranks, a thread each, and a receiver."""

    def __init__(self, backend, directory):
        self.sources = [Changing(), Changing()]
        self.target = {"w": torch.zeros(SHAPE)}
        self.url = f"file://{directory}"
        self.backend = backend
        self.senders = self.on_both(
            lambda rank: weightwire.open_sender(
                backend,
                session=self.url,
                source=self.sources[rank],
                rank=rank,
                world_size=2,
                verify="full",
                group_bytes=24,
                timeout=30,
            )
        )
        self.receiver = weightwire.open_receiver(
            backend, session=self.url, target=self.target, receiver_id="r0", timeout=30
        )

    def on_both(self, work):
        results = [None, None]

        def run(rank):
            try:
                results[rank] = work(rank)
            except WeightWireError as error:
                results[rank] = error

        threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    def send(self, version, rows=None, columns=None, boxes=None):
        """Cut by rows, by columns, or into any boxes; nothing of it lies where it lay before."""
        whole = value(version)
        if boxes is None:
            boxes = (
                [((0, 0), (rows, 3)), ((rows, 0), (7 - rows, 3))]
                if rows is not None
                else [((0, 0), (7, columns)), ((0, columns), (7, 3 - columns))]
            )
        for source, (offsets, sizes) in zip(self.sources, boxes, strict=True):
            (a, b), (m, n) = offsets, sizes
            local = whole[a : a + m, b : b + n].clone()
            source.current = {"w": LocalShard(local, SHAPE, offsets)}
        return self.on_both(lambda rank: self.senders[rank].send(version))

    def close(self):
        self.receiver.close()
        self.on_both(lambda rank: self.senders[rank].close())


@pytest.fixture(params=["memory", "filesystem"])
def world(request, tmp_path):
    made = World(request.param, tmp_path / "session")
    yield made
    made.close()


def arrives(world, version, **layout):
    if world.backend == "filesystem":
        reports = world.send(version, **layout)
        world.receiver.receive(minimum=version)
    else:
        thread = threading.Thread(target=world.receiver.receive, kwargs={"minimum": version})
        thread.start()
        reports = world.send(version, **layout)
        thread.join()
    assert [getattr(report, "version", report) for report in reports] == [version] * 2
    assert torch.equal(world.target["w"], value(version))


def test_layouts_may_change_between_versions_and_wrong_ones_move_no_byte(world):
    arrives(world, 1, rows=3)
    arrives(world, 2, rows=3)
    arrives(world, 3, columns=1)
    arrives(world, 4, rows=7)
    wrong = {
        "overlap": [((0, 0), (4, 3)), ((3, 0), (4, 3))],
        "hold 18 of 21": [((0, 0), (3, 3)), ((4, 0), (3, 3))],
    }
    for number, (message, boxes) in enumerate(wrong.items()):
        errors = world.send(5 + number, boxes=boxes)
        for error in errors:
            assert isinstance(error, TableMismatch), error
            assert "tensor 'w'" in str(error)
            assert message in str(error) or "hold 24 of 21" in str(error)
        assert torch.equal(world.target["w"], value(4))
        assert world.receiver.version == 4
    arrives(world, 7, columns=2)


def test_parameters_that_were_rebound_or_offloaded_and_loaded_again(tmp_path):
    module = torch.nn.Linear(3, 7, bias=False)
    target = {"weight": torch.zeros(SHAPE)}
    url = f"file://{tmp_path / 'session'}"
    with (
        weightwire.open_sender("filesystem", session=url, source=module, verify="full") as sender,
        weightwire.open_receiver(
            "filesystem", session=url, target=target, receiver_id="r0"
        ) as receiver,
    ):

        def arrives(version):
            sender.send(version)
            receiver.receive(timeout=30)
            assert torch.equal(target["weight"], module.weight.detach()), version

        arrives(1)
        module.weight.data = value(2)
        arrives(2)
        kept = module.weight.data.clone()
        # Sending must not take this away from the trainer.
        module.weight.data.untyped_storage().resize_(0)
        with pytest.raises(weightwire.ConfigError, match="'weight' has no memory"):
            sender.send(3)
        module.weight.data = kept * 2
        arrives(3)
        module.weight.data = value(4).t().contiguous().t()  # other strides
        arrives(4)
        module.weight = torch.nn.Parameter(value(5))
        arrives(5)


class Unsaid(MappingTarget):
    """Doesn't say how it reads."""

    column_slices = 0


@pytest.mark.parametrize("overlap", [False, True])
def test_matrices_in_blocks_of_columns_arrive_by_every_kind_of_target(tmp_path, overlap):
    weight, bias = torch.randn(256, 1024), torch.randn(1024).bfloat16()
    plain = {"w": torch.zeros(256, 1024, dtype=torch.bfloat16), "b": torch.zeros_like(bias)}
    turned = torch.zeros(1024, 256, dtype=torch.bfloat16).t()
    strided = {"w": turned, "b": torch.zeros_like(bias)}
    url = f"file://{tmp_path / 'session'}"
    backend = {"backend": "memory", "column_blocks": True}
    with (
        weightwire.open_sender(
            backend,
            session=url,
            source={"w": weight, "b": bias},
            wire_dtype="bfloat16",
            verify="full",
            group_bytes=300 << 10,
            overlap=overlap,
            min_receivers=2,
        ) as sender,
        weightwire.open_receiver(
            "memory", session=url, target=Unsaid(plain), receiver_id="r0", overlap=overlap
        ) as first,
        weightwire.open_receiver(
            "memory", session=url, target=Unsaid(strided), receiver_id="r1", overlap=overlap
        ) as second,
    ):
        threads = [threading.Thread(target=r.receive, args=(30,)) for r in (first, second)]
        for thread in threads:
            thread.start()
        sender.send(1, timeout=30)
        for thread in threads:
            thread.join()
        blocks = [entry.blocks for entry in sender._ours.table.tensors]
    assert blocks == [4, 1]
    for held in (plain, strided):
        assert torch.equal(held["w"], weight.bfloat16())
        assert torch.equal(held["b"], bias)
