"""From random placements on a trainer to random loaders: what arrives is what the loader makes.

The oracle is dense: numpy cuts an array of element numbers over the mesh, and the loader runs
on whole tensors.  It shares no code with tables, layouts or plans.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loaders import trace
from test_properties import apply_operations, apply_views, operations, view_steps

from weightwire.blocks import ANY
from weightwire.contract import ReceiverTransport, SenderTransport
from weightwire.deadline import Deadline, Watch
from weightwire.exchange import Exchange
from weightwire.layout import lay_out, runs, slot_layout
from weightwire.memory import MemoryBackend
from weightwire.phases import Phases
from weightwire.pipeline import FetchPlan
from weightwire.placements import LocalShard
from weightwire.routes import Served, route
from weightwire.send_plan import SendPlan
from weightwire.sources import MappingSource, WireRules, resolve
from weightwire.tables import build_table
from weightwire.targets import MappingTarget, WeightTarget
from weightwire.trace import Run, compile_tape


@st.composite
def placed(draw):
    """A tensor's shape and dtype, and for each mesh dimension which of its own is cut, or None."""
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 5, 8]), max_size=3)))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8]))
    dims = st.none() if not shape else st.none() | st.integers(0, len(shape) - 1)
    return shape, dtype, (draw(dims), draw(dims))


