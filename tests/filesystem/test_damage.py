"""A version that isn't what it should be is refused, by name, before a byte lands."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filesystem_rig as rig
import msgspec
import pytest
import torch

from weightwire.contract import Policy
from weightwire.errors import PeerLost, TableMismatch, TransferError, VerificationError
from weightwire.table import Region

SHARD = "model-00002-of-00004.safetensors"


@pytest.fixture
def sent(open_sender, versions):
    """A finished version: its tensors, table, offer and directory."""
    tensors = rig.weights()
    table = rig.make_table(tensors)
    offer = rig.send(open_sender(table), table, tensors, 1)
    return tensors, table, offer, versions / "v00000001-i1-a1"


def edit(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = directory / "weightwire.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def truncate(path: Path, nbytes: int) -> None:
    os.truncate(path, path.stat().st_size - nbytes)


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def as_link(path: Path) -> None:
    elsewhere = path.with_suffix(".moved")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


DAMAGE: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "missing shard": (lambda d: (d / SHARD).unlink(), VerificationError, SHARD),
    "truncated shard": (lambda d: truncate(d / SHARD, 1), VerificationError, SHARD),
    "empty shard": (lambda d: os.truncate(d / SHARD, 0), VerificationError, SHARD),
    "longer shard": (lambda d: os.truncate(d / SHARD, 1 << 24), VerificationError, SHARD),
    "other header": (lambda d: overwrite(d / SHARD, 12, b"#"), VerificationError, SHARD),
    "link in place of a shard": (lambda d: as_link(d / SHARD), VerificationError, SHARD),
    "missing marker": (lambda d: (d / "weightwire.json").unlink(), VerificationError, "finished"),
    "torn marker": (lambda d: truncate(d / "weightwire.json", 9), VerificationError, "torn"),
    "binary marker": (
        lambda d: (d / "weightwire.json").write_bytes(b"\x80\xff" * 50),
        VerificationError,
        "torn",
    ),
    "deep marker": (
        lambda d: (d / "weightwire.json").write_text('{"seals":' * 100_000),
        VerificationError,
        "torn",
    ),
    "huge marker": (lambda d: os.truncate(d / "weightwire.json", 1 << 40), TransferError, "more"),
    "unknown schema": (lambda d: edit(d, lambda m: m.update(schema=99)), VerificationError, "torn"),
    "another session": (
        lambda d: edit(d, lambda m: m.update(session="other")),
        VerificationError,
        "another run",
    ),
    "another policy": (
        lambda d: edit(d, lambda m: m["policy"].update(version=7)),
        VerificationError,
        "version 7",
    ),
    "another table": (
        lambda d: edit(d, lambda m: m.update(table_digest="0" * 32)),
        TableMismatch,
        "table",
    ),
    "path in a file name": (
        lambda d: edit(d, lambda m: m["files"][0].update(name="../../etc/passwd")),
        VerificationError,
        "torn",
    ),
    "other file sizes": (
        lambda d: edit(d, lambda m: m["files"][0].update(nbytes=5)),
        VerificationError,
        "other files",
    ),
    "fewer files": (
        lambda d: edit(d, lambda m: m["files"].pop()),
        VerificationError,
        "other files",
    ),
    "other layout": (
        lambda d: edit(d, lambda m: m.update(files_per_rank=2)),
        VerificationError,
        "other files",
    ),
    "no checksums of a tensor": (
        lambda d: edit(d, lambda m: m["checksums"].pop("steps")),
        VerificationError,
        "'steps'",
    ),
    "too few checksums": (
        lambda d: edit(d, lambda m: m["checksums"].update({"model.embed.weight": "0" * 16})),
        VerificationError,
        "'model.embed.weight'",
    ),
    "checksums that aren't hex": (
        lambda d: edit(d, lambda m: m["checksums"].update(steps="z" * 16)),
        VerificationError,
        "torn",
    ),
    "tiny chunks": (
        lambda d: edit(d, lambda m: m.update(chunk_nbytes=1)),
        VerificationError,
        "torn",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_begin_refuses(sent, open_receiver, kind):
    _, table, offer, directory = sent
    damage, error, text = DAMAGE[kind]
    damage(directory)
    receiver = open_receiver(table)
    with pytest.raises(error) as caught:
        receiver.begin(offer)
    first = str(caught.value).splitlines()[0]
    assert text in first
    assert str(directory) in first


def test_a_wrong_byte_names_tensor_file_and_version(sent, open_receiver):
    _, table, offer, directory = sent
    path = directory / SHARD
    size = path.stat().st_size
    overwrite(path, size - 1, bytes([path.read_bytes()[-1] ^ 1]))
    receiver = open_receiver(table)
    receiver.begin(offer)
    with pytest.raises(VerificationError, match=rf"tensor '.*' in .*{SHARD} of version 1 "):
        rig.fetch_all(receiver, table, rig.whole(table))
    receiver.abort(TransferError("as core would"))


def test_a_receiver_takes_the_next_version_after_a_bad_one(open_sender, open_receiver, versions):
    tensors = rig.weights()
    table = rig.make_table(tensors)
    sender, receiver = open_sender(table), open_receiver(table)
    offer = rig.send(sender, table, tensors, 1)
    path = versions / "v00000001-i1-a1" / SHARD
    overwrite(path, path.stat().st_size - 1, bytes([path.read_bytes()[-1] ^ 1]))
    receiver.begin(offer)
    with pytest.raises(VerificationError) as caught:
        rig.fetch_all(receiver, table, rig.whole(table))
    receiver.abort(caught.value)
    newer = rig.weights(seed=1)
    receiver.begin(rig.send(sender, table, newer, 2))
    got = rig.fetch_all(receiver, table, rig.whole(table))
    assert all(rig.same_bits(got[i], t) for i, t in enumerate(newer.values()))


def test_a_file_that_shrinks_while_it_is_read(sent, open_receiver):
    _, table, offer, directory = sent
    receiver = open_receiver(table)
    receiver.begin(offer)
    for path in directory.glob("*.safetensors"):
        os.truncate(path, 5000)
    with pytest.raises(TransferError, match="truncated meanwhile"):
        rig.fetch_all(receiver, table, rig.whole(table))


def test_a_version_deleted_while_it_is_read_is_read_to_its_end(sent, open_receiver):
    tensors, table, offer, directory = sent
    receiver = open_receiver(table)
    receiver.begin(offer)
    shutil.rmtree(directory)
    got = rig.fetch_all(receiver, table, rig.whole(table))
    assert all(rig.same_bits(got[i], t) for i, t in enumerate(tensors.values()))


def test_a_version_that_is_not_there_says_where_the_sender_writes(sent, open_receiver, tmp_path):
    _, table, offer, directory = sent
    receiver = open_receiver(table, directory=tmp_path / "elsewhere")
    with pytest.raises(TransferError) as caught:
        receiver.begin(offer)
    assert str(directory.parent) in str(caught.value)
    assert "`directory`" in str(caught.value)


def test_a_dropped_version_says_that_newer_ones_are_there(open_sender, open_receiver):
    tensors = rig.weights()
    table = rig.make_table(tensors)
    sender = open_sender(table)
    old = rig.send(sender, table, tensors, 1)
    rig.send(sender, table, tensors, 2)
    sender.drop(Policy(1, 1))
    receiver = open_receiver(table, visible_within=60)  # known at once, all the same
    with pytest.raises(TransferError, match="newer ones are"):
        receiver.begin(old)


def test_an_offer_of_another_table_is_refused(sent, open_receiver):
    tensors, _, offer, _ = sent
    other = rig.make_table(dict(reversed(tensors.items())))
    with pytest.raises(TableMismatch):
        open_receiver(other).begin(offer)


def test_a_malformed_announcement_is_refused(sent, open_receiver, tmp_path):
    _, table, offer, _ = sent
    receiver = open_receiver(table, directory=tmp_path / "elsewhere")
    with pytest.raises(TransferError, match="announced"):
        receiver.begin(msgspec.structs.replace(offer, senders=(b"\x00",)))


def test_a_target_of_another_size_is_refused(sent, open_receiver):
    _, table, offer, _ = sent
    receiver = open_receiver(table, [Region.whole(0, table.tensors[0])])
    receiver.begin(offer)
    with pytest.raises(TransferError, match=r"model\.embed\.weight"):
        receiver.fetch(0, {0: torch.zeros(3)})


def test_a_directory_that_vanishes_between_listing_and_opening_is_a_lost_peer(tmp_path):
    from weightwire_filesystem import files

    with pytest.raises(FileNotFoundError) as caught:
        files.open_for_reading(tmp_path / "gone")
    assert isinstance(files.explain(caught.value, "can't open", tmp_path / "gone"), PeerLost)
