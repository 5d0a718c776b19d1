from __future__ import annotations

import pytest
import torch
from torch import nn

from weightwire.errors import ConfigError, TableMismatch
from weightwire.placements import LocalShard
from weightwire.sources import MappingSource, ModuleSource, Spec, WireRules, as_source, resolve
from weightwire.table import Shard as ShardOf
from weightwire.table import TensorEntry
from weightwire.tables import build_table

AS_STORED = WireRules()


def names(resolved) -> list[str]:
    return [entry.name for entry in resolved.spec.entries]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def test_a_module_sends_parameters_and_persistent_buffers_and_ties_once():
    resolved = resolve(ModuleSource(Tied()), AS_STORED)
    assert names(resolved) == ["steps", "embed.weight"]
    assert resolved.spec.ties == {"head.weight": "embed.weight"}


def test_equal_views_of_one_storage_tie_and_other_views_of_it_do_not():
    base = torch.arange(16.0).reshape(4, 4)
    resolved = resolve(
        MappingSource(
            {
                "a": base,
                "same": base.view(4, 4),
                "t": base.t(),
                "flat": base.view(-1),
                "row": base[1],
            }
        ),
        AS_STORED,
    )
    assert resolved.spec.ties == {"same": "a"}
    assert names(resolved) == ["a", "t", "flat", "row"]


def test_empty_tensors_never_tie():
    resolved = resolve(MappingSource({"a": torch.empty(0), "b": torch.empty(0)}), AS_STORED)
    assert names(resolved) == ["a", "b"]
    assert not resolved.spec.ties


def test_a_wire_dtype_casts_floats_only_and_keeps_what_the_patterns_name():
    rules = WireRules("bfloat16", ("*.router.bias",))
    source = MappingSource(
        {
            "l.0.router.bias": torch.zeros(2),
            "l.0.w": torch.zeros(2),
            "l.0.half": torch.zeros(2, dtype=torch.float16),
            "steps": torch.tensor(3),
            "mask": torch.tensor([True]),
        }
    )
    dtypes = {entry.name: entry.dtype for entry in resolve(source, rules).spec.entries}
    assert dtypes == {
        "l.0.router.bias": "float32",
        "l.0.w": "bfloat16",
        "l.0.half": "bfloat16",
        "steps": "int64",
        "mask": "bool",
    }


def test_a_keep_pattern_that_matches_nothing_is_an_error():
    with pytest.raises(ConfigError) as caught:
        resolve(MappingSource({"w": torch.zeros(1)}), WireRules("bfloat16", ("*.ruoter.bias",)))
    assert str(caught.value) == (
        "keep_dtype pattern '*.ruoter.bias' matches no tensor: correct it or take it out"
    )


@pytest.mark.parametrize("dtype", ["int8", "fp32", "bool", ""])
def test_a_wire_dtype_that_is_no_float_is_an_error_listing_the_floats(dtype):
    with pytest.raises(ConfigError, match=f"wire_dtype='{dtype}' isn't a float dtype: use float8"):
        WireRules(dtype)


def test_keep_without_a_wire_dtype_is_an_error():
    with pytest.raises(ConfigError, match="keep_dtype has no effect without wire_dtype: set wire"):
        WireRules(None, ("*",))


@pytest.mark.parametrize(
    ("tensor", "kind", "message"),
    [
        (torch.empty(2, device="meta"), ConfigError, "is on the meta device: materialise it first"),
        (torch.eye(2).to_sparse(), ConfigError, "has layout torch.sparse_coo: give a dense tensor"),
        (
            torch.zeros(1, dtype=torch.complex64),
            TableMismatch,
            "dtype torch.complex64 can't travel",
        ),
        (torch.nn.UninitializedParameter(), ConfigError, "has no shape yet, it is a lazy module's"),
        (
            torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged),
            ConfigError,
            "is nested: give a dense",
        ),
        ([1.0], ConfigError, "is a list, not a tensor"),
    ],
    ids=["meta", "sparse", "complex", "lazy", "nested", "list"],
)
def test_what_holds_no_dense_values_is_refused(tensor, kind, message):
    with pytest.raises(kind, match=message):
        resolve(MappingSource({"w": tensor}), AS_STORED)


