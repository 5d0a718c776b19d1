from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import filesystem_rig as rig
import pytest
from pydantic import ValidationError

from weightwire.contract import API, Backend
from weightwire.errors import ConfigError
from weightwire_filesystem import FilesystemBackend, FilesystemConfig, plugin


def test_the_plugin_describes_the_backend():
    backend = plugin.weightwire_describe_backend()
    assert isinstance(backend, Backend)
    assert (backend.name, backend.api) == ("filesystem", API)
    backend.probe()


def test_importing_the_plugin_imports_neither_safetensors_nor_transports():
    code = (
        "import sys, weightwire_filesystem.plugin; "
        "print([m for m in ('safetensors', 'vllm', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "options",
    [
        {"file_mode": "rw"},
        {"file_mode": "0999"},
        {"keep": 0},
        {"threads": 0},
        {"files_per_rank": 0},
        {"visible_within": -1},
        {"unknown": 1},
    ],
)
def test_wrong_options_are_refused(options):
    with pytest.raises(ValidationError, match=next(iter(options))):
        FilesystemConfig(**options)


def test_without_a_directory_the_option_is_named(tmp_path):
    context = replace(rig.context(tmp_path), config=FilesystemConfig())
    for opener in (FilesystemBackend().open_sender, FilesystemBackend().open_receiver):
        with pytest.raises(ConfigError, match="`directory`"):
            opener(context)


def test_versions_lie_in_the_session_by_default(tmp_path):
    session = tmp_path / "session"
    context = replace(rig.context(tmp_path), config=FilesystemConfig(), session_dir=session)
    FilesystemBackend().open_sender(context).close()
    assert (session / "versions").is_dir()


def test_a_file_in_place_of_the_directory(tmp_path):
    path = tmp_path / "file"
    path.write_text("x")
    with pytest.raises(ConfigError, match="directory"):
        FilesystemBackend().open_sender(rig.context(path / "versions"))


def test_checkpoint_files_of_a_directory_leave_weights_out(open_sender, versions, tmp_path):
    given = tmp_path / "given"
    (given / "nested").mkdir(parents=True)
    for name in (
        "config.json", "tokenizer.json", "model.safetensors", "model.safetensors.index.json",
        "pytorch_model.bin", "weightwire.json", ".hidden", "nested/x.json",
    ):  # fmt: skip
        (given / name).write_text("{}")
    tensors = rig.weights(rows=2)
    table = rig.make_table(tensors)
    rig.send(open_sender(table, checkpoint_files=given), table, tensors, 1)
    beside = {path.name for path in (versions / "v00000001-i1-a1").iterdir()}
    assert {name for name in beside if not name.startswith("model")} == {
        "config.json", "tokenizer.json", "weightwire.json",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["missing.json"], "readable"),
        (["model.safetensors"], "named like weights"),
        (["weightwire.json"], "named like weights"),
        (["a/config.json", "b/config.json"], "twice"),
    ],
)
def test_checkpoint_files_that_cannot_be_used(open_sender, tmp_path, names, problem):
    for name in ("a/config.json", "b/config.json", "model.safetensors", "weightwire.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError, match=problem):
        open_sender(checkpoint_files=[tmp_path / name for name in names])


def test_checkpoint_links_are_followed(open_sender, versions, tmp_path):
    """Snapshots in a Hugging Face cache are links."""
    (tmp_path / "blob").write_text("{}")
    given = tmp_path / "snapshot"
    given.mkdir()
    (given / "config.json").symlink_to("../blob")
    tensors = rig.weights(rows=2)
    table = rig.make_table(tensors)
    rig.send(open_sender(table, checkpoint_files=given), table, tensors, 1)
    copied = versions / "v00000001-i1-a1" / "config.json"
    assert not copied.is_symlink()
    assert copied.read_text() == "{}"


def test_closing_twice_ends_the_threads(open_sender, versions: Path):
    import threading

    tensors = rig.weights()
    table = rig.make_table(tensors)
    before = threading.active_count()
    sender = open_sender(table, threads=4)
    rig.send(sender, table, tensors, 1)
    sender.close()
    sender.close()
    assert threading.active_count() == before
