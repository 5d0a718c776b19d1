from __future__ import annotations

import pytest
import torch
from torch import nn

from weightwire.errors import ConfigError, TableMismatch, UnsupportedOperation
from weightwire.sources import MappingSource, WireRules, resolve
from weightwire.table import Group, Region, Shard, TensorEntry, TensorTable
from weightwire.tables import build_table
from weightwire.targets import MappingTarget, ModuleTarget, as_target


def table_of(**tensors: torch.Tensor):
    return build_table([resolve(MappingSource(tensors), WireRules()).spec], 1 << 20)


def mismatch(target: MappingTarget, table) -> str:
    with pytest.raises(TableMismatch) as caught:
        target.plan(table)
    return str(caught.value)


def test_the_plan_reads_each_tensor_whole_and_once():
    table = table_of(a=torch.zeros(2, 3), b=torch.zeros(()))
    regions = MappingTarget({"b": torch.zeros(()), "a": torch.zeros(2, 3)}).plan(table)
    assert [(r.tensor, r.offsets, r.sizes) for r in regions] == [(0, (0, 0), (2, 3)), (1, (), ())]


def test_one_misspelt_name_among_thousands_is_found_on_both_sides():
    names = [f"l.{i}.w" for i in range(2000)]
    own = {name: torch.zeros(1) for name in names}
    own["l.7.ww"] = own.pop("l.7.w")
    message = mismatch(MappingTarget(own), table_of(**{n: torch.zeros(1) for n in names}))
    assert message == (
        "the trainer doesn't send 'l.7.ww': correct the name, or name it in untouched=; "
        "the target doesn't have 'l.7.w': correct the name, or name it in unused= "
        "(of weightwire.ModuleTarget or MappingTarget)"
    )


def test_many_wrong_names_are_counted():
    own = {f"x{i}": torch.zeros(1) for i in range(8)}
    assert "'x0', 'x1', 'x2', 'x3', 'x4' and 3 more" in mismatch(
        MappingTarget(own), table_of(w=torch.zeros(1))
    )


def test_unused_and_untouched_patterns_allow_exactly_what_they_name():
    target = MappingTarget(
        {"w": torch.zeros(1), "cache.k": torch.ones(1)}, unused=["v_head.*"], untouched=["cache.*"]
    )
    sent = {"w": torch.zeros(1), "v_head.w": torch.zeros(1)}
    assert [r.tensor for r in target.plan(table_of(**sent))] == [0]
    assert "the target doesn't have 'other'" in mismatch(
        target, table_of(**sent, other=torch.zeros(1))
    )


def test_a_single_pattern_is_a_pattern_and_not_its_letters():
    target = MappingTarget({"w": torch.zeros(1), "kv": torch.ones(1)}, unused="v*", untouched="k*")
    assert [r.tensor for r in target.plan(table_of(w=torch.zeros(1), v=torch.zeros(1)))] == [0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unused": ["v_haed.*"]}, "unused pattern 'v_haed.*' matches no sent tensor: correct it"),
        (
            {"untouched": ["cahce.*"]},
            "untouched pattern 'cahce.*' matches no tensor of the target: correct it",
        ),
    ],
)
def test_a_pattern_that_matches_nothing_is_an_error(options, message):
    target = MappingTarget({"w": torch.zeros(1)}, **options)
    assert mismatch(target, table_of(w=torch.zeros(1))) == message


def test_another_shape_is_an_error_showing_both():
    message = mismatch(
        MappingTarget({"embed": torch.zeros(6, 2)}), table_of(embed=torch.zeros(5, 2))
    )
    assert message == (
        "tensor 'embed' has shape (5, 2) at the trainer and (6, 2) here: pad or cut one side"
    )


def test_equal_element_counts_in_another_shape_are_an_error():
    assert "(2, 3) at the trainer and (3, 2) here" in mismatch(
        MappingTarget({"w": torch.zeros(3, 2)}), table_of(w=torch.zeros(2, 3))
    )


