"""The simplest load: each checkpoint tensor is copied into a tensor of its own."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from weightwire.table import TensorTable
from weightwire.trace.program import Program, compile_tape
from weightwire.trace.recorder import Recorder
from weightwire.trace.tape import LazyWeight

__all__ = ["copy_program"]


def copy_program(destinations: Mapping[str, Tensor], table: TensorTable) -> Program:
    """The plan that fills tensors with the checkpoint tensors of their names.

    Args:
        destinations: of the checkpoint tensors' shapes and dtypes.
    """
    stand_ins = {
        name: torch.empty_strided(
            tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="meta"
        )
        for name, tensor in destinations.items()
    }
    recorder = Recorder(stand_ins)
    weights = [
        LazyWeight(tensor.name, tensor.shape, tensor.dtype)
        for tensor in table.checkpoint()
        if tensor.name in destinations
    ]
    with torch.no_grad():
        handed = recorder.hand_out(weights)
        with recorder:
            for name, tensor in handed:
                stand_ins[name].copy_(tensor)
    return compile_tape(recorder.tape, table)
