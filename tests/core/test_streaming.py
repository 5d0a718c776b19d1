"""Collective iterators of full tensors: order, bounds, and what is refused."""

from __future__ import annotations

import pytest
import torch

import weightwire
from weightwire.errors import ConfigError, TableMismatch, UnsupportedOperation
from weightwire.plugins import registry
from weightwire.sources import WireRules, as_source
from weightwire.streaming import StreamingSource, TensorSpec, refuse_lockstep
from weightwire.tables import build_table

SHAPES = {"embed": (40, 4), "l.1.w": (4, 4), "l.0.w": (4, 4), "norm": (), "head": (0, 4)}


def weights(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


class Export:
    """Yields in any order, out of one buffer, and counts its steps."""

    def __init__(self, names=tuple(SHAPES), seed=0):
        self.names, self.seed, self.steps, self.left = names, seed, 0, 0

    def __call__(self):
        values = weights(self.seed)
        try:
            for name in self.names:
                value = values[name].clone()
                self.steps += 1
                yield name, value
                value.fill_(float("nan"))
        finally:
            self.left += 1


def specs(names=tuple(SHAPES)):
    return {name: TensorSpec(SHAPES[name], torch.float32) for name in names}


def opened(source, *, group_bytes=64, ranks=1, rank=0):
    resolved = source.resolve(WireRules())
    table = build_table([resolved.spec] * ranks, group_bytes)
    return table, source.open(table, rank, group_bytes)


def collected(table, stream):
    """What one rank could stage: the parts of each group, copied at once."""
    found = {entry.name: torch.full(entry.shape, -1.0) for entry in table.tensors}
    for group, members in enumerate(table.groups):
        for name, tensor in stream.take(group, [table.tensors[i].name for i in members.tensors]):
            part = table.part(group, table.index()[name])
            box = tuple(slice(o, o + n) for o, n in zip(part.offsets, part.sizes, strict=True))
            found[name][box] = tensor[box]
    stream.finish()
    return found


def test_tensors_larger_than_a_group_are_held_while_their_parts_go():
    export = Export()
    table, stream = opened(StreamingSource(export, specs=specs()))
    assert len([group for group in table.groups if 0 in group.parts]) == 10
    found = collected(table, stream)
    for name, value in weights().items():
        assert torch.equal(found[name], value), name
    assert export.steps == len(SHAPES)


def test_specs_are_taken_on_a_first_pass_and_give_the_order():
    export = Export()
    source = StreamingSource(export)
    table, stream = opened(source)
    assert [entry.name for entry in table.tensors] == list(SHAPES)  # not by layer
    assert export.steps == len(SHAPES)
    collected(table, stream)
    source.resolve(WireRules())
    assert export.steps == 2 * len(SHAPES)


def test_what_comes_early_is_held_if_it_fits():
    order = ("norm", "l.0.w", "l.1.w", "embed", "head")
    table, stream = opened(StreamingSource(Export(order), specs=specs()), group_bytes=256)
    found = collected(table, stream)
    for name, value in weights().items():
        assert torch.equal(found[name], value), name


def test_what_comes_early_and_does_not_fit_is_an_error_naming_it_on_every_rank():
    order = ("l.0.w", "l.1.w", "embed", "norm", "head")
    for rank in (0, 1):
        source = StreamingSource(Export(order), specs=specs())
        table, stream = opened(source, group_bytes=64, ranks=2, rank=rank)
        with pytest.raises(
            ConfigError, match=r"tensor 'l.1.w' is yielded before its turn.*128 of 64"
        ):
            collected(table, stream)


def test_a_rank_holds_nothing_of_what_others_serve():
    order = ("norm", "l.0.w", "l.1.w", "embed", "head")
    source = StreamingSource(Export(order), specs=specs())
    table, stream = opened(source, group_bytes=256, ranks=5, rank=1)
    list(stream.take(0, ["embed"]))
    held = {name for name, tensor in stream._early.items() if tensor is not None}
    assert held == {e.name for e in table.tensors if e.shards[0].owner == 1} & {*order[:3]}


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (("embed", "l.1.w", "l.0.w", "norm"), "ended without tensor 'head'"),
        (("embed", "l.1.w", "l.1.w", "l.0.w", "norm", "head"), "yields tensor 'l.1.w' twice"),
        ((*SHAPES, "embed"), "yields tensor 'embed' twice"),
    ],
)
def test_an_iterator_that_yields_other_names_than_announced(order, message):
    table, stream = opened(StreamingSource(Export(order), specs=specs()))
    with pytest.raises(TableMismatch, match=message):
        collected(table, stream)


