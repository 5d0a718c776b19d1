"""Loaders of every spelling, traced without data and replayed, against the loader itself."""

from __future__ import annotations

import re

import pytest
import torch
from loaders import rand, same, trace
from torch import nn

from weightwire.errors import TableMismatch, TraceError


def test_every_spelling_of_a_copy():
    def load(p, weights):
        for i, (_, w) in enumerate(weights):
            if i == 0:
                p["a"][:] = w
            elif i == 1:
                p["b"].data.copy_(w)
            elif i == 2:
                p["c"].copy_(w.view_as(p["c"]))
            elif i == 3:
                p["d"][1:3, :2] = w.t()
            elif i == 4:
                p["e"].view(-1)[3:9].copy_(w)
            else:
                torch.cat([w, w])  # a value that nobody uses
                p["f"][2:].copy_(w)

    shapes = {"a": (3, 4), "b": (5,), "c": (2, 6), "d": (4, 3), "e": (3, 4), "f": (4, 2)}
    sent = [(3, 4), (5,), (12,), (2, 2), (6,), (2, 2)]
    destinations = {key: rand(*shape) for key, shape in shapes.items()}
    tape, program = same(
        load, destinations, {f"w{i}": rand(*shape) for i, shape in enumerate(sent)}
    )
    assert program.replayed == len(tape.instructions) - 1


def test_what_depends_on_old_values_is_refused():
    def load(p, weights):
        for _, w in weights:
            p["a"][:2].copy_(w)
            p["a"].mul_(2)

    with pytest.raises(TraceError, match=r"parameter 'a'.*held before the load"):
        trace(load, {"a": rand(4)}, {"w": rand(2)})


def test_views_of_cat_casts_and_arithmetic():
    def load(p, weights):
        loaded = dict(weights)
        fused = torch.cat([loaded["q"], loaded["k"]]).view(2, -1, 4)
        p["a"][:].copy_(fused[1])
        p["a"].data.add_(fused[0].to(torch.float64))
        p["b"].copy_((loaded["n"] + 1).contiguous().unsqueeze(0).expand(3, 4))

    destinations = {"a": rand(3, 4, dtype=torch.bfloat16), "b": rand(3, 4)}
    _, program = same(load, destinations, {"q": rand(3, 4), "k": rand(3, 4), "n": rand(4)})
    assert len(program.kept) == 2 - 1  # q waits for k


def test_a_composed_loader_is_replayed_in_order():
    def load(p, weights):
        for name, w in weights:
            if name == "A_log":
                p["A"].copy_(w)
                p["A"].data.copy_(-torch.exp(p["A"].float()))
            else:
                p["D"].copy_(w)

    destinations = {"A": rand(8), "D": rand(8)}
    weights = {"A_log": rand(8), "D": rand(8)}
    tape, _ = same(load, destinations, weights)
    assert len(tape.instructions) > 3


def test_a_destination_transformed_after_parts_from_several_groups():
    def load(p, weights):
        for i, (_, w) in enumerate(weights):
            p["a"][i].copy_(w)
            if i == 1:
                p["a"][:2].mul_(2)
        p["a"].neg_()

    same(load, {"a": rand(3, 4)}, {"x": rand(4), "y": rand(4), "z": rand(4)})
    same(
        load,
        {"a": rand(3, 4)},
        {"x": rand(4), "y": rand(4), "z": rand(4)},
        [["z"], ["y"], ["x"]],
    )


def test_a_loader_that_changes_what_it_is_given():
    def load(p, weights):
        for _, w in weights:
            p["a"].copy_(w)
            w += 1
            p["b"].copy_(w)

    same(load, {"a": rand(4), "b": rand(4)}, {"w": rand(4)})


def test_padding_is_filled_and_factories_replay():
    def load(p, weights):
        for _, w in weights:
            p["a"][:3].copy_(w)
            p["a"][3:].fill_(0)
            pad = torch.zeros(2, 4, device=p["b"].device)
            p["b"].copy_(torch.cat([w, pad]))

    same(load, {"a": rand(5, 4), "b": rand(5, 4)}, {"w": rand(3, 4)})


def test_experts_are_read_once_each():
    def load(p, weights):
        for _, w in weights:
            for expert, part in enumerate(w.unbind(0)[2:4]):
                gate, up = part.chunk(2, 0)
                p["w13"][expert, :3].copy_(gate)
                p["w13"][expert, 3:].copy_(up)

    _, program = same(load, {"w13": rand(2, 6, 4)}, {"w": rand(5, 6, 4)})
    (region,) = program.regions
    assert (region.offsets, region.sizes) == ((2, 0, 0), (2, 6, 4))


def test_several_destinations_read_a_source_once():
    def load(p, weights):
        for _, w in weights:
            p["a"].copy_(w[:3])
            p["b"].copy_(w[1:])

    _, program = same(load, {"a": rand(3, 4), "b": rand(3, 4)}, {"w": rand(4, 4)})
    assert len(program.regions) == 1


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (lambda p, w: p["a"].fill_(w.sum().item()), "reads values"),
        (lambda p, w: p["a"].copy_(w) if bool((w > 0).all()) else None, "reads values"),
        (lambda p, w: p["a"].copy_(w[w > 0]), "a tensor|values"),
        (lambda p, w: p["a"].set_(w), "moves it to other memory"),
        (lambda p, w: p["a"].copy_(torch.rand_like(w)), "random"),
    ],
    ids=["item", "branch", "mask", "set_", "random"],
)
def test_what_needs_values_is_refused_by_name(use, said):
    def my_loader(p, weights):
        for _, w in weights:
            use(p, w)

    with pytest.raises(TraceError) as caught:
        trace(my_loader, {"a": rand(4)}, {"model.w": rand(4)})
    first = str(caught.value).splitlines()[0]
    assert re.search(said, first)
    assert "'model.w'" in first
    assert "lambda" in first


def test_a_parameter_that_is_rebound_is_refused():
    def load(p, weights):
        for _, w in weights:
            p["a"].data = w

    with pytest.raises(TraceError, match=r"'a'.*replaced"):
        trace(load, {"a": nn.Parameter(rand(4))}, {"w": rand(4)})


def test_casts_between_families_and_broadcasts_are_refused():
    def load(p, weights):
        for _, w in weights:
            p["a"].copy_(w)

    with pytest.raises(TableMismatch, match="broadcast"):
        trace(load, {"a": rand(4)}, {"w": rand(1)})
    with pytest.raises(TableMismatch, match="int32"):
        trace(load, {"a": rand(4)}, {"w": torch.zeros(4, dtype=torch.int32)})
