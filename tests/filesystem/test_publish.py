"""What is on disk, when, and with which permissions."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import filesystem_rig as rig
import msgspec
import pytest

from weightwire.contract import Policy
from weightwire.errors import ConfigError, TransferError
from weightwire_filesystem import FilesystemBackend

as_root = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="needs root to mount or to change users"
)


def visible(directory: Path) -> list[str]:
    return sorted(name for name in os.listdir(directory) if not name.startswith("."))


def hidden(directory: Path) -> list[str]:
    return sorted(name for name in os.listdir(directory) if name.startswith("."))


def test_nothing_is_visible_before_publish(open_sender, versions):
    tensors = rig.weights()
    table = rig.make_table(tensors)
    sender = open_sender(table)
    sender.begin(rig.offer_of(table, 1, [sender]), {})
    rig.put_all(sender, table, tensors)
    sender.finish()
    assert visible(versions) == []
    sender.publish()
    assert visible(versions) == ["v00000001-i1-a1"]
    assert hidden(versions) == []
    assert hidden(versions / "v00000001-i1-a1") == []


def test_a_reader_never_meets_half_a_version(open_sender, versions):
    """Whatever a listing shows, at any moment, has its manifest and all its files."""
    tensors = rig.weights(rows=20)
    table = rig.make_table(tensors)
    sender = open_sender(table)
    stop = threading.Event()
    bad: list[str] = []

    def watch() -> None:
        while not stop.is_set():
            for name in visible(versions):
                try:
                    present = os.listdir(versions / name)
                except FileNotFoundError:
                    continue
                if "weightwire.json" not in present or len(present) != 6:
                    bad.append(f"{name}: {present}")

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for version in range(1, 30):
            rig.send(sender, table, tensors, version)
    finally:
        stop.set()
        watcher.join()
    assert bad == []


def test_a_trainer_killed_before_publish_leaves_nothing_visible(versions, open_sender, in_child):
    arguments = {"do": "stage", "directory": str(versions), "version": 5}
    process = subprocess.Popen(
        [sys.executable, rig.__file__, json.dumps(arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "staged\n"
    process.kill()
    process.communicate()
    assert visible(versions) == []
    assert len(hidden(versions)) == 1
    in_child(do="open", directory=str(versions))  # the same incarnation: may be a second rank 0
    assert len(hidden(versions)) == 1
    tensors = rig.weights()
    table = rig.make_table(tensors)
    sender = open_sender(table, incarnation=2)
    assert hidden(versions) == []
    rig.send(sender, table, tensors, 5, incarnation=2)
    assert visible(versions) == ["v00000005-i2-a1"]


def test_only_older_leftovers_of_this_session_are_removed(versions, open_sender):
    from weightwire_filesystem.manifest import staging_name, trash_name, version_name

    versions.mkdir()
    mine = [staging_name(Policy(1, 3), rig.SESSION), trash_name(Policy(1, 2), rig.SESSION, "ab12")]
    others = [
        staging_name(Policy(2, 3), rig.SESSION),
        staging_name(Policy(3, 3), rig.SESSION),
        staging_name(Policy(1, 3), "another session"),
        version_name(Policy(1, 1)),
        ".staging-of-somebody",
        "notes",
    ]
    for name in mine + others:
        (versions / name).mkdir()
        (versions / name / "file").write_text("x")
    open_sender(incarnation=2, rank=1, world_size=2)
    assert sorted(os.listdir(versions)) == sorted(mine + others)
    open_sender(incarnation=2)
    assert sorted(os.listdir(versions)) == sorted(others)


def test_two_ranks_write_one_version(open_sender, open_receiver, versions):
    tensors = rig.weights()
    table = rig.make_table(tensors, owners=[0, 1, 0, 1, 1, 0], world_size=2)
    ranks = [open_sender(table, rank=rank, world_size=2) for rank in range(2)]
    offer = rig.offer_of(table, 1, ranks)
    for rank, sender in enumerate(ranks):
        sender.begin(offer, {})
        rig.put_all(sender, table, tensors, rank)
    for sender in reversed(ranks):
        sender.finish()
    ranks[0].publish()
    receiver = open_receiver(table)
    receiver.begin(offer)
    got = rig.fetch_all(receiver, table, rig.whole(table))
    assert all(rig.same_bits(got[i], t) for i, t in enumerate(tensors.values()))
    manifest = json.loads((versions / "v00000001-i1-a1" / "weightwire.json").read_text())
    assert [record["owner"] for record in manifest["files"]] == [0, 0, 0, 1, 1, 1]
    assert sorted(manifest["seals"]) == ["0", "1"]


def test_a_rank_that_wrote_nothing_is_named(open_sender, versions):
    tensors = rig.weights()
    table = rig.make_table(tensors, owners=[0, 1, 0, 1, 1, 0], world_size=2)
    sender = open_sender(table, world_size=2)
    sender.begin(rig.offer_of(table, 1, [sender]), {})
    rig.put_all(sender, table, tensors)
    sender.finish()
    with pytest.raises(TransferError, match="trainer rank 1 wrote nothing"):
        sender.publish()
    assert visible(versions) == []
    sender.abort(TransferError("as core would"))
    assert hidden(versions) == []


def test_ranks_with_other_options_are_named(open_sender):
    table = rig.make_table(rig.weights(), owners=[0, 1, 0, 1, 1, 0], world_size=2)
    ranks = [open_sender(table, rank=r, world_size=2, files_per_rank=r + 1) for r in range(2)]
    with pytest.raises(ConfigError, match="trainer rank 1 has files_per_rank=2"):
        ranks[0].begin(rig.offer_of(table, 1, ranks), {})


def test_every_rank_cleans_up_after_an_abort(open_sender, versions):
    tensors = rig.weights()
    table = rig.make_table(tensors, owners=[0, 1, 0, 1, 1, 0], world_size=2)
    ranks = [open_sender(table, rank=rank, world_size=2) for rank in range(2)]
    for order in (ranks, ranks[::-1]):
        offer = rig.offer_of(table, 1, ranks)
        for rank, sender in enumerate(ranks):
            sender.begin(offer, {})
            rig.put_all(sender, table, tensors, rank)
        for sender in order:
            sender.abort(TransferError("a receiver failed"))
        assert os.listdir(versions) == []


def test_a_tensor_that_was_never_put_keeps_the_version_back(open_sender, versions):
    tensors = rig.weights()
    table = rig.make_table(tensors)
    sender = open_sender(table)
    sender.begin(rig.offer_of(table, 1, [sender]), {})
    sender.put(0, {0: tensors["model.embed.weight"]}, rig.seal_of(0, {}))
    with pytest.raises(TransferError, match="was never put"):
        sender.finish()
    sender.abort(TransferError("as core would"))
    assert os.listdir(versions) == []


def test_a_published_version_is_never_overwritten(open_sender, versions):
    tensors = rig.weights()
    table = rig.make_table(tensors)
    rig.send(open_sender(table), table, tensors, 1)
    other = open_sender(table, session="another")
    with pytest.raises(TransferError, match="exists already"):
        rig.send(other, table, tensors, 1)
    assert visible(versions) == ["v00000001-i1-a1"]


def test_drop_removes_a_version_and_tolerates_none(open_sender, versions):
    tensors = rig.weights()
    table = rig.make_table(tensors)
    sender = open_sender(table, keep=3)
    assert sender.keep == 3
    rig.send(sender, table, tensors, 1)
    rig.send(sender, table, tensors, 2)
    sender.drop(Policy(1, 1))
    sender.drop(Policy(1, 1))
    sender.drop(Policy(9, 9))
    assert visible(versions) == ["v00000002-i1-a1"]  # at once; the space follows
    sender.close()
    assert os.listdir(versions) == ["v00000002-i1-a1"]


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o777])
@pytest.mark.parametrize(
    ("options", "files", "directories"),
    [
        ({}, 0o600, 0o700),
        ({"file_mode": "0640", "directory_mode": "750"}, 0o640, 0o750),
        ({"file_mode": "0444", "directory_mode": "2755"}, 0o444, 0o2755),
    ],
)
def test_permissions_hold_whatever_the_umask(
    open_sender, versions, tmp_path, umask, options, files, directories
):
    config = tmp_path / "config.json"
    config.write_text("{}")
    tensors = rig.weights(rows=2)
    table = rig.make_table(tensors)
    before = os.umask(umask)
    try:
        sender = open_sender(table, checkpoint_files=[config], **options)
        rig.send(sender, table, tensors, 1)
    finally:
        os.umask(before)
    version = versions / "v00000001-i1-a1"
    assert stat.S_IMODE(versions.stat().st_mode) == directories
    assert stat.S_IMODE(version.stat().st_mode) == directories
    assert {stat.S_IMODE(path.stat().st_mode) for path in version.iterdir()} == {files}
    assert len(list(version.iterdir())) == 7


@as_root
def test_an_engine_under_another_user_needs_wider_modes(in_child):
    with tempfile.TemporaryDirectory() as root:
        Path(root).chmod(0o755)
        tensors = rig.weights()
        table = rig.make_table(tensors)
        for options, outcome in (
            ({}, "permission denied"),
            ({"file_mode": "0644", "directory_mode": "0755"}, True),
        ):
            directory = Path(root) / f"versions-{len(options)}"
            sender = FilesystemBackend().open_sender(rig.context(directory, **options))
            sender.set_table(table)
            offer = rig.send(sender, table, tensors, 1)
            sender.close()
            said = in_child(
                user=65534,
                do="receive",
                directory=str(directory),
                offer=msgspec.json.encode(offer).decode(),
            )
            if outcome is True:
                assert said["good"] is True, said
            else:
                assert outcome in said["message"]
                assert "directory_mode" in said["message"]


@as_root
def test_a_directory_that_cannot_be_written_is_a_config_error(in_child):
    with tempfile.TemporaryDirectory() as root:
        Path(root).chmod(0o755)
        said = in_child(user=65534, do="open", directory=f"{root}/versions")
        assert said["error"] == "ConfigError"
        assert f"{root}/versions" in said["message"]


@pytest.fixture
def small_disk(tmp_path):
    """A filesystem of 3 MiB."""
    point = tmp_path / "small"
    point.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(point)],
        check=False,
        capture_output=True,
        text=True,
    )
    if made.returncode:
        pytest.skip(f"can't mount a tmpfs: {made.stderr.strip()}")
    yield point
    subprocess.run(["umount", str(point)], check=True)


@as_root
def test_a_full_disk_names_path_and_remedy_and_the_next_version_works(
    small_disk, open_sender, open_receiver
):
    directory = small_disk / "versions"
    large, little = rig.weights(rows=500), rig.weights(rows=100)
    table = rig.make_table(large)
    sender = open_sender(table, directory=directory)
    with pytest.raises(TransferError, match=rf"{directory}.*no space is left") as caught:
        rig.send(sender, table, large, 1)
    sender.abort(caught.value)
    assert os.listdir(directory) == []
    table = rig.make_table(little)
    sender.set_table(table)
    offer = rig.send(sender, table, little, 2)
    receiver = open_receiver(table, directory=directory)
    receiver.begin(offer)
    got = rig.fetch_all(receiver, table, rig.whole(table))
    receiver.finish()
    assert all(rig.same_bits(got[i], t) for i, t in enumerate(little.values()))


@as_root
def test_a_disk_that_fills_up_at_publish(small_disk, open_sender, tmp_path):
    directory = small_disk / "versions"
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_bytes(b" " * (3 << 20))
    tensors = rig.weights(rows=50)
    table = rig.make_table(tensors)
    sender = open_sender(table, directory=directory, checkpoint_files=[tokenizer])
    with pytest.raises(TransferError, match="no space is left") as caught:
        rig.send(sender, table, tensors, 1)
    sender.abort(caught.value)
    assert os.listdir(directory) == []


def test_staging_removed_by_hand_is_an_error_and_the_next_version_works(open_sender, versions):
    import shutil

    tensors = rig.weights()
    table = rig.make_table(tensors)
    sender = open_sender(table)
    sender.begin(rig.offer_of(table, 1, [sender]), {})
    rig.put_all(sender, table, tensors)
    shutil.rmtree(versions / hidden(versions)[0])
    with pytest.raises(TransferError, match="deleted meanwhile") as caught:
        sender.finish()
    sender.abort(caught.value)
    rig.send(sender, table, tensors, 2)
    assert visible(versions) == ["v00000002-i1-a1"]


def test_a_passed_deadline_ends_put_and_fetch(open_sender, open_receiver):
    import time

    tensors = rig.weights()
    table = rig.make_table(tensors)
    offer = rig.send(open_sender(table), table, tensors, 1)
    late = open_sender(table, timeout=0.05)
    late.begin(rig.offer_of(table, 2, [late]), {})
    receiver = open_receiver(table, timeout=0.05)
    receiver.begin(offer)
    time.sleep(0.06)
    rig.put_all(late, table, tensors)
    with pytest.raises(TimeoutError):
        late.settle()
    with pytest.raises(TimeoutError):
        rig.fetch_all(receiver, table, rig.whole(table))
