from __future__ import annotations

import sys

import filesystem_rig as rig
import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from weightwire.cuts import Cuts
from weightwire.errors import TransferError, VerificationError
from weightwire.table import Region
from weightwire_filesystem.boxes import box_rows


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    shape = draw(st.lists(st.integers(0, 6), max_size=5))
    offsets = [draw(st.integers(0, extent)) for extent in shape]
    sizes = [
        draw(st.integers(0, extent - offset)) for extent, offset in zip(shape, offsets, strict=True)
    ]
    return tuple(shape), tuple(offsets), tuple(sizes)


@given(boxes(), st.sampled_from([1, 2, 4, 8]))
@settings(deadline=None, max_examples=500)
def test_runs_of_a_box_are_its_bytes_in_order(spec, itemsize):
    shape, offsets, sizes = spec
    places = np.arange(int(np.prod(shape)) * itemsize).reshape(*shape, itemsize)
    cut = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
    expected = places[cut].reshape(-1).tolist()
    rows = box_rows(shape, offsets, sizes, itemsize)
    got = [
        start + i * rows.stride + byte
        for start in rows.starts.tolist()
        for i in range(rows.count)
        for byte in range(rows.run)
    ]
    assert got == expected


def test_whole_tensors_and_leading_rows_are_one_run():
    for offsets, sizes in (((0, 0, 0), (4, 5, 6)), ((1, 0, 0), (2, 5, 6)), ((3, 2, 1), (1, 1, 4))):
        rows = box_rows((4, 5, 6), offsets, sizes, 2)
        assert (len(rows.starts), rows.count) == (1, 1)


@pytest.fixture(scope="module")
def shaped():
    return {
        "wide": rig.random_tensor("wide", (40, 70_000), torch.bfloat16),
        "tall": rig.random_tensor("tall", (9000, 300), torch.bfloat16),
        "cube": rig.random_tensor("cube", (20, 30, 40), torch.float32),
        "words": rig.random_tensor("words", (2_000_003,), torch.uint8),
    }


BOXES = [
    Region(0, (0, 0), (40, 35_000)),  # far apart: run by run
    Region(0, (3, 69_990), (30, 10)),
    Region(1, (0, 0), (9000, 75)),  # close together: read through, across chunks
    Region(1, (11, 299), (8000, 1)),
    Region(1, (100, 0), (4000, 300)),
    Region(2, (1, 2, 3), (18, 20, 30)),
    Region(2, (0, 0, 39), (20, 30, 1)),
    Region(2, (5, 0, 0), (0, 30, 40)),
    Region(3, (1,), (2_000_001,)),
    Region(3, (1 << 20,), (1,)),
]


def test_tensors_cut_over_several_groups_lie_whole_in_their_files(
    open_sender, open_receiver, versions, shaped
):
    table = rig.make_table(shaped, budget=1_500_001)  # parts that no chunk ends with
    assert len(table.groups) > len(shaped)
    cuts = Cuts(table)
    regions = [piece for region in BOXES for _, piece in cuts.cut(region)]
    offer = rig.send(open_sender(table), table, shaped, 1)
    for wanted in (rig.whole(table), regions):
        receiver = open_receiver(table, wanted)
        receiver.begin(offer)
        got = rig.fetch_all(receiver, table, wanted)
        receiver.finish()
        for i, region in enumerate(wanted):
            tensor = shaped[table.tensors[region.tensor].name]
            assert rig.same_bits(got[i], rig.box_of(tensor, region)), region
    for file in (versions / "v00000001-i1-a1").glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 -- not a mapping
                assert rig.same_bits(opened.get_tensor(name), shaped[name]), name


def test_a_part_that_was_never_put_is_named(open_sender, shaped):
    table = rig.make_table(shaped, budget=1_500_001)
    sender = open_sender(table)
    sender.begin(rig.offer_of(table, 1, [sender]), {})
    part = {0: rig.box_of(shaped["wide"], table.part(0, 0))}
    sender.put(0, part, rig.seal_of(0, part))
    with pytest.raises(TransferError, match="'cube' was never put"):
        sender.finish()
    with pytest.raises(TransferError, match="'wide' isn't due from trainer rank 0"):
        sender.put(0, part, rig.seal_of(0, part))


