"""Versions on disk that were torn, cut or changed: refused whole, and the next one works."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from process_rig import Fleet, Side

MakeFleet = Callable[..., Fleet]


def largest(directory: Path) -> Path:
    return max(directory.glob("*.safetensors"), key=lambda path: path.stat().st_size)


def cut_a_shard(directory: Path) -> None:
    path = largest(directory)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 8)


def lose_a_shard(directory: Path) -> None:
    largest(directory).unlink()


def flip_a_byte(directory: Path) -> None:
    path = largest(directory)
    with path.open("r+b") as file:
        file.seek(-5, 2)
        byte = file.read(1)[0]
        file.seek(-5, 2)
        file.write(bytes([byte ^ 1]))


def flip_a_header(directory: Path) -> None:
    with largest(directory).open("r+b") as file:
        file.seek(20)
        file.write(b"X")


def change_a_checksum(directory: Path) -> None:
    marker = directory / "weightwire.json"
    content = json.loads(marker.read_text())
    name = next(name for name, text in content["checksums"].items() if text)
    text = content["checksums"][name]
    content["checksums"][name] = ("0" if text[0] != "0" else "1") + text[1:]
    marker.write_text(json.dumps(content))


def tear_the_marker(directory: Path) -> None:
    marker = directory / "weightwire.json"
    marker.write_bytes(marker.read_bytes()[:-40])


def lose_the_marker(directory: Path) -> None:
    (directory / "weightwire.json").unlink()


def lose_everything(directory: Path) -> None:
    shutil.rmtree(directory)


def link_a_shard_elsewhere(directory: Path) -> None:
    path = largest(directory)
    other = directory.parent.parent / "elsewhere"
    path.rename(other)
    path.symlink_to(other)


DAMAGES = [
    cut_a_shard, lose_a_shard, flip_a_byte, flip_a_header, change_a_checksum, tear_the_marker,
    lose_the_marker, lose_everything, link_a_shard_elsewhere,
]  # fmt: skip
IN_PLACE = {flip_a_byte, change_a_checksum}
"""Found only when the bytes are read: by then they have landed in the target."""


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_version_is_refused_and_the_next_one_arrives(
    make_fleet: MakeFleet, damage: Callable[[Path], None], staged: bool
) -> None:
    fleet = make_fleet("filesystem")
    sender = fleet.sender()
    replica = fleet.receiver(staged=staged, config={"visible_within": 0.5})
    sender.send(1)
    assert replica.receive()[0]["version"] == 1
    sender.send(2)
    path = fleet.version_path(2)
    damage(path)
    error = replica.start("receive", timeout=20.0).error()
    assert "TransferError" in error.kinds
    assert error.kind in ("VerificationError", "TransferError", "PeerLost")
    assert str(path) in error.first or "version 2" in error.first
    assert error.seconds < 10
    if damage in IN_PLACE and not staged:
        assert replica.version is None
        assert replica.tainted is not None
    elif damage not in IN_PLACE:
        assert replica.version == 1
        assert replica.holds(1, 2) == 1
        assert replica.tainted is None
    sender.send(3)
    assert replica.receive(minimum=3)[0]["version"] == 3
    assert replica.holds(1, 2, 3) == 3
    assert replica.tainted is None


@pytest.mark.parametrize("how", ["truncated", "garbage", "other-kind", "emptied"])
@pytest.mark.parametrize("record", ["offer", "outcome", "started"])
def test_a_damaged_record_is_an_error_that_names_it(
    make_fleet: MakeFleet, how: str, record: str
) -> None:
    fleet = make_fleet("filesystem")
    sender = fleet.sender()
    sender.send(1)
    root = fleet.directory / "session/records/versions"
    (path,) = root.rglob(record)
    payload = path.read_bytes()
    other = next(root.rglob("offer" if record != "offer" else "started")).read_bytes()
    path.write_bytes(
        {"truncated": payload[:-9], "garbage": b"\x80\x04.", "other-kind": other, "emptied": b""}[
            how
        ]
    )
    late = fleet.receiver()
    error = late.start("receive", timeout=2.0).error()
    assert "WeightWireError" in error.kinds
    if error.kind != "TransferTimeout":
        assert error.kind == "SessionError"
        assert record in error.first
    assert late.holds(1) == "pristine"
    path.write_bytes(payload)
    assert late.receive()[0]["version"] == 1
    assert late.holds(1) == 1


def keep_honest(replica: Side, *versions: int) -> None:
    if replica.version is not None:
        assert replica.holds(*versions) == replica.version


def test_a_session_deleted_under_its_members_is_an_error_within_the_deadline(
    fleet: Fleet,
) -> None:
    sender, replica = fleet.sender(), fleet.receiver()
    receiving = replica.start("receive")
    sender.send(1, wait="applied")
    receiving.results()
    shutil.rmtree(fleet.directory / "session")
    sent = sender.start("send", version=2, timeout=2.0).error()
    assert "WeightWireError" in sent.kinds
    assert sent.seconds < 2.7
    received = replica.start("receive", timeout=2.0).error()
    assert "WeightWireError" in received.kinds
    assert received.seconds < 2.7
    keep_honest(replica, 1, 2)
