"""Warm A→B is cold B, bit for bit, on real engines."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
import torch

from weightwire.errors import HandleError, TableMismatch
from weightwire.grouping import make_groups
from weightwire.table import Group
from weightwire_vllm.compare import compare, flip_bit, reachable_tensors, snapshot
from weightwire_vllm.inprocess import on_model
from weightwire_vllm.models import checkpoint_names

TIES = {"lm_head.weight": "model.embed_tokens.weight"}


@pytest.fixture
def payload(payloads):
    return payloads


@pytest.fixture
def settled(lab):
    """The lab, holding A, whatever the test before did."""
    lab.sync(lab.of("A"))
    return lab


def test_updates_equal_cold_engines(settled):
    lab = settled
    assert lab.cold["A"].logprobs != lab.cold["B"].logprobs
    before = addresses(lab)
    for which in ("B", "B", "A", "B"):
        assert lab.sync(lab.of(which), poison=True) is None
        lab.is_(which)
    after = addresses(lab)
    # vLLM makes these two anew whenever it finalises attention.
    moved = {k for k in before if before[k] != after[k] and not k.endswith("_scale_cpu")}
    assert not moved


def addresses(lab):
    tensors = on_model(lab.llm, reachable_tensors)
    return {path: tensor.data_ptr() for path, tensor in tensors.items()}


def test_tensors_may_arrive_in_any_grouping(settled, payload):
    lab = settled
    state = checkpoint_names(lab.models["B"])
    names = sorted(state, key=lambda name: name[::-1])
    sent = payload({name: state[name] for name in names}, lab.ties)
    # One tensor a group: q, k and v, and experts, come apart.
    single = tuple(Group((index,)) for index in range(len(sent.table.tensors)))
    table = msgspec.structs.replace(sent.table, groups=single)
    lab.sync(dataclasses.replace(sent, table=table), poison=True)
    lab.is_("B")


def test_tensors_may_be_cut_over_groups_and_lie_in_blocks(settled, payload):
    """What a layer has of a tensor that is larger than the budget arrives piece by piece."""
    lab = settled
    sent = lab.of("B")
    groups = make_groups(sent.table.tensors, 3000)
    entries = list(sent.table.tensors)
    for i, entry in enumerate(entries):
        parts = [group.parts[i] for group in groups if i in group.parts]
        if len(entry.shape) == 2 and all(part.sizes[1] == entry.shape[1] for part in parts):
            entries[i] = msgspec.structs.replace(entry, blocks=2 - entry.shape[1] % 2)
    table = msgspec.structs.replace(sent.table, tensors=tuple(entries), groups=groups)
    table.validate()
    assert any(group.parts for group in groups)
    assert any(entry.blocks > 1 for entry in entries)
    lab.sync(dataclasses.replace(sent, table=table), poison=True)
    lab.is_("B")


def test_failure_before_any_layer_changes_nothing(settled):
    lab = settled
    assert lab.sync(lab.of("B"), stop_before=0) is True
    lab.is_("A")


@pytest.mark.parametrize("part", [1, 2, "all"])
def test_failure_half_way_leaves_an_engine_that_can_be_synced(settled, part):
    lab = settled
    sent = lab.of("B")
    stop = len(sent.table.groups) if part == "all" else part
    whole = lab.sync(sent, stop_before=stop)
    model = on_model(lab.llm, lambda model: model)
    assert not any(tensor.is_meta for tensor in reachable_tensors(model).values())
    seen = lab.now()  # it generates
    unchanged = compare(seen.snapshot, lab.cold["A"].snapshot).equal
    assert whole == unchanged
    if part == "all":
        assert whole is False
    lab.sync(sent)
    lab.is_("B")


def test_failed_processing_puts_the_layer_back(settled):
    lab = settled
    layer = on_model(lab.llm, lambda model: model.get_submodule("model.layers.1.self_attn.o_proj"))
    before = dict(layer.named_parameters())

    def fails(_layer):
        raise RuntimeError("no memory for packing")

    layer.quant_method.process_weights_after_loading = fails
    try:
        with pytest.raises(RuntimeError, match="packing") as caught:
            lab.sync(lab.of("B"))
        assert lab.target.rollback(caught.value) is False
    finally:
        del layer.quant_method.process_weights_after_loading
    after = dict(layer.named_parameters())
    assert all(after[name] is tensor for name, tensor in before.items())
    lab.now()  # it generates
    lab.sync(lab.of("B"))
    lab.is_("B")


def test_the_loader_never_runs_after_set_up(settled):
    lab = settled
    sent = lab.of("B")
    model = on_model(lab.llm, lambda model: model)
    calls = []
    loaders = {name: getattr(p, "weight_loader", None) for name, p in model.named_parameters()}
    lab.target.plan(sent.table)
    original = type(model).load_weights

    def counted(self, weights):
        calls.append(1)
        return original(self, weights)

    type(model).load_weights = counted
    try:
        assert lab.sync(sent) is None  # it plans once more: one call, on tensors without data
    finally:
        type(model).load_weights = original
    assert len(calls) == 1
    lab.is_("B")
    for name, parameter in model.named_parameters():
        assert getattr(parameter, "weight_loader", None) == loaders[name]
    assert lab.target.path.startswith("traced")


def test_plan_leaves_the_engine_alone(settled):
    lab = settled
    lab.target.plan(lab.of("B").table)
    lab.is_("A")


def test_one_flipped_bit_is_seen(settled):
    lab = settled
    path = on_model(lab.llm, flip_bit)
    found = compare(on_model(lab.llm, snapshot), lab.cold["A"].snapshot)
    assert found.differing == (path,)
    on_model(lab.llm, flip_bit)
    lab.is_("A")


def test_calls_out_of_order_are_refused(settled):
    lab = settled
    with pytest.raises(HandleError):
        lab.target.write(0, {})
    with pytest.raises(HandleError):
        lab.target.commit()
    lab.target.begin(1)
    with pytest.raises(HandleError):
        lab.target.begin(1)
    with pytest.raises(HandleError):
        lab.target.plan(lab.of("A").table)
    assert lab.target.rollback(RuntimeError()) is True
    assert lab.target.rollback(RuntimeError()) is True
    lab.is_("A")


Q = "model.layers.1.self_attn.q_proj.weight"


def without(state, *names):
    return {name: tensor for name, tensor in state.items() if name not in names}


def renamed(state, old, new):
    return {new if name == old else name: tensor for name, tensor in state.items()}


REFUSED = {
    "q_proj without k and v": (
        lambda s: without(s, Q.replace("q_", "k_"), Q.replace("q_", "v_")),
        ["qkv_proj", "k_proj", "v_proj"],
    ),
    "q_proj missing": (lambda s: without(s, Q), [Q]),
    "norm missing": (lambda s: without(s, "model.norm.weight"), ["model.norm.weight"]),
    "misspelt": (lambda s: renamed(s, Q, Q.replace("q_proj", "q_porj")), ["q_porj", Q]),
    "misspelt bias": (lambda s: {**s, Q.replace("weight", "bias"): s[Q][:, 0]}, ["q_proj.bias"]),
    "unknown": (lambda s: {**s, "model.extra.weight": torch.zeros(3)}, ["model.extra.weight"]),
    "too small": (lambda s: {**s, Q: s[Q][:-2]}, [Q, "(126, 64)", "(128, 64)"]),
    "too large": (lambda s: {**s, Q: torch.cat([s[Q], s[Q]])}, [Q, "(256, 64)"]),
    "transposed": (lambda s: {**s, Q: s[Q].t()}, [Q]),
    "broadcast": (
        lambda s: {**s, "model.norm.weight": s["model.norm.weight"][:1]},
        ["model.norm.weight"],
    ),
    "integers": (lambda s: {**s, Q: s[Q].to(torch.int32)}, [Q, "int32"]),
    "fp8 without scales": (lambda s: {**s, Q: s[Q].to(torch.float8_e4m3fn)}, [Q, "float8"]),
}


@pytest.mark.parametrize("reason", REFUSED)
@pytest.mark.parametrize("checkpoint", [True, False], ids=["checkpoint", "dummy"])
def test_refused_tables_change_nothing(lab, payload, reason, checkpoint, monkeypatch):
    if not checkpoint:
        # An engine that was started on dummy weights has no checkpoint to compare with.
        monkeypatch.setattr(lab.target, "_cold", None)
        monkeypatch.setattr(lab.target, "_cold_known", True)
    change, said = REFUSED[reason]
    state = checkpoint_names(lab.models["B"])
    before = on_model(lab.llm, snapshot)
    with pytest.raises(TableMismatch) as caught:
        lab.target.plan(payload(change(state), lab.ties).table)
    for part in said if checkpoint else ():
        assert part in str(caught.value)
    assert compare(before, on_model(lab.llm, snapshot)).equal


def test_ties_are_compared(lab, payload):
    state = checkpoint_names(lab.models["B"])
    if lab.kind == "qwen3-tied":
        untied = {**state, "lm_head.weight": state["model.embed_tokens.weight"].clone()}
        with pytest.raises(TableMismatch, match="tied"):
            lab.target.plan(payload(untied).table)
        # The carrier may have either name, and the alias may be left out.
        swapped = payload(
            renamed(without(state, "lm_head.weight"), TIES["lm_head.weight"], "lm_head.weight"),
            {"model.embed_tokens.weight": "lm_head.weight"},
        )
        lab.sync(swapped)
        lab.is_("B")
        lab.sync(payload(without(state, "lm_head.weight")))
        lab.is_("B")
    else:
        # The engine has two matrices and the trainer one: both get its value.
        lab.sync(payload(without(state, "lm_head.weight"), TIES))
        held = dict(on_model(lab.llm, lambda model: list(model.named_parameters())))
        assert torch.equal(held["lm_head.weight"], held["model.embed_tokens.weight"])
        assert torch.equal(held["lm_head.weight"][:300], state["model.embed_tokens.weight"])


def test_experts_may_be_sent_fused(lab, payload):
    if lab.kind != "qwen3_moe":
        pytest.skip("only mixtures of experts are fused in memory")
    state = dict(lab.models["B"].state_dict())
    assert any(name.endswith("experts.gate_up_proj") for name in state)
    lab.sync(payload(state))
    lab.is_("B")
    name = "model.layers.0.mlp.experts.down_proj"
    with pytest.raises(TableMismatch):
        lab.target.plan(payload({**state, name: state[name][:3]}).table)
    with pytest.raises(TableMismatch):
        lab.target.plan(payload({**state, name: torch.cat([state[name], state[name]], 1)}).table)
