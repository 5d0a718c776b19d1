"""Checkpoint views: recorded from real conversions, carried in tables, composed with loads."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import weightwire
from weightwire.errors import TableMismatch, TraceError
from weightwire.sources import MappingSource, WireRules, as_source, resolve
from weightwire.table import TensorTable
from weightwire.tables import build_table, merge_views
from weightwire.targets import MappingTarget
from weightwire.views import Operand, Step, View, apply_view, record_views, shape_of

sys.path.insert(0, str(Path(__file__).parents[1] / "trace"))

from loaders import replay, trace

FUSED = ("qwen3_moe", "mixtral", "olmoe", "granitemoe", "deepseek_v3", "glm4_moe")


def raw(tensor: torch.Tensor) -> bytes:
    flat = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    return flat.view(-1).view(torch.uint8).numpy().tobytes()


def table_of(source, group_bytes=1 << 14):
    resolved = resolve(as_source(source), WireRules())
    return build_table([resolved.spec], group_bytes, views=resolved.views), resolved


@pytest.fixture(scope="module")
def family():
    families = pytest.importorskip("weightwire_vllm.families", reason="needs transformers")
    pytest.importorskip("transformers")
    return families.family_model


@pytest.mark.parametrize("kind", FUSED)
def test_views_make_what_transformers_saves(family, kind):
    from transformers.core_model_loading import revert_weight_conversion

    model = family(kind, 1)
    saved = revert_weight_conversion(model, dict(model.state_dict()))
    table, resolved = table_of(model)
    assert table.views
    checkpoint = {tensor.name: tensor for tensor in table.checkpoint()}
    assert checkpoint.keys() == saved.keys()
    assert {entry.name for entry in table.tensors} == set(model.state_dict())
    shapes = {name: entry.shape for name, entry in table.named().items()}
    for name, value in saved.items():
        tensor = checkpoint[name]
        assert tensor.shape == tuple(value.shape)
        assert tensor.dtype == value.dtype
        if tensor.view is not None:
            made = apply_view(tensor.view, resolved.tensors.__getitem__)
            assert raw(made) == raw(value)
            assert shape_of(tensor.view, shapes) == tuple(value.shape)
    assert TensorTable.decode(table.encode()) == table


def test_views_are_recorded_once_for_a_layout(family, monkeypatch):
    import transformers.core_model_loading as loading

    source = as_source(family("qwen3_moe", 1))
    first = resolve(source, WireRules())
    monkeypatch.setattr(loading, "revert_weight_conversion", None)
    assert resolve(source, WireRules()).views == first.views


def test_a_wrapped_model_has_its_views(family):
    model = family("mixtral", 1)
    plain = resolve(as_source(model), WireRules())
    wrapped = torch.nn.ModuleDict({"module": model})  # as DistributedDataParallel names it
    assert resolve(as_source(wrapped), WireRules()).views == plain.views


@pytest.mark.parametrize("kind", ["qwen3_moe", "granitemoe"])
def test_a_mapping_of_checkpoint_tensors_is_filled(family, kind, tmp_path):
    from transformers.core_model_loading import revert_weight_conversion

    model = family(kind, 2)
    saved = revert_weight_conversion(model, dict(model.state_dict()))
    table, resolved = table_of(model)
    target = {name: torch.zeros_like(value) for name, value in saved.items()}
    fill(MappingTarget(target), table, resolved.tensors)
    assert all(raw(target[name]) == raw(value) for name, value in saved.items())
    # The trainer's own names work as they always have.
    own = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    fill(MappingTarget(own), table, resolved.tensors)
    assert all(raw(own[name]) == raw(value) for name, value in model.state_dict().items())
    # A checkpoint tensor that is missing or misspelt is named.
    name = next(view.name for view in table.views)
    short = {n: t for n, t in target.items() if n != name}
    with pytest.raises(TableMismatch, match=f"the target doesn't have '{name}'"):
        MappingTarget(short).plan(table)
    with pytest.raises(TableMismatch, match=f"the trainer doesn't send '{name}x'"):
        MappingTarget({**short, f"{name}x": target[name]}).plan(table)
    with pytest.raises(TableMismatch, match=f"'{name}' has shape"):
        MappingTarget({**target, name: target[name][:-1].clone()}).plan(table)


def fill(target, table, tensors):
    regions = target.plan(table)
    target.begin(1)
    for group, members in enumerate(table.groups):
        arrived = {}
        for region in regions:
            if region.tensor in members.tensors:
                box = tuple(
                    slice(a, a + n) for a, n in zip(region.offsets, region.sizes, strict=True)
                )
                arrived[region] = tensors[table.tensors[region.tensor].name][box].clone()
        if arrived:
            target.write(group, arrived)
        for tensor in arrived.values():
            tensor.view(-1).view(torch.uint8).fill_(0xFF)
    target.commit()


def test_stored_versions_hold_checkpoint_tensors(family, tmp_path):
    import transformers

    models = [family("qwen3_moe", seed) for seed in (1, 2)]
    models[0].save_pretrained(tmp_path / "config")
    session = f"file://{tmp_path / 'run'}"
    backend = {"backend": "filesystem", "checkpoint_files": str(tmp_path / "config")}
    with weightwire.open_sender(backend, session=session, source=models[1]) as sender:
        sender.send(1)
    directory = next((tmp_path / "run").rglob("model.safetensors.index.json")).parent
    loaded = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    wanted = models[1].state_dict()
    assert loaded.state_dict().keys() == wanted.keys()
    assert all(raw(value) == raw(wanted[name]) for name, value in loaded.state_dict().items())


# ------------------------------------------------------------------ chains from elsewhere


BASE = View("v", (Operand("w", (Step("select", (0, 1)), Step("slice", (0, 0, 2, 1)))),))
HOSTILE = {
    "unknown source": View("v", (Operand("x"),)),
    "index outside": View("v", (Operand("w", (Step("select", (0, 4)),)),)),
    "dim outside": View("v", (Operand("w", (Step("select", (3, 0)),)),)),
    "slice outside": View("v", (Operand("w", (Step("slice", (1, 0, 7, 1)),)),)),
    "slice backwards": View("v", (Operand("w", (Step("slice", (1, 4, 2, 1)),)),)),
    "no step": View("v", (Operand("w", (Step("slice", (1, 0, 2, 0)),)),)),
    "too few arguments": View("v", (Operand("w", (Step("slice", (1, 0)),)),)),
    "a dim twice": View("v", (Operand("w", (Step("permute", (0, 0, 1)),)),)),
    "grown": View("v", (Operand("w", (Step("reshape", (1 << 40, 1 << 16)),)),)),
    "joined of other shapes": View("v", (Operand("w"), Operand("b")), 0),
    "joined of other dtypes": View("v", (Operand("w"), Operand("i")), 0),
    "joined along no dim": View("v", (Operand("w"), Operand("w")), 5),
    "a path": View("../v", (Operand("w"),)),
    "a tensor's name": View("b", (Operand("w"),)),
}


@pytest.mark.parametrize("wrong", HOSTILE)
def test_chains_that_do_not_fit_are_refused_by_name(wrong):
    tensors = {
        "w": torch.zeros(4, 6, 2),
        "b": torch.zeros(3),
        "i": torch.zeros(4, 6, 2, dtype=torch.int32),
    }
    spec = resolve(MappingSource(tensors), WireRules()).spec
    table = build_table([spec], 64, views=[BASE])
    decoded = {t.name: t.shape for t in TensorTable.decode(table.encode()).checkpoint()}
    assert decoded == {"v": (2, 2), "b": (3,), "i": (4, 6, 2)}
    hostile = msgspec.structs.replace(table, views=(HOSTILE[wrong],))
    with pytest.raises(TableMismatch) as caught:
        TensorTable.decode(hostile.encode())
    assert repr(HOSTILE[wrong].name) in str(caught.value)


@pytest.mark.parametrize(
    "step",
    [["exec", [0]], ["select", [0, -1]], ["select", ["0"]], ["reshape", [1] * 17], ["permute"]],
)
def test_what_is_no_step_is_not_decoded(step):
    spec = resolve(MappingSource({"w": torch.zeros(4, 6)}), WireRules()).spec
    table = msgspec.to_builtins(build_table([spec], 64))
    table["views"] = [["v", [["w", [step]]], 0, []]]
    with pytest.raises(TableMismatch, match="tensor table can't be read"):
        TensorTable.decode(msgspec.msgpack.encode(table))


def test_a_view_twice_is_refused():
    spec = resolve(MappingSource({"w": torch.zeros(4, 6, 2)}), WireRules()).spec
    with pytest.raises(TableMismatch, match="'v' is in the table twice"):
        build_table([spec], 64, views=[BASE, BASE])


def test_ranks_that_make_a_tensor_differently_are_refused():
    other = View("v", (Operand("w", (Step("select", (0, 2)), Step("slice", (0, 0, 2, 1)))),))
    assert merge_views({0: [BASE], 1: [BASE]}) == (BASE,)
    with pytest.raises(TableMismatch, match="'v' is made otherwise on trainer rank 1"):
        merge_views({0: [BASE], 1: [other]})


# ------------------------------------------------------------------ recording


@pytest.mark.parametrize(
    ("convert", "said"),
    [
        (lambda t: {"a": t["w"] * 2}, "mul"),
        (lambda t: {"a": t["w"].to(torch.float64)}, "_to_copy"),
        (lambda t: {"a": t["w"] + t["w"]}, "add"),
        (lambda t: {"a": t["w"].sum(0)}, "sum"),
        (lambda t: {"a": torch.zeros(3)}, "isn't made of"),
        (lambda t: {"a": t["w"].expand(2, 4, 6)}, "expand"),
    ],
)
def test_conversions_that_change_values_are_refused_by_name(convert, said):
    with pytest.raises(TraceError, match=said) as caught:
        record_views({"w": ((4, 6), torch.float32)}, convert)
    assert str(caught.value).startswith(("tensor 'w'", "checkpoint tensor 'a'"))


def test_names_that_stay_need_no_view():
    given = {"w": ((4, 6), torch.float32), "e": ((2, 3), torch.float32)}
    views = record_views(given, lambda t: {"w": t["w"], "f": t["e"], "e": t["e"]})
    assert {view.name for view in views} == {"f", "e"}


chains = st.lists(
    st.tuples(
        st.sampled_from(
            ["chunk", "select", "t", "flat", "contiguous", "unsqueeze", "split", "join", "stack"]
        ),
        st.integers(0, 97),
        st.integers(0, 97),
    ),
    max_size=5,
)


def run_chain(t, other, steps):
    joined = False
    for name, a, b in steps:
        dim = a % t.dim() if t.dim() else 0
        if name == "chunk" and t.dim():
            parts = t.chunk(2, dim)
            t = parts[b % len(parts)].contiguous()
        elif name == "select" and t.dim() and t.shape[dim]:
            t = t.unbind(dim)[b % t.shape[dim]]
        elif name == "t" and t.dim():
            t = t.transpose(dim, b % t.dim())
        elif name == "flat":
            t = t.reshape(-1)
        elif name == "contiguous":
            t = t.contiguous()
        elif name == "unsqueeze" and t.dim() < 5:
            t = t.unsqueeze(b % (t.dim() + 1))
        elif name == "split" and t.dim() and t.shape[dim] % 2 == 0:
            t = t.unflatten(dim, (2, t.shape[dim] // 2))
        elif name in ("join", "stack") and not joined and t.dim():
            joined = True
            mine = other.reshape(-1)[: t.numel()].reshape(t.shape)
            t = torch.cat([t, mine], dim) if name == "join" else torch.stack([mine, t], dim)
    return t


@settings(max_examples=120, deadline=None)
@given(chains, chains.map(lambda c: [s for s in c if s[0] not in ("join", "stack")]))
def test_random_conversions_and_loads_equal_dense_ones(conversion, load):
    weights = {"w": torch.randn(4, 6, 2), "o": torch.randn(4, 6, 4, 2)}

    def convert(tensors):
        return {"c": run_chain(tensors["w"], tensors["o"], conversion), "o": tensors["o"]}

    def loads(destinations, handed):
        for name, tensor in handed:
            if name == "c":
                destinations["p"].copy_(run_chain(tensor, None, load))

    dense = convert(weights)
    value = run_chain(dense["c"].contiguous(), None, load)
    views = record_views({n: (tuple(t.shape), t.dtype) for n, t in weights.items()}, convert)
    spec = resolve(MappingSource(weights), WireRules()).spec
    table = TensorTable.decode(build_table([spec], 1 << 10, views=views).encode())
    checkpoint = {t.name: torch.empty(t.shape, dtype=t.dtype) for t in table.checkpoint()}
    destination = {"p": torch.full_like(value, 7.0, memory_format=torch.contiguous_format)}
    tape = trace(loads, destination, {"c": checkpoint["c"]})
    replay(tape, table, destination, weights)
    assert raw(destination["p"]) == raw(value)


def test_a_view_through_a_load_is_read_as_no_more_than_it_needs():
    # Expert 2's gate, and of that the second half, as a second tensor-parallel rank reads it.
    experts = torch.randn(4, 8, 3)
    views = record_views(
        {"e": ((4, 8, 3), torch.float32)},
        lambda t: {f"{i}.gate": c.squeeze(0) for i, c in enumerate(t["e"].chunk(2, 1)[0].split(1))},
    )
    spec = resolve(MappingSource({"e": experts}), WireRules()).spec
    table = build_table([spec], 1 << 10, views=views)
    destination = {"p": torch.zeros(2, 3)}

    def load(p, handed):
        for _, tensor in handed:
            p["p"].copy_(tensor.narrow(0, 2, 2))

    tape = trace(load, destination, {"2.gate": torch.empty(4, 3)})
    program = replay(tape, table, destination, {"e": experts})
    (region,) = program.regions
    assert (region.offsets, region.sizes) == ((2, 2, 0), (1, 2, 3))
    assert raw(destination["p"]) == raw(experts[2, 2:4])