def test_names_shapes_and_shards_that_were_not_announced():
    def stream_of(name, tensor):
        given = {"w": TensorSpec((2,), torch.float32)}
        return opened(StreamingSource(lambda: [(name, tensor)], specs=given))

    with pytest.raises(TableMismatch, match="'v' and had not announced it"):
        collected(*stream_of("v", torch.zeros(2)))
    with pytest.raises(TableMismatch, match=r"'w' is torch.float32\[3\] now, and was announced as"):
        collected(*stream_of("w", torch.zeros(3)))
    with pytest.raises(ConfigError, match="'w' is a list, not a tensor"):
        collected(*stream_of("w", [1.0, 2.0]))


def test_what_is_no_iterator_of_pairs_is_refused_by_name():
    with pytest.raises(ConfigError, match="stream is a int: give a function"):
        StreamingSource(5)
    for stream, message in (
        (lambda: None, "stream returned a NoneType: return an iterator"),
        (lambda: [1], "yields a int that is no pair"),
        (lambda: [("w", torch.zeros(2), 3)], "yields a tuple that is no pair"),
    ):
        with pytest.raises(ConfigError, match=message):
            StreamingSource(stream).resolve(WireRules())


def test_an_iterator_that_is_left_is_closed():
    closed = []

    def export():
        try:
            yield "a", torch.ones(2)
            yield "b", torch.ones(2)
        finally:
            closed.append(True)

    table, stream = opened(StreamingSource(export, specs=dict(export())))
    closed.clear()
    next(iter(stream.take(0, [table.tensors[0].name])))
    stream.close()
    assert closed == [True]


def test_ties_are_passed_over_and_empty_iterators_refused():
    def export():
        yield "a", torch.ones(2)
        yield "b", torch.ones(2)

    table, stream = opened(StreamingSource(export, ties={"b": "a"}))
    assert table.ties == {"b": "a"}
    assert collected(table, stream)["a"].tolist() == [1, 1]
    with pytest.raises(ConfigError, match="tie 'c' -> 'x'"):
        StreamingSource(export, ties={"c": "x"}).resolve(WireRules())
    with pytest.raises(ConfigError, match="its iterator yields nothing"):
        StreamingSource(list).resolve(WireRules())


def test_versions_follow_each_other_and_a_failed_pass_can_be_repeated(tmp_path):
    export = Export()
    target = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in SHAPES.items()}
    url = f"file://{tmp_path / 'session'}"
    with (
        weightwire.open_sender(
            "filesystem",
            session=url,
            source=StreamingSource(export),
            group_bytes=64,
            wire_dtype="bfloat16",
            verify="full",
        ) as sender,
        weightwire.open_receiver(
            "filesystem", session=url, target=target, receiver_id="r0"
        ) as receiver,
    ):
        for version in (1, 2):
            export.seed = version
            sender.send(version)
            receiver.receive(timeout=30)
            for name, value in weights(version).items():
                assert torch.equal(target[name], value.bfloat16()), name
        export.names = ("embed", "norm")
        with pytest.raises(TableMismatch, match=r"ended without tensor 'l\.0\.w'"):
            sender.send(3)
        assert export.left == 4  # the first pass, two versions, and this one
        export.names = tuple(SHAPES)
        sender.send(3)
        assert receiver.receive(timeout=30).version == 3


def test_a_stream_of_several_ranks_over_a_collective_backend_is_refused():
    """The iterator's collectives and the backend's groups could wait for each other."""
    source = StreamingSource(lambda: iter([("w", torch.zeros(2))]))
    collective, pull = registry().backend("nccl"), registry().backend("memory")
    refuse_lockstep(source, collective, 1)
    refuse_lockstep(source, pull, 4)
    refuse_lockstep(as_source({"w": torch.zeros(2)}), collective, 4)
    with pytest.raises(UnsupportedOperation, match=r"on 4 trainer ranks and backend 'nccl', whose"):
        refuse_lockstep(source, collective, 4)
