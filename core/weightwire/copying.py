"""Copying many tensors at once, bit for bit."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

__all__ = ["INTEGERS", "copy_all", "leaving_bandwidth", "raw_bytes"]

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype of an element's size, to see its bits."""

_CHUNK = 8 << 20  # bytes: long enough to be worth a look at the list of what is left
_THREAD = 32 << 20  # bytes that are worth another thread
_MOST_THREADS = 8
_ALONE = 16 << 20  # bytes from which a GPU's own copy is faster than a share of a fused kernel

_leaves: ContextVar[bool] = ContextVar("leaves_bandwidth", default=False)


@contextlib.contextmanager
def leaving_bandwidth(leaves: bool) -> Iterator[None]:
    """Within it ``copy_all`` has torch's fused kernel copy what is large on a GPU, too.

    That takes two thirds of the memory's bandwidth.  What another GPU reads or writes meanwhile is
    slowed by copies at all of it.  Copies between layouts, which torch doesn't fuse, are as ever.

    Args:
        leaves: if False, it changes nothing.
    """
    token = _leaves.set(leaves or _leaves.get())
    try:
        yield
    finally:
        _leaves.reset(token)


def copy_all(
    into: Sequence[Tensor],
    of: Sequence[Tensor],
    *,
    non_blocking: bool = False,
    in_chunks: bool = True,
) -> None:
    """``into[i].copy_(of[i])`` for all of them, fused where torch can.

    Where dtypes are equal, bits are copied.  Much plain host memory is copied in chunks
    that threads share: torch splits each tensor into fixed parts and spins until the last one
    is done, which costs several times the copy where another process wants the core (the
    one at the transfer's other end does).  torch's fused kernel for GPUs takes
    floating-point elements through a wider type, which makes one NaN of all NaNs, so
    that these are copied as integers, and reaches two thirds of the device's bandwidth, so
    that what is large is copied by itself, unless bandwidth is to be left to others
    (``leaving_bandwidth``); casts are torch's own.

    Args:
        into: tensors of the shapes of ``of``.
        of: of any dtype and strides.
        in_chunks: False where torch's own threads are at work before and after, as in an
            engine: they spin for a while after each operation, in the way of ours.
    """
    fused: dict[object, tuple[list[Tensor], list[Tensor]]] = {}
    plain: list[tuple[Tensor, Tensor]] = []
    leaves = _leaves.get()
    is_much = in_chunks and sum(to.nbytes for to in into) >= 2 * _THREAD
    with torch.no_grad():
        for to, source in zip(into, of, strict=True):
            alike = is_much and to.dtype == source.dtype and to.shape == source.shape
            if alike and _is_plain_memory(to) and _is_plain_memory(source):
                plain.append((to, source))
                continue
            integer = INTEGERS.get(to.element_size())
            # Lazily conjugated or negated views have other bits than values.
            is_plain = not (source.is_conj() or source.is_neg())
            if to.dtype == source.dtype and integer is not None and is_plain:
                if not leaves and _is_one_span(to, source):
                    to.copy_(source, non_blocking=non_blocking)
                    continue
                _append(fused, to.view(integer), source.view(integer))
            elif to.dtype == source.dtype:
                to.copy_(source, non_blocking=non_blocking)
            else:
                _append(fused, to, source)
        for targets, sources in fused.values():
            torch._foreach_copy_(targets, sources, non_blocking=non_blocking)
    _copy_memory(plain)


def _append(
    fused: dict[object, tuple[list[Tensor], list[Tensor]]], to: Tensor, source: Tensor
) -> None:
    """To a list that torch copies by one kernel: of one pair of dtypes, laid out alike or not."""
    key = to.dtype, source.dtype, to.device, source.device, to.stride() == source.stride()
    targets, sources = fused.setdefault(key, ([], []))
    targets.append(to)
    sources.append(source)


def _is_one_span(to: Tensor, source: Tensor) -> bool:
    """Whether a GPU copies it without a kernel, and is worth being asked for it alone."""
    return (
        to.is_cuda
        and to.nbytes >= _ALONE
        and to.device == source.device
        and to.shape == source.shape
        and to.is_contiguous()
        and source.is_contiguous()
    )


def _is_plain_memory(tensor: Tensor) -> bool:
    """Whether its elements are just bytes at ``data_ptr``, one after another."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg())
    )


def _copy_memory(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    total = sum(to.nbytes for to, _ in pairs)
    chunks = _chunks(pairs)
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                chunk = next(chunks, None)
            if chunk is None:
                return
            ctypes.memmove(*chunk)  # without the GIL

    count = min(torch.get_num_threads(), _MOST_THREADS, total // _THREAD)
    helpers = [
        threading.Thread(target=work, name="weightwire-copy", daemon=True) for _ in range(count - 1)
    ]
    try:
        for helper in helpers:
            helper.start()
        work()
    finally:
        for helper in helpers:
            if helper.ident is not None:
                helper.join()
    for to, _ in pairs:
        increment_version(to)  # for autograd, as copy_ does


def _chunks(pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[tuple[int, int, int]]:
    """To, from and bytes."""
    for to, source in pairs:
        there, here, nbytes = to.data_ptr(), source.data_ptr(), to.nbytes
        for begin in range(0, nbytes, _CHUNK):
            yield there + begin, here + begin, min(_CHUNK, nbytes - begin)


def raw_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's bytes, in place."""
    # One element may say any stride, which view() refuses.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
