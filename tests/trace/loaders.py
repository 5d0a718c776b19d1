"""Tables, traces and replays of small loaders."""

from __future__ import annotations

import torch
from msgspec.structs import replace

from weightwire.cuts import Cuts
from weightwire.grouping import make_groups
from weightwire.table import Group, Shard, TensorEntry, TensorTable, dtype_name
from weightwire.trace import LazyWeight, Recorder, Run, compile_tape


def table_of(weights, groups=None, *, budget=None, blocks=1):
    """A table of one trainer rank; with a budget, tensors larger than it are cut."""
    entries = tuple(
        TensorEntry(
            name,
            tuple(w.shape),
            dtype_name(w.dtype),
            (Shard(0, (0,) * w.dim(), tuple(w.shape)),),
            blocks if w.dim() > 1 and w.shape[-1] % blocks == 0 else 1,
        )
        for name, w in weights.items()
    )
    index = {name: i for i, name in enumerate(weights)}
    if budget is not None:
        made = make_groups(entries, budget)
        cut = {i for g in made for i, p in g.parts.items() if p.sizes[-1:] != entries[i].shape[-1:]}
        entries = tuple(replace(e, blocks=1) if i in cut else e for i, e in enumerate(entries))
    else:
        groups = groups or [[name] for name in weights]
        made = tuple(Group(tuple(index[name] for name in group)) for group in groups)
    table = TensorTable(1, entries, made)
    table.validate()
    return table


def trace(load, destinations, weights):
    stand_ins = {key: torch.empty_like(t, device="meta") for key, t in destinations.items()}
    recorder = Recorder(stand_ins)
    lazy = [LazyWeight(name, tuple(w.shape), w.dtype) for name, w in weights.items()]
    with torch.no_grad():
        handed = recorder.hand_out(lazy)
        with recorder:
            load(stand_ins, handed)
    for key, tensor in stand_ins.items():
        recorder.check_binding(key, tensor)
    return recorder.tape


def replay(tape, table, destinations, weights, *, poison=True):
    program = compile_tape(tape, table)
    run = Run(program, destinations.__getitem__, torch.device("cpu"))
    cuts = Cuts(table)
    for group in range(len(table.groups)):
        arrived = {}
        for region in program.regions:
            if cuts.group_of(region) == group:
                whole = weights[table.tensors[region.tensor].name]
                box = tuple(
                    slice(o, o + n) for o, n in zip(region.offsets, region.sizes, strict=True)
                )
                arrived[region] = whole[box].clone(memory_format=torch.contiguous_format)
        if arrived:
            run.feed(group, arrived)
        for buffer in arrived.values() if poison else ():
            buffer.view(-1).view(torch.uint8).fill_(0xFF)
    run.finish()
    assert not run.held
    return program


def same(load, destinations, weights, groups=None):
    """Replay equals the loader, from equal and from other starting values."""
    expected = {key: tensor.clone() for key, tensor in destinations.items()}
    with torch.no_grad():
        load(expected, iter([(name, w.clone()) for name, w in weights.items()]))
    got = {key: tensor.clone() for key, tensor in destinations.items()}
    tape = trace(load, destinations, weights)
    program = replay(tape, table_of(weights, groups), got, weights)
    for key in expected:
        assert torch.equal(got[key], expected[key]), key
        assert got[key].dtype == expected[key].dtype
    return tape, program


def slices(region):
    return tuple(slice(o, o + n) for o, n in zip(region.offsets, region.sizes, strict=True))


def rand(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype)
