"""Slots: where boxes lie, row by row or in blocks of columns, and what reading them costs."""

from __future__ import annotations

import itertools
import math

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightwire.blocks import column_blocks
from weightwire.contract import SenderTransport
from weightwire.cuts import Cuts
from weightwire.deadline import Deadline, Watch
from weightwire.digest import Box, Digester, box_digest, tensor_key
from weightwire.errors import PluginError, TableMismatch, UnsupportedOperation
from weightwire.exchange import Exchange
from weightwire.grouping import make_groups
from weightwire.layout import intersection, runs, slot_layout, views
from weightwire.memory import MemoryBackend
from weightwire.phases import Phases
from weightwire.send_plan import SendPlan
from weightwire.table import Part, Region, Shard, TensorEntry, TensorTable


def slices(box, origin=None):
    origin = origin or (0,) * len(box.sizes)
    return tuple(
        slice(o - a, o - a + n) for o, a, n in zip(box.offsets, origin, box.sizes, strict=True)
    )


@st.composite
def sharded(draw):
    """A table of one tensor, cut by rows and by columns over ranks, groups and blocks."""
    shape = tuple(draw(st.lists(st.integers(1, 8), min_size=0, max_size=4)))
    dtype = draw(st.sampled_from(["uint8", "bfloat16", "float32", "int64"]))
    cuts = [
        sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))}) if n > 1 else [0, n]
        for n in shape
    ]
    boxes = [((), ())]
    for edges in cuts:
        boxes = [((*o, a), (*s, b - a)) for o, s in boxes for a, b in itertools.pairwise(edges)]
    shards = tuple(Shard(rank, *box) for rank, box in enumerate(boxes))
    entry = TensorEntry("w", shape, dtype, shards)
    groups = make_groups([entry], draw(st.integers(8, 400)))
    whole_rows = all(p.sizes[-1:] == shape[-1:] for g in groups for p in g.parts.values())
    if len(shape) > 1 and whole_rows:
        counts = [k for k in range(1, 9) if shape[-1] % k == 0]
        entry = msgspec.structs.replace(entry, blocks=draw(st.sampled_from(counts)))
    table = TensorTable(len(shards), (entry,), groups)
    table.validate()
    offsets = [draw(st.integers(0, n - 1)) for n in shape]
    sizes = [draw(st.integers(1, n - o)) for n, o in zip(shape, offsets, strict=True)]
    return table, Region(0, tuple(offsets), tuple(sizes))


class Slots(SenderTransport):
    """Keeps the slots that it gave out, by group."""

    column_blocks = True

    def __init__(self):
        self.slots, self.seals = {}, {}

    def set_table(self, table):
        pass

    def begin(self, offer, readers):
        pass

    def slot(self, group, nbytes):
        self.slots[group] = torch.zeros(nbytes, dtype=torch.uint8)
        return self.slots[group]

    def put(self, group, tensors, seal):
        self.seals[group] = seal

    def finish(self):
        pass

    def abort(self, error):
        pass

    def close(self):
        pass


def started_watch():
    watch = Watch()
    watch.start(Deadline(60))
    return watch


def staged(table, whole, verify="full"):
    """Each owner's slots, filled by the pipeline from the shards of ``whole``."""
    found = []
    for rank in range(table.world_size):
        transport = Slots()
        held = whole[slices(table.tensors[0].shards[rank])].clone()
        watch = started_watch()
        SendPlan(table, rank).send(
            {"w": held},
            transport,
            MemoryBackend.capabilities,
            Exchange(None, None, rank, watch),
            version=7,
            of=0,
            verify=verify,
            watch=watch,
            phases=Phases(),
        )
        found.append(transport)
    return found


def values(shape, dtype):
    torch_dtype = TensorEntry("w", shape, dtype, ()).torch_dtype
    raw = torch.randint(0, 256, (math.prod(shape) * torch_dtype.itemsize,), dtype=torch.uint8)
    return raw.view(torch_dtype).view(shape)


