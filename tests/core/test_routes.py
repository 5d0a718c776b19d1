"""Descriptors, followed byte by byte, bring what a dense copy of each region holds."""

from __future__ import annotations

import msgspec
import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightwire.cuts import Cuts
from weightwire.grouping import make_groups
from weightwire.layout import ALIGNMENT, lay_out, slot_layout
from weightwire.routes import Routes, Served, joined, route
from weightwire.table import Region, Shard, TensorEntry, TensorTable


@st.composite
def worlds(draw):
    world = draw(st.integers(1, 3))
    entries = []
    for i in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 6), min_size=0, max_size=3)))
        dim = draw(st.integers(0, max(len(shape) - 1, 0)))
        shards = []
        if shape:
            step = -(-shape[dim] // world)
            for owner in range(world):
                begin, end = min(owner * step, shape[dim]), min((owner + 1) * step, shape[dim])
                if begin < end:
                    offsets = tuple(begin if d == dim else 0 for d in range(len(shape)))
                    sizes = tuple(end - begin if d == dim else n for d, n in enumerate(shape))
                    shards.append(Shard(owner, offsets, sizes))
        else:
            shards.append(Shard(draw(st.integers(0, world - 1)), (), ()))
        entries.append(TensorEntry(f"t{i}", shape, "int32", tuple(shards)))
    groups = make_groups(entries, draw(st.sampled_from([8, 40, 200, 10000])))
    table = TensorTable(world, tuple(entries), groups)
    table.validate()
    regions = []
    for i, entry in enumerate(entries):
        if draw(st.booleans()):
            continue
        begin = tuple(draw(st.integers(0, n - 1)) for n in entry.shape)
        sizes = tuple(draw(st.integers(1, n - b)) for b, n in zip(begin, entry.shape, strict=True))
        regions.extend(piece for _, piece in Cuts(table).cut(Region(i, begin, sizes)))
    return table, regions


@settings(max_examples=200, deadline=None)
@given(worlds())
def test_followed_descriptors_bring_every_region(world):
    table, regions = world
    served = Served(table)
    routes = route(served, regions)
    moved = follow(table, regions, routes)
    assert moved == sum(int(np.prod(region.sizes)) * 4 for region in regions)
    fewer = joined(routes, served, regions)
    padding = follow(table, regions, fewer) - moved
    assert len(fewer) <= len(routes)
    assert 0 <= padding <= (len(routes) - len(fewer)) * (ALIGNMENT - 1)


def follow(table: TensorTable, regions: list[Region], routes: Routes) -> int:
    """Bytes that were moved, after which every region holds what it should."""
    values = {
        i: torch.arange(entry.numel, dtype=torch.int32).reshape(entry.shape) + 1000 * (i + 1)
        for i, entry in enumerate(table.tensors)
    }
    cuts = Cuts(table)
    order = sorted(
        zip(routes.group, routes.owner, routes.source, routes.target, routes.nbytes, strict=True)
    )
    assert len(order) == len(routes)
    moved = 0
    for group, members in enumerate(table.groups):
        mine = [
            region
            for i in members.tensors
            for region in regions
            if region.tensor == i and cuts.group_of(region) == group
        ]
        places, nbytes = lay_out([(torch.int32, region.sizes) for region in mine])
        landing = torch.full((nbytes,), 0xEE, dtype=torch.uint8)
        for owner in range(table.world_size):
            layout = slot_layout(table, group, owner)
            slot = torch.zeros(layout.nbytes, dtype=torch.uint8)
            for i, place in layout.places.items():
                shard = layout.shards[i]
                box = tuple(
                    slice(o, o + n) for o, n in zip(shard.offsets, shard.sizes, strict=True)
                )
                place.view(slot).copy_(values[i][box])
            for g, o, source, target, length in order:
                if (g, o) == (group, owner):
                    assert source + length <= layout.nbytes
                    landing[target : target + length] = slot[source : source + length]
                    moved += int(length)
        for region, place in zip(mine, places, strict=True):
            box = tuple(slice(o, o + n) for o, n in zip(region.offsets, region.sizes, strict=True))
            assert torch.equal(place.view(landing), values[region.tensor][box])
    return moved


def test_neighbours_are_one_descriptor():
    whole = Shard(0, (0, 0), (16, 4))
    entries = tuple(TensorEntry(f"t{i}", (16, 4), "int32", (whole,)) for i in range(3))
    table = TensorTable(1, entries, make_groups(entries, 1 << 20))
    regions = [Region.whole(i, entry) for i, entry in enumerate(entries)]
    assert len(route(Served(table), regions)) == 1
    split = [Region(0, (0, 0), (16, 2))]
    assert len(route(Served(table), split)) == 16
    other = msgspec.structs.replace(table, tensors=table.tensors)
    assert len(route(Served(other), [])) == 0


def test_padding_that_both_slots_have_is_read_along():
    whole = Shard(0, (0,), (3,))
    entries = tuple(TensorEntry(f"t{i}", (3,), "int32", (whole,)) for i in range(3))
    table = TensorTable(1, entries, make_groups(entries, 1 << 20))
    served = Served(table)
    regions = [Region.whole(i, entry) for i, entry in enumerate(entries)]
    routes = route(served, regions)
    assert routes.nbytes.tolist() == [12, 12, 12]
    assert joined(routes, served, regions).nbytes.tolist() == [2 * ALIGNMENT + 12]
    without = [regions[0], regions[2]]  # what lies between is somebody's
    routes = route(served, without)
    assert joined(routes, served, without).nbytes.tolist() == [12, 12]
