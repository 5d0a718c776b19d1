"""What makes a directory of safetensors files a Hugging Face checkpoint."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from weightwire.errors import ConfigError
from weightwire_filesystem.manifest import MANIFEST_NAME

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightwire.table import TensorTable
    from weightwire_filesystem.config import FilesystemConfig
    from weightwire_filesystem.layout import Layout

__all__ = ["collect_checkpoint_files", "index_bytes"]

_WEIGHTS = {
    ".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".ot", ".pt", ".pth", ".safetensors"
}  # fmt: skip
_MAX_NBYTES = 1 << 30


def collect_checkpoint_files(config: FilesystemConfig) -> list[Path]:
    """The files to put beside the weights, as ``checkpoint_files`` says.

    A directory gives its files but for weights, their indices, hidden files and
    subdirectories; files that are named one by one must all be usable.

    Raises:
        ConfigError: one is missing, unreadable, too large, or named like a weights file.
    """
    option = config.checkpoint_files
    if option is None:
        return []
    if isinstance(option, Path):
        if option.is_dir():
            chosen = [path for path in sorted(option.iterdir()) if _is_wanted(path)]
        else:
            chosen = [option]
            _refuse_weights(chosen)
    else:
        chosen = list(option)
        _refuse_weights(chosen)
    names: set[str] = set()
    for path in chosen:
        if not path.is_file() or not os.access(path, os.R_OK):
            raise ConfigError(f"checkpoint file {path} isn't a readable file: mend the option")
        if path.stat().st_size > _MAX_NBYTES:
            raise ConfigError(f"checkpoint file {path} is larger than 1 GiB: leave it out")
        if path.name in names:
            raise ConfigError(f"checkpoint file name {path.name} is given twice: leave one out")
        names.add(path.name)
    return [path.absolute() for path in chosen]


def _is_wanted(path: Path) -> bool:
    return path.is_file() and not path.name.startswith(".") and not _is_weights(path.name)


def _is_weights(name: str) -> bool:
    return Path(name).suffix in _WEIGHTS or name.endswith(".index.json") or name == MANIFEST_NAME


def _refuse_weights(paths: Sequence[Path]) -> None:
    for path in paths:
        if _is_weights(path.name) or path.name.startswith("."):
            raise ConfigError(
                f"checkpoint file {path} is named like weights, an index or a hidden file: "
                "weightwire writes those itself; leave it out"
            )


def index_bytes(table: TensorTable, layout: Layout) -> bytes:
    """Content of ``model.safetensors.index.json``; aliases aren't in it, as in any checkpoint."""
    weight_map = {
        entry.name: layout.files[place.file].name
        for entry, place in zip(table.tensors, layout.places, strict=True)
    }
    content = {"metadata": {"total_size": table.nbytes}, "weight_map": weight_map}
    return json.dumps(content, indent=2, ensure_ascii=False).encode()
