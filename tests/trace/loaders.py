"""Tables, traces and replays of small loaders."""

from __future__ import annotations

import torch

from weightwire.table import Group, Shard, TensorEntry, TensorTable, dtype_name
from weightwire.trace import LazyWeight, Recorder, Run, compile_tape


def table_of(weights, groups=None):
    entries = tuple(
        TensorEntry(
            name,
            tuple(w.shape),
            dtype_name(w.dtype),
            (Shard(0, (0,) * w.dim(), tuple(w.shape)),),
        )
        for name, w in weights.items()
    )
    index = {name: i for i, name in enumerate(weights)}
    groups = groups or [[name] for name in weights]
    return TensorTable(
        1, entries, tuple(Group(tuple(index[name] for name in group)) for group in groups)
    )


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
    for group, members in enumerate(table.groups):
        arrived = {}
        for region in program.regions:
            if region.tensor in members.tensors:
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