def raw(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@settings(max_examples=200, deadline=None)
@given(sharded())
def test_a_region_is_found_in_the_slots_by_views_and_by_runs(drawn):
    table, wanted = drawn
    entry = table.tensors[0]
    whole = values(entry.shape, entry.dtype)
    for verify in ("sample", "full"):
        owners = staged(table, whole, verify)
        seals = sum(seal.digests[0] for owner in owners for seal in owner.seals.values())
        assert seals % (1 << 64) == box_digest(
            whole,
            key=tensor_key("w"),
            shape=entry.shape,
            offsets=(0,) * whole.dim(),
            verify=verify,
            version=7,
        )
    cuts = Cuts(table)
    for group, part in cuts.cut(wanted):
        for region in {part, *cuts.cut_blocks(part)}:
            expected = whole[slices(region)]
            copied = torch.zeros_like(expected)
            pulled = np.zeros(raw(expected).numel(), np.uint8)
            for rank, owner in enumerate(owners):
                layout = slot_layout(table, group, rank)
                if group not in owner.slots:
                    continue
                slot = owner.slots[group]
                for destination, source in views(layout, 0, slot, region, copied):
                    destination.copy_(source)
                found = runs(layout, 0, region)
                ends = found.source + found.nbytes
                assert (found.source[1:] >= ends[:-1]).all()
                for at, to, n in zip(*found, strict=True):
                    assert not pulled[to : to + n].any()  # nothing is pulled twice
                    pulled[to : to + n] = slot[at : at + n].numpy() + np.uint8(0)
                mine = intersection(layout.shards[0], region) if 0 in layout.shards else None
                if mine is not None and region not in (part,) and not layout.places[0].borders:
                    assert len(found.nbytes) <= math.prod(mine.sizes[:-1])
            assert torch.equal(raw(copied), raw(expected))
            assert pulled.tobytes() == raw(expected).numpy().tobytes()


def test_a_block_is_one_run_and_rows_are_one_run_of_each_block():
    shards = tuple(Shard(r, (r * 8, 0), (8, 32)) for r in range(2))
    table = TensorTable(
        2,
        (TensorEntry("w", (16, 32), "float32", shards, 4),),
        make_groups([TensorEntry("w", (16, 32), "float32", shards)], 1 << 20),
    )
    layout = slot_layout(table, 0, 0)
    assert [t.begin for t in layout.places[0].tiles()] == [0, 256, 512, 768]
    block = runs(layout, 0, Region(0, (0, 8), (16, 8)))
    assert (block.source.tolist(), block.nbytes.tolist()) == ([256], [256])
    rows = runs(layout, 0, Region(0, (2, 0), (3, 32)))
    assert len(rows.nbytes) == 3 * 4  # into memory that holds rows: cut it by blocks instead
    pieces = Cuts(table).cut_blocks(Region(0, (2, 0), (3, 32)))
    assert [len(runs(layout, 0, piece).nbytes) for piece in pieces] == [1, 1, 1, 1]
    with pytest.raises(UnsupportedOperation, match="lies in 4 blocks of columns"):
        layout.places[0].view(torch.zeros(1024, dtype=torch.uint8))


def test_sampled_digests_of_boxes_are_those_of_each_box():
    generator = torch.Generator().manual_seed(0)
    boxes, keys, shapes, offsets = [], [], [], []
    for number, dtype in enumerate((torch.float32, torch.int64, torch.uint8, torch.bfloat16)):
        whole = torch.randint(0, 99, (60, 50), generator=generator).to(dtype)
        for at in ((0, 0), (20, 7), (59, 49), (60, 0)):
            boxes.append(whole[at[0] : at[0] + 30, at[1] : at[1] + 9].contiguous())
            keys.append(tensor_key(f"w{number}"))
            shapes.append((60, 50))
            offsets.append(at)
    boxes.append(torch.tensor(3.0))
    keys.append(5)
    shapes.append(())
    offsets.append(())
    described = [
        Box(k, s, o, tuple(b.shape), b.element_size())
        for b, k, s, o in zip(boxes, keys, shapes, offsets, strict=True)
    ]
    for version in (1, 2):
        assert Digester([described]).digests(0, boxes, "sample", version) == [
            box_digest(b, key=k, shape=s, offsets=o, verify="sample", version=version)
            for b, k, s, o in zip(boxes, keys, shapes, offsets, strict=True)
        ]


def one(shape, *boxes):
    shards = tuple(
        Shard(rank, *box) for rank, box in enumerate(boxes or [((0,) * len(shape), shape)])
    )
    return TensorEntry("w", shape, "bfloat16", shards)


@pytest.mark.parametrize(
    ("shape", "blocks"),
    [
        ((4096, 4096), 16),
        ((4096, 4100), 4),  # what divides the columns
        ((4096, 4099), 1),
        ((64, 4096), 8),  # blocks of 64 KiB at least
        ((16, 1 << 20), 4),  # and few compared with the rows
        ((4096,), 1),
        ((8, 512, 2048), 16),  # stacked experts
        ((128, 128), 1),
        ((0, 4096), 1),
        ((), 1),
    ],
)
def test_large_matrices_lie_in_blocks(shape, blocks):
    whole = Part((0,) * len(shape), shape)
    assert column_blocks(one(shape), [whole]) == blocks


def test_blocks_are_judged_by_what_a_rank_holds():
    boxes = [((r * 64, 0), (64, 4096)) for r in range(64)]
    assert column_blocks(one((4096, 4096), *boxes), [Part((0, 0), (4096, 4096))]) == 8


@pytest.mark.parametrize(
    ("slices", "blocks"),
    [(1, 1), (2, 2), (16, 16), (3, 1), (32, 1)],  # 4096 columns; at least 4 rows a block
)
def test_there_are_as_many_blocks_as_slices_are_read(slices, blocks):
    boxes = [((r * 64, 0), (64, 4096)) for r in range(64)]
    whole = [Part((0, 0), (4096, 4096))]
    assert column_blocks(one((4096, 4096), *boxes), whole, slices) == blocks


def test_a_table_with_impossible_blocks_is_refused():
    entry = msgspec.structs.replace(one((4, 6)), blocks=4)
    table = TensorTable(1, (entry,), make_groups([entry], 1 << 20))
    with pytest.raises(TableMismatch, match=r"'w' of shape \(4, 6\) can't lie in 4 blocks"):
        TensorTable.decode(table.encode())


def test_a_transport_with_blocks_and_no_slot_is_an_error():
    class Slotless(Slots):
        def slot(self, group, nbytes):
            return None

    entry = msgspec.structs.replace(one((4, 6)), blocks=2)
    table = TensorTable(1, (entry,), make_groups([entry], 1 << 20))
    watch = started_watch()
    with pytest.raises(PluginError, match="column_blocks gave no slot"):
        SendPlan(table, 0).send(
            {"w": torch.zeros(4, 6)},
            Slotless(),
            MemoryBackend.capabilities,
            Exchange(None, None, 0, watch),
            version=1,
            of=0,
            verify="off",
            watch=watch,
            phases=Phases(),
        )
