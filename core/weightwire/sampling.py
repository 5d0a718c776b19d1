"""Samples of many tensors at once, read by address: a few passes over all of them.

A model has thousands of tensors, each with memory of its own.  A dozen small operations
for each of them, on a GPU with a synchronisation, would take longer than moving the
bytes does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weightwire.mixing import (
    GAMMA,
    MASK,
    MIX,
    U64,
    mix,
    mix_arrays,
    scramble,
    scramble_array,
    shift,
    u64,
)

__all__ = ["SAMPLES", "Sampler", "sample_places"]

SAMPLES = 256
"""Places per tensor that ``sample`` compares; a smaller tensor is compared whole."""

_ROWS = 4096  # boxes whose intermediate values are held at a time on a GPU
_INTEGERS: dict[int, Any] = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}

I64 = NDArray[np.int64]


def sample_places(total: int, key: int, version: int) -> Tensor:
    """Global flat indices that ``sample`` looks at: int64, distinct, at most ``SAMPLES``."""
    if total <= SAMPLES:
        return torch.arange(total, dtype=torch.int64)
    counter = np.arange(SAMPLES, dtype=np.uint64)
    places = _strata(counter, u64(total), u64(key), version)
    return torch.from_numpy(places.astype(np.int64))


def _strata(counter: U64, total: U64 | np.uint64, key: U64 | np.uint64, version: int) -> U64:
    """A place in stratum ``counter`` of ``SAMPLES`` equal ones: every part is covered."""
    noise = scramble_array(counter * u64(GAMMA) + (key ^ u64(version * MIX)))
    begin = counter * total // u64(SAMPLES)
    end = (counter + u64(1)) * total // u64(SAMPLES)
    return np.asarray(begin + noise % (end - begin), np.uint64)


class Sampler:
    """Sample digests of the same boxes, for one version after another.

    It keeps where boxes lie, and never their memory.

    Args:
        keys: of the tensors, from ``tensor_key``.
        shapes: the tensors' global shapes.
        offsets: the boxes' first indices in them.
    """

    def __init__(
        self,
        keys: Sequence[int],
        shapes: Sequence[tuple[int, ...]],
        offsets: Sequence[tuple[int, ...]],
    ) -> None:
        self._keys, self._shapes, self._offsets = list(keys), list(shapes), list(offsets)
        self._sizes: list[tuple[tuple[int, ...], int]] = []
        self._addresses: list[int] = []
        self._device = torch.device("meta")
        self._parts: list[_OnHost | _OnGpu] = []

    def digests(self, boxes: Sequence[Tensor], version: int) -> list[int]:
        """``box_digest(..., verify="sample")`` of each box.

        Args:
            boxes: contiguous, all on one device.
        """
        addresses = [box.data_ptr() for box in boxes]
        sizes = [(tuple(box.shape), box.element_size()) for box in boxes]
        device = boxes[0].device if boxes else self._device
        if (addresses, sizes, device) != (self._addresses, self._sizes, self._device):
            self._prepare(addresses, sizes, device)
        found = np.zeros(len(boxes), np.uint64)
        for part in self._parts:
            found[part.rows] = part.sums(version)
        digests: list[int] = found.tolist()
        return digests

    def _prepare(
        self,
        addresses: list[int],
        sizes: list[tuple[tuple[int, ...], int]],
        device: torch.device,
    ) -> None:
        self._parts = []
        self._addresses, self._sizes, self._device = addresses, sizes, device
        kinds: dict[tuple[int, int, bool], list[int]] = {}
        for i, (shape, width) in enumerate(sizes):
            if 0 not in shape:
                kinds.setdefault(
                    (width, addresses[i] % width, shape == self._shapes[i]), []
                ).append(i)
        form = _OnHost if device.type == "cpu" else _OnGpu
        for (width, _, whole), rows in kinds.items():
            part = form(
                rows,
                width,
                device,
                np.array([addresses[i] for i in rows], np.int64),
                np.array([self._keys[i] for i in rows], np.int64),
                _padded([self._shapes[i] for i in rows], 1),
                None if whole else _padded([self._offsets[i] for i in rows], 0),
                None if whole else _padded([sizes[i][0] for i in rows], 1),
            )
            self._parts.append(part)


def _padded(points: Sequence[tuple[int, ...]], filler: int) -> I64:
    """By box and dimension; those of fewer dimensions have others of ``filler`` in front."""
    most = max(map(len, points))
    return np.array([(filler,) * (most - len(p)) + tuple(p) for p in points], np.int64).reshape(
        len(points), most
    )


def _strides(shapes: I64) -> I64:
    """Row-major, in elements, by box and dimension."""
    ones = np.ones((len(shapes), 1), np.int64)
    return np.concatenate((np.cumprod(shapes[:, :0:-1], axis=1)[:, ::-1], ones), axis=1)[
        :, : shapes.shape[1]
    ]


class _OnHost:
    """Boxes in host memory, of one element size.

    In numpy, because torch would wake its thread pool for each of these small passes.
    """

    def __init__(
        self,
        rows: list[int],
        width: int,
        device: torch.device,
        addresses: I64,
        keys: I64,
        shapes: I64,
        offsets: I64 | None,
        sizes: I64 | None,
    ) -> None:
        self.rows = np.array(rows)
        self._keys = keys.view(np.uint64)
        self._wide = width == 8
        first = int(addresses.min())
        # What lies between the boxes is within the array's bounds, and never read.
        self._begins = (addresses - first) // width
        numel = (shapes if sizes is None else sizes).prod(axis=1)
        self._memory = _host_memory(first, int((self._begins + numel).max()), width)
        self._total = shapes.prod(axis=1).astype(np.uint64)
        self._counts = np.minimum(self._total, SAMPLES).astype(np.int64)
        self._shapes, self._offsets, self._sizes = shapes, offsets, sizes

    def sums(self, version: int) -> U64:
        counts = self._counts
        box = np.repeat(np.arange(len(counts)), counts)
        counter = np.arange(len(box)) - np.repeat(np.cumsum(counts) - counts, counts)
        index = counter.astype(np.uint64)  # small tensors are taken whole
        large = np.flatnonzero((self._total > SAMPLES)[box])
        if large.size:
            of = box[large]
            index[large] = _strata(index[large], self._total[of], self._keys[of], version)
        local = index.view(np.int64)
        if self._offsets is not None and self._sizes is not None:
            inside, local = self._within(box, local, self._offsets, self._sizes)
            box, index, local = box[inside], index[inside], local[inside]
        bits = self._memory[self._begins[box] + local].astype(np.int64).view(np.uint64)
        mixed = mix_arrays(index, bits, self._keys[box], self._wide)
        found = np.zeros(len(counts), np.uint64)
        here = np.flatnonzero(np.diff(box, prepend=-1))
        if here.size:
            found[box[here]] = np.add.reduceat(mixed, here)
        return found

    def _within(
        self, box: NDArray[np.intp], index: I64, offsets: I64, sizes: I64
    ) -> tuple[NDArray[np.bool_], I64]:
        """Which global indices lie in their box, and where there."""
        inside = np.ones(len(index), np.bool_)
        local = np.zeros(len(index), np.int64)
        strides = _strides(self._shapes)
        for dim in range(self._shapes.shape[1]):
            extent = sizes[box, dim]
            at = index // strides[box, dim] % self._shapes[box, dim] - offsets[box, dim]
            inside &= (at >= 0) & (at < extent)
            local = local * extent + at
        return inside, local


class _OnGpu:
    """Boxes on one GPU, of one element size: a few dozen kernels for all of them."""

    def __init__(
        self,
        rows: list[int],
        width: int,
        device: torch.device,
        addresses: I64,
        keys: I64,
        shapes: I64,
        offsets: I64 | None,
        sizes: I64 | None,
    ) -> None:
        self.rows = np.array(rows)
        self._wide = width == 8
        first = int(addresses.min())
        begins = (addresses - first) // width
        numel = (shapes if sizes is None else sizes).prod(axis=1)
        self._memory = _memory(first, int((begins + numel).max()), width, device)
        columns = [begins, keys, shapes.prod(axis=1)]
        if offsets is not None and sizes is not None:
            strides = _strides(shapes)
            for dim in range(shapes.shape[1]):
                columns += [strides[:, dim], shapes[:, dim], offsets[:, dim], sizes[:, dim]]
        self._columns = torch.from_numpy(np.stack(columns)[:, :, None]).to(device)
        self._counter = torch.arange(SAMPLES, device=device)[None, :]

    def sums(self, version: int) -> U64:
        chunks = [self._sums(columns, version) for columns in torch.split(self._columns, _ROWS, 1)]
        return torch.cat(chunks).cpu().numpy().view(np.uint64)

    def _sums(self, columns: Tensor, version: int) -> Tensor:
        begin, key, total = columns[:3]
        small = total <= SAMPLES
        noise = scramble(self._counter * GAMMA + (key ^ _signed(version * MIX)))
        low = self._counter * total // SAMPLES
        high = (self._counter + 1) * total // SAMPLES
        index = torch.where(
            small, self._counter, low + _remainder(noise, (high - low).clamp(min=1))
        )
        inside = self._counter < total
        local = index
        if len(columns) > 3:
            local = torch.zeros_like(index)
            for stride, shape, offset, size in columns[3:].view(-1, 4, len(key), 1):
                at = index // stride % shape - offset
                inside = inside & (at >= 0) & (at < size)
                local = local * size + at
        bits = self._memory[begin + local.where(inside, 0)].to(torch.int64)
        return mix(index, bits, key, wide=self._wide).where(inside, 0).sum(dim=1)


def _signed(value: int) -> int:
    value &= MASK
    return value - (1 << 64) if value >> 63 else value


def _remainder(value: Tensor, divisor: Tensor) -> Tensor:
    """Of the unsigned 64 bits in ``value``; ``divisor`` is positive."""
    half = shift(value, 1) % divisor
    return (half * 2 + (value & 1)) % divisor


def _host_memory(first: int, extent: int, width: int) -> NDArray[np.generic]:
    """``extent`` integers from an address on."""
    memory = memoryview((ctypes.c_ubyte * width).from_address(first)).cast("B")
    one: NDArray[np.generic] = np.frombuffer(memory, _INTEGERS[width])
    return np.lib.stride_tricks.as_strided(one, (extent,), (width,))


class _Span:
    """A GPU's memory as the CUDA array interface describes it."""

    def __init__(self, first: int, extent: int, width: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (extent,),
            "typestr": {1: "|u1", 2: "<i2", 4: "<i4", 8: "<i8"}[width],
            "data": (first, False),
            "version": 2,
        }


def _memory(first: int, extent: int, width: int, device: torch.device) -> Tensor:
    if device.type != "cuda":
        return torch.from_numpy(_host_memory(first, extent, width))
    return torch.as_tensor(_Span(first, extent, width), device=device)
