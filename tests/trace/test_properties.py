"""Random chains of views and operations: replay equals running the chain on real tensors."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loaders import replay, slices, table_of, trace

from weightwire.trace import Box, Extent
from weightwire.trace.reads import contiguous, cover_boxes, place, read_box


@st.composite
def view_steps(draw):
    """A chain as data: (operation, random numbers), interpreted on whatever shape there is."""
    names = ["narrow", "select", "unsqueeze", "transpose", "step", "chunk", "flatten", "split"]
    count = draw(st.integers(0, 5))
    return [
        (draw(st.sampled_from(names)), draw(st.integers(0, 97)), draw(st.integers(0, 97)))
        for _ in range(count)
    ]


def apply_views(t, steps):
    for name, a, b in steps:
        if name == "unsqueeze":
            t = t.unsqueeze(a % (t.dim() + 1))
            continue
        if t.dim() == 0 or t.numel() == 0:
            continue
        dim = a % t.dim()
        size = t.shape[dim]
        if name == "narrow":
            begin = b % size
            t = t.narrow(dim, begin, 1 + (a * 7 + b) % (size - begin))
        elif name == "select":
            t = t.unbind(dim)[b % size]
        elif name == "transpose":
            t = t.transpose(dim, b % t.dim())
        elif name == "step":
            t = t[(slice(None),) * dim + (slice(b % size, None, 2),)]
        elif name == "chunk":
            parts = t.chunk(2, dim)
            t = parts[b % len(parts)]
        elif name == "flatten" and t.is_contiguous():
            t = t.view(-1)
        elif name == "split" and size % 2 == 0:
            t = t.unflatten(dim, (2, size // 2))
    return t


@st.composite
def operations(draw):
    names = ["contiguous", "double", "neg", "cat", "plus", "bf16"]
    return draw(st.lists(st.sampled_from(names), max_size=3))


def apply_operations(t, names):
    for name in names:
        if name == "contiguous":
            t = t.contiguous()
        elif name == "double":
            t = t.to(torch.float64)
        elif name == "neg":
            t = -t
        elif name == "cat" and t.dim():
            t = torch.cat([t, t])[t.shape[0] // 2 :][: t.shape[0]]
        elif name == "plus":
            t = t + 1
        elif name == "bf16":
            t = t.to(torch.bfloat16)
    return t


shapes = st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=0, max_size=3)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            shapes, st.lists(st.tuples(view_steps(), operations(), view_steps()), max_size=3)
        ),
        min_size=1,
        max_size=3,
    ),
    st.booleans(),
    st.none() | st.integers(8, 120),
    st.sampled_from([1, 2, 3]),
    st.randoms(use_true_random=False),
)
def test_random_loaders(sources, inside_out, budget, blocks, random):
    weights = {
        f"w{i}": torch.randn(shape) if shape else torch.randn(())
        for i, (shape, _) in enumerate(sources)
    }
    chains = {f"w{i}": chains for i, (_, chains) in enumerate(sources)}

    def value(w, chain):
        first, ops, last = chain
        return apply_views(apply_operations(apply_views(w, first), ops), last)

    destinations = {}
    for name, w in weights.items():
        for i, chain in enumerate(chains[name]):
            shape = value(w, chain).shape
            size = (*shape[::-1], 2)
            destinations[f"{name}.{i}"] = torch.randn(size)

    def load(p, loaded):
        for name, w in loaded:
            for i, chain in enumerate(chains[name]):
                target = p[f"{name}.{i}"].select(-1, 1)
                target.permute(tuple(reversed(range(target.dim())))).copy_(value(w, chain))
                if inside_out:
                    target.mul_(3)

    expected = {key: tensor.clone() for key, tensor in destinations.items()}
    load(expected, iter(weights.items()))
    order = list(weights)
    random.shuffle(order)
    groups = [[name] for name in order] if random.random() < 0.5 else [order]
    got = {key: tensor.clone() for key, tensor in destinations.items()}
    table = table_of(weights, groups, budget=budget, blocks=blocks)
    program = replay(trace(load, destinations, weights), table, got, weights)
    for key in expected:
        assert torch.equal(got[key], expected[key]), key
    # No element is read twice.
    for i, name in enumerate(weights):
        count = torch.zeros(weights[name].shape, dtype=torch.int32)
        for region in program.regions:
            if region.tensor == i:
                count[slices(region)] += 1
        assert int(count.max() if count.numel() else 0) <= 1


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from([1, 2, 3, 5, 8]), min_size=1, max_size=4),
    st.lists(view_steps(), min_size=1, max_size=4),
)
def test_reads_hold_their_extents(shape, chains):
    source = torch.arange(math.prod(shape)).view(shape)
    views = [view for view in (apply_views(source, steps) for steps in chains) if view.numel()]
    extents = [Extent.of(view) for view in views]
    boxes = {extent: read_box(shape, extent, 8) for extent in extents}
    whole = contiguous(shape)
    # Every box is treated as if something in it needed one contiguous range: the strictest case.
    found = cover_boxes(shape, boxes.values(), boxes.values())
    for view, extent in zip(views, extents, strict=True):
        holder = next(box for box in found if inside(boxes[extent], box))
        cut = source[tuple(slice(a, b) for a, b in zip(holder.start, holder.stop, strict=True))]
        local = place(whole.sizes, holder, extent)
        buffer = cut.clone(memory_format=torch.contiguous_format)
        assert torch.equal(buffer.as_strided(local.sizes, local.strides, local.offset), view)


def inside(inner: Box, outer: Box):
    return all(a <= b for a, b in zip(outer.start, inner.start, strict=True)) and all(
        a >= b for a, b in zip(outer.stop, inner.stop, strict=True)
    )


def test_regions_of_huge_tensors_are_exact():
    shape = (4, 40_000, 30_000)  # element offsets beyond 2**31
    tensor = torch.empty(shape, device="meta")
    extent = Extent.of(tensor[3].narrow(0, 20_000, 20_000))
    assert extent.offset > 1 << 31
    assert read_box(shape, extent, 2) == Box((3, 20_000, 0), (4, 40_000, 30_000))
