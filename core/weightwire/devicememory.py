"""GPU memory that other processes and network cards can reach, straight from the driver.

torch's caching allocator hands out pieces of segments whose kind its settings decide:
expandable ones, and pools of virtual memory such as vLLM's sleep mode, can't be mapped
by CUDA IPC nor registered everywhere.  An arena that is allocated once needs no caching:
``allocate`` asks the driver (``cuMemAlloc``, which is what ``cudaMalloc`` does), whatever
those settings are.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from typing import Any

import torch
from torch import Tensor

__all__ = ["allocate", "is_shareable"]

_PAGE_NBYTES = 2 << 20
"""The driver backs what isn't whole pages of this size by smaller ones, which another GPU reads
at three quarters of the rate (301 rather than 391 GB/s over NVLink, on H200s)."""
_SUCCESS = 0
_OUT_OF_MEMORY = 2
_HANDLE_NBYTES = 64


def allocate(nbytes: int, device: torch.device) -> Tensor:
    """Memory of its own on a CUDA device, in whole pages of the driver.

    It lives as long as a tensor that views it, and is given back to the driver then, not
    to torch's cache.

    Args:
        nbytes: at least 1.
        device: with its number.

    Returns:
        A contiguous uint8 tensor, uninitialised.

    Raises:
        torch.cuda.OutOfMemoryError: there isn't that much.
        RuntimeError: the driver refuses for another reason.
    """
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # the device's context is current from here on
        free, _ = torch.cuda.mem_get_info(device)
        whole = -(-nbytes // _PAGE_NBYTES) * _PAGE_NBYTES
        if free < whole:
            torch.cuda.empty_cache()  # what torch keeps and doesn't use is the driver's again
        address = ctypes.c_uint64()
        code = _driver().cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(whole))
    if code == _OUT_OF_MEMORY:
        raise torch.cuda.OutOfMemoryError(f"{nbytes} bytes on {device} can't be allocated")
    if code != _SUCCESS:
        raise RuntimeError(f"{nbytes} bytes on {device} can't be allocated: CUDA error {code}")
    return torch.as_tensor(_Piece(int(address.value), nbytes, device), device=device)


def is_shareable(address: int, device: torch.device) -> bool:
    """Whether the allocation at an address can be mapped by other processes (CUDA IPC)."""
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()
        handle = ctypes.create_string_buffer(_HANDLE_NBYTES)
        code = _driver().cuIpcGetMemHandle(handle, ctypes.c_uint64(address))
    return bool(code == _SUCCESS)


class _Piece:
    """An allocation, as the CUDA array interface describes it; torch holds on to it."""

    def __init__(self, address: int, nbytes: int, device: torch.device) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }
        # At the interpreter's end the driver takes it back by itself.
        weakref.finalize(self, _free, address, device).atexit = False


def _free(address: int, device: torch.device) -> None:
    with torch.cuda.device(device):
        torch.cuda.synchronize(device)  # nothing that was queued may still touch it
        _driver().cuMemFree_v2(ctypes.c_uint64(address))


@functools.cache
def _driver() -> Any:
    """The CUDA driver's library, which is loaded wherever torch has a device."""
    return ctypes.CDLL("libcuda.so.1")