def test_another_dtype_is_an_error_with_its_remedy():
    message = mismatch(
        MappingTarget({"w": torch.zeros(2, dtype=torch.bfloat16)}), table_of(w=torch.zeros(2))
    )
    assert message == (
        "tensor 'w' is float32 on the wire and bfloat16 here: set wire_dtype (and keep_dtype) at "
        "the sender, or change the target"
    )


def test_all_wrong_tensors_are_listed_after_the_first_line():
    own = {name: torch.zeros(3) for name in "abc"}
    lines = mismatch(
        MappingTarget(own), table_of(**{name: torch.zeros(2) for name in "abc"})
    ).splitlines()
    assert lines[0].startswith("tensor 'a' has shape (2,)")
    assert lines[0].endswith("(and 2 more)")
    assert [line[:3] for line in lines[1:]] == ["'b'", "'c'"]


def test_memory_shared_here_but_not_at_the_trainer_is_refused_naming_both():
    shared = torch.zeros(2, 2)
    target = MappingTarget({"embed": shared, "head": shared})
    table = table_of(embed=torch.zeros(2, 2), head=torch.zeros(2, 2))
    assert mismatch(target, table) == (
        "tensors 'embed' and 'head' share memory here and are two at the trainer: "
        "tie them at the trainer, or untie them here"
    )


def test_a_tie_reaches_every_copy_here_and_is_read_once():
    carried = torch.zeros(2)
    table = table_of(embed=carried, head=carried)
    own = {"embed": torch.zeros(2), "head": torch.zeros(2)}
    target = MappingTarget(own)
    (region,) = target.plan(table)
    target.begin(1)
    landing = target.landing(region)
    landing.copy_(torch.tensor([1.0, 2.0]))
    target.write(0, {region: landing})
    assert torch.equal(own["embed"], own["head"])
    assert own["head"].tolist() == [1.0, 2.0]


def test_the_alias_alone_can_be_the_target():
    carried = torch.zeros(2)
    table = table_of(embed=carried, head=carried)
    target = MappingTarget({"head": torch.zeros(2)}, unused=["embed"])
    assert [region.tensor for region in target.plan(table)] == [0]


@pytest.mark.parametrize(
    "own",
    [torch.zeros(8)[::2], torch.zeros(4, 1).expand(4, 2)[:, 0], torch.zeros(2, 4).t()[:, 0]],
    ids=["strided", "column", "transposed"],
)
def test_a_non_contiguous_target_gets_the_logical_values_through_write(own):
    target = MappingTarget({"w": own})
    (region,) = target.plan(table_of(w=torch.zeros(4)))
    target.begin(1)
    if not own.is_contiguous():
        assert target.landing(region) is None
    target.write(0, {region: torch.tensor([1.0, 2.0, 3.0, 4.0])})
    assert own.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_rollback_is_true_until_a_byte_has_changed():
    target = MappingTarget({"w": torch.zeros(8)[::2]})
    (region,) = target.plan(table_of(w=torch.zeros(4)))
    target.begin(1)
    target.landing(region)
    assert target.rollback(RuntimeError())
    target.write(0, {region: torch.ones(4)})
    assert not target.rollback(RuntimeError())
    target.begin(2)
    assert target.rollback(RuntimeError())


def test_memory_handed_out_for_landing_counts_as_changed():
    target = MappingTarget({"w": torch.zeros(4)})
    (region,) = target.plan(table_of(w=torch.zeros(4)))
    target.begin(1)
    target.landing(region)
    assert not target.rollback(RuntimeError())


def test_a_parameter_rebound_between_versions_is_filled_where_it_is_now():
    module = nn.Linear(2, 2, bias=False)
    target = ModuleTarget(module)
    (region,) = target.plan(table_of(weight=torch.zeros(2, 2)))
    module.weight.data = torch.zeros(2, 2)
    target.begin(1)
    assert target.landing(region).data_ptr() == module.weight.data_ptr()


def test_buffers_that_are_not_persistent_are_not_part_of_a_module_target():
    module = nn.BatchNorm1d(2)
    module.register_buffer("scratch", torch.zeros(2), persistent=False)
    assert set(ModuleTarget(module).current()) == set(module.state_dict())