@pytest.fixture
def mesh():
    """A mesh of two ranks, of which this process is the first; nothing is ever sent."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield DeviceMesh("cpu", [0, 1])
    finally:
        torch.distributed.destroy_process_group()


def test_a_dtensor_with_a_pending_reduction_is_refused_by_name(mesh):
    from torch.distributed.tensor import DTensor, Partial

    partial = DTensor.from_local(torch.zeros(2), mesh, [Partial()], run_check=False)
    with pytest.raises(ConfigError, match=r"source tensor 'w' has a pending reduction.*redistrib"):
        resolve(MappingSource({"w": partial}), AS_STORED)


def test_a_dtensor_gives_the_box_that_lies_here(mesh):
    from torch.distributed.tensor import DTensor, Replicate, Shard

    local = torch.arange(8.0).view(2, 4)
    columns = DTensor.from_local(
        local, mesh, [Shard(1)], run_check=False, shape=(2, 7), stride=(7, 1)
    )
    whole = DTensor.from_local(local, mesh, [Replicate()], run_check=False)
    resolved = resolve(MappingSource({"columns": columns, "whole": whole}), AS_STORED)
    boxes = {entry.name: (entry.shape, entry.shards[0]) for entry in resolved.spec.entries}
    shape, shard = boxes["columns"]
    assert (shape, shard.offsets, shard.sizes) == ((2, 7), (0, 0), (2, 4))
    shape, shard = boxes["whole"]
    assert (shape, shard.offsets, shard.sizes) == ((2, 4), (0, 0), (2, 4))
    assert torch.equal(resolved.tensors["columns"], local)


def spec_of(name, shape, *box, dtype="float32"):
    return Spec((TensorEntry(name, shape, dtype, (ShardOf(0, *box),)),), {})


def test_boxes_of_the_ranks_are_put_together_and_replicas_are_served_once():
    rows = [spec_of("w", (5, 2), (0, 0), (3, 2)), spec_of("w", (5, 2), (3, 0), (2, 2))]
    table = build_table(rows, 64)
    assert [(s.owner, s.offsets, s.sizes) for s in table.tensors[0].shards] == [
        (0, (0, 0), (3, 2)),
        (1, (3, 0), (2, 2)),
    ]
    hybrid = build_table([*rows, *rows], 64)
    assert len(hybrid.tensors[0].shards) == 2


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([spec_of("w", (4,), (0,), (2,)), spec_of("w", (4,), (0,), (2,))], "hold 2 of 4"),
        ([spec_of("w", (4,), (0,), (3,)), spec_of("w", (4,), (1,), (3,))], "hold 6 of 4"),
        ([spec_of("w", (4,), (0,), (2,)), spec_of("w", (5,), (2,), (3,))], "on trainer rank 1"),
        (
            [
                spec_of("w", (4,), (0,), (2,)),
                spec_of("w", (4,), (2,), (2,), dtype="bfloat16"),
            ],
            "on trainer rank 1",
        ),
    ],
)
def test_boxes_that_do_not_tile_a_tensor_or_disagree_are_refused_by_name(specs, message):
    with pytest.raises(TableMismatch, match=f"tensor 'w'.*{message}"):
        build_table(specs, 64)


def shard(local, shape, offsets):
    return LocalShard(local, shape, offsets)


def test_declared_boxes_are_put_together_and_ranks_may_leave_tensors_out():
    whole = torch.arange(12.0).view(4, 3)
    ranks = [
        {"w": shard(whole[:, :1], (4, 3), (0, 0)), "stage0": torch.ones(2)},
        {"w": shard(whole[:, 1:], (4, 3), (0, 1)), "stage1": torch.ones(3)},
    ]
    specs = [resolve(MappingSource(rank), AS_STORED).spec for rank in ranks]
    table = build_table(specs, 1 << 20)
    assert [(e.name, [s.owner for s in e.shards]) for e in table.tensors] == [
        ("w", [0, 1]), ("stage0", [0]), ("stage1", [1]),
    ]  # fmt: skip


def test_declared_boxes_tie_by_memory_place_and_tensor():
    local = torch.zeros(2, 3)
    source = {
        "a": shard(local, (4, 3), (0, 0)),
        "same": shard(local, (4, 3), (0, 0)),
        "elsewhere": shard(local, (4, 3), (2, 0)),
        "larger": shard(local, (6, 3), (0, 0)),
    }
    assert resolve(MappingSource(source), AS_STORED).spec.ties == {"same": "a"}


@pytest.mark.parametrize(
    "box",
    [
        ((4, 3), (3, 0)),
        ((4, 3), (-1, 0)),
        ((4,), (0,)),
        ((4, 2), (0, 0)),
    ],
)
def test_a_declared_box_outside_its_tensor_is_refused_by_name(box):
    with pytest.raises(ConfigError, match=r"'w': the box of \(2, 3\) at .* doesn't lie in"):
        resolve(MappingSource({"w": shard(torch.zeros(2, 3), *box)}), AS_STORED)


def test_a_tensor_whose_storage_was_freed_is_refused_by_name():
    freed = torch.zeros(4)
    freed.untyped_storage().resize_(0)
    with pytest.raises(ConfigError, match="'w' has no memory, its storage was freed"):
        resolve(MappingSource({"w": freed}), AS_STORED)


def test_an_empty_source_is_an_error():
    with pytest.raises(ConfigError, match="the source has no tensors: is the module empty"):
        resolve(ModuleSource(nn.Identity()), AS_STORED)


def test_a_name_that_reads_as_a_path_is_refused():
    with pytest.raises(TableMismatch, match=r"tensor name '\.\./w' reads as a path"):
        resolve(MappingSource({"../w": torch.zeros(1)}), AS_STORED)


def test_a_parameter_rebound_between_sends_is_read_from_where_it_is_now():
    module = nn.Linear(2, 2)
    source = ModuleSource(module)
    before = resolve(source, AS_STORED)
    module.weight.data = torch.full((2, 2), 7.0)
    after = resolve(source, AS_STORED)
    assert after.tensors["weight"].data_ptr() == module.weight.data_ptr()
    assert after.tensors["weight"].data_ptr() != before.tensors["weight"].data_ptr()
    assert torch.equal(after.tensors["weight"], torch.full((2, 2), 7.0))
    assert build_table([before.spec], 8).digest() == build_table([after.spec], 8).digest()


def test_a_changed_shape_or_a_broken_tie_gives_another_table():
    module = Tied()
    source = ModuleSource(module)
    tied = build_table([resolve(source, AS_STORED).spec], 8).digest()
    module.head.weight = nn.Parameter(module.embed.weight.detach().clone())
    untied = build_table([resolve(source, AS_STORED).spec], 8).digest()
    module.head = nn.Linear(3, 4, bias=False)
    wider = build_table([resolve(source, AS_STORED).spec], 8).digest()
    assert len({tied, untied, wider}) == 3


def test_what_is_no_source_is_an_error():
    with pytest.raises(ConfigError, match=r"source is a list: give an nn.Module, a mapping"):
        as_source([torch.zeros(1)])


def test_owners_are_spread_evenly_and_alike_on_every_rank():
    mapping = {f"w{i}": torch.zeros(i + 1) for i in range(12)}
    specs = [resolve(MappingSource(mapping), AS_STORED).spec] * 3
    tables = [build_table(specs, 64) for _ in range(2)]
    assert tables[0].digest() == tables[1].digest()
    loads = [0, 0, 0]
    for entry in tables[0].tensors:
        (shard,) = entry.shards
        loads[shard.owner] += entry.nbytes
    assert max(loads) - min(loads) <= 12 * 4
    assert sum(loads) == tables[0].nbytes
