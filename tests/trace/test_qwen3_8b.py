"""What a rank of a TP=2 engine pulls at Qwen3-8B's shapes, in bytes and descriptors; no weights."""

from __future__ import annotations

import math
import tracemalloc

import pytest
import torch

from weightwire.blocks import ANY
from weightwire.cuts import Cuts
from weightwire.layout import count_reads
from weightwire.pipeline import FetchPlan
from weightwire.routes import Served, route
from weightwire.sources import Spec
from weightwire.table import Region, Shard, TensorEntry
from weightwire.tables import build_table
from weightwire.trace import LazyWeight, Recorder, compile_tape

LAYERS, TP = 36, 2
HIDDEN, INTERMEDIATE, VOCABULARY = 4096, 12288, 151936
QUERY, KEY = 32 * 128, 8 * 128  # heads x head_dim


def checkpoint():
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        yield f"{layer}.input_layernorm.weight", (HIDDEN,)
        yield f"{layer}.self_attn.q_proj.weight", (QUERY, HIDDEN)
        yield f"{layer}.self_attn.k_proj.weight", (KEY, HIDDEN)
        yield f"{layer}.self_attn.v_proj.weight", (KEY, HIDDEN)
        yield f"{layer}.self_attn.q_norm.weight", (128,)
        yield f"{layer}.self_attn.k_norm.weight", (128,)
        yield f"{layer}.self_attn.o_proj.weight", (HIDDEN, QUERY)
        yield f"{layer}.post_attention_layernorm.weight", (HIDDEN,)
        yield f"{layer}.mlp.gate_proj.weight", (INTERMEDIATE, HIDDEN)
        yield f"{layer}.mlp.up_proj.weight", (INTERMEDIATE, HIDDEN)
        yield f"{layer}.mlp.down_proj.weight", (HIDDEN, INTERMEDIATE)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCABULARY, HIDDEN)


STACKED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", QUERY // TP),
    "v_proj": ("qkv_proj", (QUERY + KEY) // TP),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", INTERMEDIATE // TP),
}
"""Of column-parallel layers each rank has a slice of rows, stacked one below the other."""

ROW_PARALLEL = ("o_proj", "down_proj")
"""Of these each rank has a slice of columns."""


def destination(name, shape):
    """Where a tensor goes on one rank: key, first row, and the slice's dimension (or None)."""
    *path, kind, _ = name.split(".")
    if kind in STACKED:
        fused, row = STACKED[kind]
        return ".".join([*path, fused]), row, 0
    return name, 0, {True: 1}.get(kind in ROW_PARALLEL, 0 if len(shape) == 2 else None)


def destinations():
    rows: dict[str, list[int]] = {}
    for name, shape in checkpoint():
        key, _, dim = destination(name, shape)
        cut = [n // TP if d == dim else n for d, n in enumerate(shape)]
        rows[key] = [rows[key][0] + cut[0], *cut[1:]] if key in rows else cut
    return {
        key: torch.empty(shape, dtype=torch.bfloat16, device="meta") for key, shape in rows.items()
    }


def traced(rank):
    stand_ins = destinations()
    recorder = Recorder(stand_ins)
    lazy = [LazyWeight(name, shape, torch.bfloat16) for name, shape in checkpoint()]
    handed = recorder.hand_out(lazy)
    with recorder:
        for name, weight in handed:
            key, row, dim = destination(name, tuple(weight.shape))
            if dim is not None:
                size = weight.shape[dim] // TP
                weight = weight.narrow(dim, rank * size, size)
            stand_ins[key].narrow(0, row, weight.shape[0]).copy_(weight)
    return recorder.tape, sum(tensor.nbytes for tensor in stand_ins.values())


def table_of(trainers, slices=1):
    """FSDP: rows over all trainer ranks."""
    specs = []
    for rank in range(trainers):
        entries = []
        for name, shape in checkpoint():
            step = -(-shape[0] // trainers)
            begin = min(rank * step, shape[0])
            size = min(step, shape[0] - begin)
            inner = (0,) * (len(shape) - 1)
            shard = Shard(0, (begin if size else 0, *inner), (size, *shape[1:]))
            entries.append(TensorEntry(name, shape, "bfloat16", (shard,)))
        specs.append(Spec(tuple(entries), {}))
    return build_table(specs, 256 << 20, column_slices=slices)


@pytest.mark.parametrize("slices", [ANY, TP])
@pytest.mark.parametrize("trainers", [1, 8, pytest.param(64, marks=pytest.mark.soak)])
def test_a_rank_pulls_what_it_needs_in_few_descriptors(trainers, slices):
    table = table_of(trainers, slices)
    pulled = torch.zeros(len(table.tensors), dtype=torch.int64)
    served = Served(table)
    for rank in range(TP):
        tape, needed = traced(rank)
        program = compile_tape(tape, table)
        counts = count_reads(table, program.regions).values()
        assert sum(count.nbytes for count in counts) <= 1.05 * needed
        assert sum(count.descriptors for count in counts) <= 100_000
        # The vectorised planner comes to the same, by other means.
        routes = route(served, program.regions)
        assert int(routes.nbytes.sum()) == sum(count.nbytes for count in counts)
        assert len(routes) <= sum(count.descriptors for count in counts)
        for region in program.regions:
            pulled[region.tensor] += math.prod(region.sizes)
        assert_disjoint(program.regions)
    for entry, elements in zip(table.tensors, pulled.tolist(), strict=True):
        # The two ranks share the matrices, and each has the norms.
        assert elements == entry.numel * (1 if len(entry.shape) == 2 else TP)


def assert_disjoint(regions):
    """No byte is pulled twice: marked in a coarse picture, whose cells divide every border."""
    unit = math.gcd(*(n for r in regions for n in (*r.offsets, *r.sizes)))
    by_tensor = {}
    for region in regions:
        by_tensor.setdefault(region.tensor, []).append(region)
    for found in by_tensor.values():
        ends = [max(r.offsets[d] + r.sizes[d] for r in found) for d in range(len(found[0].sizes))]
        marks = torch.zeros([-(-n // unit) for n in ends], dtype=torch.int8)
        for r in found:
            box = zip(r.offsets, r.sizes, strict=True)
            marks[tuple(slice(o // unit, (o + n) // unit) for o, n in box)] += 1
        assert int(marks.max()) <= 1


def test_row_by_row_the_same_reads_would_shatter():
    tape, _ = traced(0)
    table = table_of(8)
    counts = count_reads(table, compile_tape(tape, table).regions).values()
    assert sum(count.descriptors for count in counts) > 290_000


@pytest.mark.parametrize("trainers", [1, 64])
def test_a_reader_of_whole_matrices_reads_each_shard_in_one_run(trainers):
    table = table_of(trainers)
    regions = [Region.whole(i, entry) for i, entry in enumerate(table.tensors)]
    routes = route(Served(table), FetchPlan(table, regions, pieces=True, blocks=True).regions)
    assert int(routes.nbytes.sum()) == table.nbytes
    parts = sum(len(Cuts(table).parts(i)) for i in range(len(table.tensors)))
    assert len(routes) <= sum(len(entry.shards) for entry in table.tensors) + parts


def test_memory_for_planning_is_bounded_by_what_it_gives():
    table = table_of(64, ANY)
    regions = compile_tape(traced(0)[0], table).regions
    served = Served(table)
    tracemalloc.start()
    try:
        routes = route(served, regions)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Twice while they are put together, and what some regions take on the way.
    assert peak <= 2 * sum(array.nbytes for array in routes.arrays) + (16 << 20)