def freed():
    tensor = torch.zeros(2)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("tensor", "kind", "message"),
    [
        (torch.empty(2, device="meta"), ConfigError, "is on the meta device: materialise it first"),
        (torch.eye(2).to_sparse(), ConfigError, "has layout torch.sparse_coo: give a dense tensor"),
        (torch.zeros(1).expand(2), ConfigError, r"of shape .* has elements that may share memory"),
        (
            torch.zeros(8).as_strided((2, 4), (2, 1)),
            ConfigError,
            r"of shape \(2, 4\) and strides \(2, 1\) has elements that may share memory",
        ),
        (freed(), ConfigError, "has no memory, its storage was freed"),
        (nn.UninitializedParameter(), ConfigError, "has no shape yet, it is a lazy module's"),
        (
            torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged),
            ConfigError,
            "is nested: give a dense",
        ),
        ("w", ConfigError, "is a str, not a tensor"),
    ],
    ids=["meta", "sparse", "expanded", "overlapping", "freed", "lazy", "nested", "no tensor"],
)
def test_what_cannot_be_filled_is_refused(tensor, kind, message):
    with pytest.raises(kind, match=f"target tensor 'w' {message}"):
        MappingTarget({"w": tensor}).plan(table_of(w=torch.zeros(2)))


@pytest.mark.parametrize(
    "own",
    [
        torch.zeros(3, 4).T,
        torch.zeros(4, 6)[:, ::2],
        torch.zeros(2, 3, 4).permute(1, 2, 0),
        torch.zeros(0, 4).expand(3, 0, 4),
    ],
    ids=["transposed", "columns", "permuted", "empty"],
)
def test_strides_that_step_over_everything_are_no_sharing(own):
    MappingTarget({"w": own}).plan(table_of(w=torch.zeros(own.shape)))


def test_a_tensor_that_was_freed_since_it_was_planned_is_refused_before_a_byte_moves():
    own = torch.zeros(4)
    target = MappingTarget({"w": own})
    target.plan(table_of(w=torch.zeros(4)))
    target.begin(1)
    own.untyped_storage().resize_(0)
    with pytest.raises(ConfigError, match="target tensor 'w' has no memory"):
        target.begin(2)


def test_a_stride_of_zero_over_one_element_is_no_sharing():
    own = torch.zeros(4).as_strided((1, 4), (0, 1))
    MappingTarget({"w": own}).plan(table_of(w=torch.zeros(1, 4)))


def test_a_dtensor_is_refused_by_name():
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        own = DTensor.from_local(
            torch.zeros(2), DeviceMesh("cpu", [0, 1]), [Shard(0)], run_check=False
        )
        with pytest.raises(UnsupportedOperation, match=r"target tensor 'w' is a DTensor: .*give"):
            MappingTarget({"w": own}).plan(table_of(w=torch.zeros(4)))
    finally:
        torch.distributed.destroy_process_group()


def test_what_is_no_target_is_an_error():
    with pytest.raises(ConfigError, match=r"target is a list: give an nn.Module, a mapping"):
        as_target([torch.zeros(1)])


@pytest.mark.parametrize("change", ["storage", "shape", "other tensor", "nothing"])
def test_a_target_is_planned_again_exactly_when_something_moved(change):
    weight = torch.nn.Parameter(torch.zeros(4, 2))
    mapping = {"weight": weight}
    target = MappingTarget(mapping)
    entry = TensorEntry("weight", (4, 2), "float32", (Shard(0, (0, 0), (4, 2)),))
    target.plan(TensorTable(1, (entry,), (Group((0,)),)))
    target.begin(1)
    before = target.landing(Region.whole(0, entry))
    if change == "storage":
        weight.data = torch.zeros(4, 2)
    elif change == "shape":
        weight.data = torch.zeros(2, 4)
    elif change == "other tensor":
        mapping["weight"] = torch.zeros(4, 2)
    if change == "shape":
        with pytest.raises(TableMismatch, match="shape"):
            target.begin(2)
        return
    target.begin(2)
    after = target.landing(Region.whole(0, entry))
    assert after.data_ptr() == mapping["weight"].data_ptr()
    assert (after.data_ptr() == before.data_ptr()) == (change == "nothing")