def test_boxes_of_all_kinds_arrive(open_sender, open_receiver, shaped):
    table = rig.make_table(shaped)
    offer = rig.send(open_sender(table), table, shaped, 1)
    receiver = open_receiver(table, BOXES)
    receiver.begin(offer)
    got = rig.fetch_all(receiver, table, BOXES)
    tensors = list(shaped.values())
    for i, region in enumerate(BOXES):
        assert rig.same_bits(got[i], rig.box(tensors[region.tensor], region)), region


@given(st.data())
@settings(deadline=None, max_examples=40)
def test_any_box_arrives(tmp_path_factory, shaped, data):
    table = rig.make_table(shaped)
    directory = tmp_path_factory.getbasetemp() / "any-box"
    context = rig.context(directory)
    backend = rig.FilesystemBackend()
    offer = rig.Offer(rig.Policy(1, 1), table.digest(), (), (), "full")
    if not (directory / "v00000001-i1-a1").exists():
        sender = backend.open_sender(context)
        sender.set_table(table)
        rig.send(sender, table, shaped, 1)
        sender.close()
    regions = []
    for i, entry in enumerate(table.tensors):
        offsets = tuple(data.draw(st.integers(0, extent - 1)) for extent in entry.shape)
        sizes = tuple(
            data.draw(st.integers(1, extent - offset))
            for extent, offset in zip(entry.shape, offsets, strict=True)
        )
        regions.append(Region(i, offsets, sizes))
    receiver = backend.open_receiver(rig.context(directory, member="replica-0"))
    try:
        receiver.set_plan(table, regions)
        receiver.begin(offer)
        got = rig.fetch_all(receiver, table, regions)
    finally:
        receiver.close()
    for i, (region, tensor) in enumerate(zip(regions, shaped.values(), strict=True)):
        assert rig.same_bits(got[i], rig.box(tensor, region))


@pytest.mark.skipif(sys.platform != "linux", reason="counts bytes with /proc/self/io")
@pytest.mark.parametrize(
    ("region", "most"),
    [
        (Region(0, (10, 0), (20, 4096)), 20 * 8192),
        (Region(1, (0, 0), (300, 128)), 300 * 1024),  # gaps of 768 bytes are read along
        (Region(0, (7, 0), (1, 16)), 32),
    ],
)
def test_only_needed_bytes_are_read(open_sender, versions, in_child, region, most):
    tensors = rig.weights()
    table = rig.make_table(tensors)
    offer = rig.send(open_sender(table), table, tensors, 1)
    said = in_child(
        do="receive",
        directory=str(versions),
        offer=msgspec.json.encode(offer).decode(),
        regions=msgspec.to_builtins([region]),
    )
    assert said["good"] is True
    assert said["fetching"] <= most + 512  # the counter's own file
    assert said["opening"] < 64 << 10


def test_a_shard_that_nobody_here_needs_may_be_missing(open_sender, open_receiver, versions):
    tensors = rig.weights()
    table = rig.make_table(tensors)
    offer = rig.send(open_sender(table), table, tensors, 1)
    index = (versions / "v00000001-i1-a1" / "model.safetensors.index.json").read_text()
    needed = msgspec.json.decode(index)["weight_map"]["model.embed.weight"]
    for path in (versions / "v00000001-i1-a1").glob("*.safetensors"):
        if path.name != needed:
            path.unlink()
    regions = [Region(0, (0, 0), (300, 4096))]
    receiver = open_receiver(table, regions)
    receiver.begin(offer)
    got = rig.fetch_all(receiver, table, regions)
    assert rig.same_bits(got[0], tensors["model.embed.weight"])


def test_damage_in_a_whole_chunk_is_found_by_a_read_that_goes_through_it(
    open_sender, open_receiver, versions, shaped
):
    table = rig.make_table(shaped)
    offer = rig.send(open_sender(table, files_per_rank=1), table, shaped, 1)
    path = versions / "v00000001-i1-a1" / "model-00001-of-00001.safetensors"
    data = bytearray(path.read_bytes())
    tall = data.find(shaped["tall"].reshape(-1).view(torch.uint8)[:64].numpy().tobytes())
    data[tall + (1 << 20) + 12345] ^= 1
    path.write_bytes(data)
    regions = [Region(1, (0, 0), (9000, 75))]
    receiver = open_receiver(table, regions)
    receiver.begin(offer)
    with pytest.raises(VerificationError, match=r"tensor 'tall'.*model-00001.*version 1"):
        rig.fetch_all(receiver, table, regions)
