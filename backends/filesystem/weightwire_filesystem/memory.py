"""A tensor's own memory as bytes, without a copy."""

from __future__ import annotations

from torch import Tensor

from weightwire.errors import UnsupportedOperation
from weightwire.hostmemory import bytes_of

__all__ = ["tensor_bytes"]


def tensor_bytes(tensor: Tensor, name: str) -> memoryview:
    """The bytes of a contiguous CPU tensor; writing to the view writes to the tensor.

    Raises:
        UnsupportedOperation: the memory isn't contiguous CPU memory.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise UnsupportedOperation(
            f"tensor {name!r} lies on {tensor.device} with strides {tensor.stride()}: the "
            "filesystem backend takes contiguous tensors on the CPU; copy it there first"
        )
    return bytes_of(tensor)