def local_box(shape, cuts, mesh, coordinate):
    """What lies at one coordinate of a mesh: an array of element numbers, cut again and again."""
    numbers = np.arange(int(np.prod(shape, dtype=np.int64))).reshape(shape)
    for dim, parts, at in zip(cuts, mesh, coordinate, strict=True):
        if dim is not None:
            step = max(1, -(-numbers.shape[dim] // parts))
            numbers = np.split(numbers, range(step, step * parts, step), axis=dim)[at]
    return numbers


def raw(tensor):
    return tensor.view(-1).view(torch.uint8)


class Slots(SenderTransport):
    def __init__(self, blocks):
        self.column_blocks = blocks
        self.slots, self.seals = {}, {}

    def set_table(self, table):
        pass

    def begin(self, offer, readers):
        pass

    def slot(self, group, nbytes):
        self.slots[group] = torch.full((nbytes,), 0xFF, dtype=torch.uint8)
        return self.slots[group]

    def put(self, group, tensors, seal):
        self.seals[group] = seal

    def finish(self):
        pass

    def abort(self, error):
        pass

    def close(self):
        pass


class Reader(ReceiverTransport):
    """Reads runs of bytes out of every owner's slot, each byte of a region once."""

    def __init__(self, owners):
        self.owners = owners

    def set_plan(self, table, regions):
        self.table, self.regions = table, regions
        self.routes = route(Served(table), regions)

    def begin(self, offer):
        pass

    def fetch(self, group, regions):
        seals = []
        for rank, owner in enumerate(self.owners):
            if group not in owner.slots:
                continue
            layout = slot_layout(self.table, group, rank)
            for position, memory in regions.items():
                region = self.regions[position]
                for at, to, n in zip(*runs(layout, region.tensor, region), strict=True):
                    raw(memory)[to : to + n] = owner.slots[group][at : at + n]
            seals.append(owner.seals[group])
        self.compare(group, regions)
        return seals

    def compare(self, group, regions):
        """What the vectorised planner would have read into one slot is the same."""
        # In the order of the group, whichever of them land in place.
        members = self.table.groups[group].tensors
        order = sorted(regions, key=lambda p: (members.index(self.regions[p].tensor), p))
        memories = [regions[position] for position in order]
        places, nbytes = lay_out([(memory.dtype, tuple(memory.shape)) for memory in memories])
        slot = torch.zeros(nbytes, dtype=torch.uint8)
        at = np.flatnonzero(self.routes.group == group)
        columns = (self.routes.owner, self.routes.source, self.routes.target, self.routes.nbytes)
        for owner, source, target, n in zip(*(column[at] for column in columns), strict=True):
            slot[target : target + n] = self.owners[owner].slots[group][source : source + n]
        for place, memory in zip(places, memories, strict=True):
            assert torch.equal(place.flat(slot).view(torch.uint8), raw(memory))

    def finish(self):
        pass

    def abort(self, error):
        pass

    def close(self):
        pass


class Replaying(WeightTarget):
    def __init__(self, tape, destinations):
        self.tape, self.destinations = tape, destinations

    def plan(self, table):
        self.program = compile_tape(self.tape, table)
        self.run = Run(self.program, self.destinations.__getitem__)
        return self.program.regions

    def write(self, group, tensors):
        self.run.feed(group, tensors)

    def commit(self):
        self.run.finish()
        assert not self.run.held


def moved(table, per_rank, target, *, blocks, in_place):
    """One version through both pipelines, verified in full."""
    watch = Watch()
    watch.start(Deadline(60))
    owners = []
    for rank, held in enumerate(per_rank):
        owners.append(Slots(blocks))
        SendPlan(table, rank).send(
            held,
            owners[-1],
            MemoryBackend.capabilities,
            Exchange(None, None, rank, watch),
            version=5,
            of=0,
            verify="full",
            watch=watch,
            phases=Phases(),
        )
    regions = target.plan(table)
    plan = FetchPlan(table, regions, pieces=target.takes_pieces, blocks=not in_place)
    reader = Reader(owners)
    reader.set_plan(table, plan.regions)
    target.begin(5)
    plan.fetch(
        reader,
        target,
        MemoryBackend.capabilities,
        version=5,
        of=0,
        verify="full",
        watch=watch,
        phases=Phases(),
    )
    target.commit()
    return plan


def check(tensors, chains, mesh, budget, blocks, wire, in_place):
    generator = torch.Generator().manual_seed(0)
    weights = {
        f"l.{i}.w": torch.randint(0, 99, shape, generator=generator).to(dtype)
        for i, (shape, dtype, _) in enumerate(tensors)
    }
    rules = WireRules("bfloat16" if wire else None)
    specs, per_rank = [], []
    for coordinate in itertools.product(*map(range, mesh)):
        held = {}
        for (name, whole), (shape, _, cuts) in zip(weights.items(), tensors, strict=True):
            numbers = local_box(shape, cuts, mesh, coordinate)
            local = whole.reshape(-1)[torch.from_numpy(numbers.reshape(-1).copy())]
            first = np.unravel_index(numbers.min(), shape) if shape and numbers.size else ()
            offsets = tuple(int(at) for at in first) or (0,) * len(shape)
            held[name] = LocalShard(local.view(numbers.shape), shape, offsets)
        resolved = resolve(MappingSource(held), rules)
        specs.append(resolved.spec)
        per_rank.append(resolved.tensors)
    table = type(table := build_table(specs, budget, column_slices=ANY if blocks else 1)).decode(
        table.encode()
    )
    if blocks:
        table = in_small_blocks(table)
    sent = {
        name: w.to(torch.bfloat16) if wire and w.is_floating_point() else w
        for name, w in weights.items()
    }
    filled = {name: torch.zeros_like(w) for name, w in sent.items()}
    plan = moved(table, per_rank, MappingTarget(filled), blocks=blocks, in_place=in_place)
    for name, value in sent.items():
        assert torch.equal(filled[name], value), name
    assert plan.nbytes == sum(w.nbytes for w in sent.values())

    def made(w, chain):
        return apply_views(apply_operations(apply_views(w, chain[0]), chain[1]), chain[2])

    expected = {
        f"{name}.{i}": made(w, chain)
        for (name, w), of_tensor in zip(sent.items(), itertools.cycle(chains))
        for i, chain in enumerate(of_tensor)
    }
    destinations = {
        key: torch.zeros_like(v, memory_format=torch.contiguous_format)
        for key, v in expected.items()
    }

    def load(p, loaded):
        for (name, w), of_tensor in zip(loaded, itertools.cycle(chains)):
            for i, chain in enumerate(of_tensor):
                p[f"{name}.{i}"].copy_(made(w, chain))

    target = Replaying(trace(load, destinations, sent), destinations)
    moved(table, per_rank, target, blocks=blocks, in_place=in_place)
    for key, value in expected.items():
        assert torch.equal(destinations[key], value), key


def in_small_blocks(table):
    """Blocks in matrices that are far too small for the rule."""
    from msgspec.structs import replace

    cut = {i: p for g in table.groups for i, p in g.parts.items()}
    entries = []
    for i, entry in enumerate(table.tensors):
        columns = entry.shape[-1] if len(entry.shape) > 1 else 1
        whole_rows = i not in cut or cut[i].sizes[-1] == columns
        blocks = next((k for k in (4, 2) if columns % k == 0 and whole_rows), 1)
        entries.append(replace(entry, blocks=blocks))
    table = replace(table, tensors=tuple(entries))
    table.validate()
    return table


cases = st.tuples(
    st.lists(placed(), min_size=1, max_size=3),
    st.lists(st.lists(st.tuples(view_steps(), operations(), view_steps()), max_size=2), min_size=1),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.integers(8, 300),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)


@settings(max_examples=80, deadline=None)
@given(cases)
def test_what_arrives_is_what_the_loader_makes(case):
    check(*case)


@pytest.mark.soak
@settings(max_examples=5000, deadline=None)
@given(cases)
def test_what_arrives_is_what_the_loader_makes_thousands_of_times(case):
    check(*case)
