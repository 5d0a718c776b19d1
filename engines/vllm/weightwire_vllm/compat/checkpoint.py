"""What a cold load of an engine's own checkpoint would read."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

__all__ = [
    "CheckpointEntry",
    "checkpoint_entries",
]


@dataclass(frozen=True)
class CheckpointEntry:
    """Name, shape and dtype of one tensor in the engine's own checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


_SAFETENSORS_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


def checkpoint_entries(model: nn.Module, model_config: Any) -> list[CheckpointEntry] | None:
    """Headers of the safetensors checkpoint that the engine was started from.

    Returns:
        None when there is no local one (dummy weights, other formats).
    """
    from safetensors import safe_open

    directory = Path(os.fspath(model_config.model))
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        names = set(json.loads(index.read_text())["weight_map"].values())
        files = sorted(directory / Path(name).name for name in names)
    else:
        files = sorted(directory.glob("*.safetensors")) if directory.is_dir() else []
    if not files or not all(file.is_file() for file in files):
        return None
    unused = getattr(model, "is_unused_checkpoint_weight", None)
    entries: list[CheckpointEntry] = []
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (safe_open is not a mapping)
                if unused is not None and unused(name):
                    continue
                view = opened.get_slice(name)
                dtype = _SAFETENSORS_DTYPES.get(view.get_dtype())
                if dtype is None:
                    return None
                entries.append(CheckpointEntry(name, tuple(view.get_shape()), dtype))
    return entries
