"""Samples of many boxes at once, read by address: a few passes over all of them.

A model has thousands of tensors, each with memory of its own.  A dozen small operations
for each of them, on a GPU with a synchronisation, would take longer than moving the
bytes does.  Where to look, and what each place weighs, is worked out for many groups
together; of a group that has arrived only the elements are read.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weightwire.mixing import GAMMA, MASK, MIX, U64, scramble, scramble_array, shift, u64

__all__ = ["SAMPLES", "Box", "Sampler", "sample_places"]

SAMPLES = 256
"""Places per tensor that ``sample`` compares; a smaller tensor is compared whole."""

_ROWS = 8192  # boxes of which places are held at a time: 32 MB
_INTEGERS: dict[int, Any] = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}

I64 = NDArray[np.int64]


class Box(NamedTuple):
    """A box of a tensor, and how it lies in memory.

    Attributes:
        key: the tensor's, from ``tensor_key``.
        shape: the tensor's global shape.
        offsets: the box's first index in each dimension.
        sizes: its extent in each dimension.
        itemsize: bytes of an element.
        strides: in elements; None where it is contiguous.
    """

    key: int
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    itemsize: int
    strides: tuple[int, ...] | None = None


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
        groups: the boxes that are digested together.
    """

    def __init__(self, groups: Sequence[Sequence[Box]]) -> None:
        self._groups = [_Group(boxes) for boxes in groups]
        self._windows: list[_Window] = []
        self._window_of: list[tuple[_Window, int]] = []
        held: list[Box] = []
        for boxes in groups:
            if not self._windows or len(held) + len(boxes) > _ROWS:
                held = []
                self._windows.append(_Window(held))
            self._window_of.append((self._windows[-1], len(held)))
            held += boxes
        self._latest: _Window | None = None

    def prepare(self, group: int, version: int) -> None:
        """Work out where a version of a group is looked at, if its places are still held.

        They are where all boxes' fit: up to ``_ROWS`` boxes.  On a GPU this is queued: for when
        there is time until the bytes are there.
        """
        window, _ = self._window_of[group]
        if window is self._latest:
            window.locate(version)

    def start(self, group: int, boxes: Sequence[Tensor], version: int) -> Callable[[], list[int]]:
        """``box_digest(..., verify="sample")`` of each box of a group.

        Args:
            boxes: as they were described; all on one device.

        Returns:
            What gives them.  On a GPU they are queued, behind what has been queued before;
            in host memory the boxes are read when they are asked for.
        """
        window, first = self._window_of[group]
        if window is not self._latest and self._latest is not None:
            self._latest.forget()
        self._latest = window
        runs = self._groups[group].runs(boxes)
        sums = [(run.rows, window.sums(run, first, version)) for run in runs]

        def found() -> list[int]:
            values = np.zeros(len(boxes), np.uint64)
            for rows, of_run in sums:
                values[rows] = of_run()
            digests: list[int] = values.tolist()
            return digests

        return found


class _Run:
    """Boxes of a group that are read at once: of one element size, on one device.

    Attributes:
        rows: which of the group's.
        begins: of each, in elements of ``memory``.
        memory: from the first box on to the end of the last; what lies between boxes is
            within its bounds, and never read.
    """

    def __init__(
        self, rows: NDArray[np.intp], addresses: I64, extents: I64, width: int, device: torch.device
    ) -> None:
        self.rows = rows
        self.width = width
        self.device = device
        first = int(addresses.min())
        self.begins = (addresses - first) // width
        extent = int((self.begins + extents).max())
        self.memory = _memory(first, extent, width, device)
        self._pinned: Tensor | None = None
        # Worked out here, since a copy from pageable memory waits for what is queued.
        self.rows_there = torch.from_numpy(rows - rows[0]).to(device)
        self.begins_there = torch.from_numpy(self.begins)[:, None].to(device)

    def brought(self, sums: Tensor) -> Callable[[], U64]:
        """What gives sums that a GPU still works out.

        To be called, and its result read, before the run is digested again: there is one
        pinned buffer.
        """
        if sums.device.type != "cuda":
            return lambda: sums.cpu().numpy().view(np.uint64)
        if self._pinned is None:
            self._pinned = torch.empty(len(self.rows), dtype=torch.int64, pin_memory=True)
        here = self._pinned
        here.copy_(sums, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch
        event.record(torch.cuda.current_stream(self.device))

        def found() -> U64:
            event.synchronize()
            return here.numpy().view(np.uint64)

        return found


class _Group:
    """Where a group's boxes lie."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._widths = np.array([box.itemsize for box in boxes], np.int64)
        self._extents = np.array([_extent(box) for box in boxes], np.int64)
        self._addresses: list[int] = []
        self._device = torch.device("meta")
        self._runs: list[_Run] = []

    def runs(self, boxes: Sequence[Tensor]) -> list[_Run]:
        """Prepared anew where the boxes lie elsewhere than they did."""
        if not boxes:
            return []
        addresses, device = [box.data_ptr() for box in boxes], boxes[0].device
        if addresses != self._addresses or device != self._device:
            self._runs = []
            self._addresses, self._device = addresses, device
            there = np.array(addresses, np.int64)
            kinds = self._widths * 8 + there % self._widths
            for kind in np.unique(kinds[self._extents > 0]).tolist():
                rows = np.flatnonzero((kinds == kind) & (self._extents > 0))
                run = _Run(rows, there[rows], self._extents[rows], kind // 8, device)
                self._runs.append(run)
        return self._runs


def _extent(box: Box) -> int:
    """Elements from a box's first to its last; 0 where it is empty."""
    if 0 in box.sizes:
        return 0
    strides = box.strides or _row_major(box.sizes)
    return 1 + sum((n - 1) * s for n, s in zip(box.sizes, strides, strict=True))


def _row_major(sizes: Sequence[int]) -> tuple[int, ...]:
    strides = itertools.accumulate(reversed(sizes[1:]), lambda a, b: a * b, initial=1)
    return tuple(reversed([*strides])) if sizes else ()


class _Window:
    """Boxes of consecutive groups: where ``sample`` looks in them for one version."""

    def __init__(self, boxes: list[Box]) -> None:
        self._boxes = boxes
        self._here: _HostPlaces | None = None
        self._there: _GpuPlaces | None = None

    def sums(self, run: _Run, first: int, version: int) -> Callable[[], U64]:
        """By box of the run, whose group begins at row ``first``."""
        if run.device.type == "cpu":
            if self._here is None:
                self._here = _HostPlaces(self._boxes)
            return functools.partial(self._here.sums, run, first, version)
        if self._there is None or self._there.device != run.device:
            self._there = _GpuPlaces(self._boxes, run.device)
        return self._there.sums(run, first, version)

    def locate(self, version: int) -> None:
        """Where ``sample`` looks in this version, wherever the boxes lay last."""
        for places in (self._here, self._there):
            if places is not None:
                places.locate(version)

    def forget(self) -> None:
        """Give the places back: another window follows."""
        self._here = self._there = None


class _Columns(NamedTuple):
    """What the places of boxes are worked out from; by box, and by dimension."""

    keys: I64
    totals: I64
    steps: I64
    shapes: I64
    offsets: I64
    sizes: I64
    strides: I64
    whole: bool

    @classmethod
    def of(cls, boxes: Sequence[Box]) -> _Columns:
        shapes = _padded([box.shape for box in boxes], 1)
        steps = np.ones_like(shapes)
        for dim in range(shapes.shape[1] - 2, -1, -1):
            steps[:, dim] = steps[:, dim + 1] * shapes[:, dim + 1]
        whole = all(b.strides is None and tuple(b.sizes) == tuple(b.shape) for b in boxes)
        return cls(
            keys=np.array([box.key for box in boxes], np.int64),
            totals=shapes.prod(axis=1),
            steps=steps,
            shapes=shapes,
            offsets=_padded([box.offsets for box in boxes], 0),
            sizes=_padded([box.sizes for box in boxes], 1),
            strides=_padded([box.strides or _row_major(box.sizes) for box in boxes], 0),
            whole=whole,
        )


def _padded(points: Sequence[tuple[int, ...]], filler: int) -> I64:
    """By box and dimension; those of fewer dimensions have others of ``filler`` in front."""
    most = max(map(len, points), default=0)
    rows = [(filler,) * (most - len(point)) + tuple(point) for point in points]
    return np.array(rows, np.int64).reshape(len(points), most)


class _Places(ABC):
    """Where to look in each box, and what each place weighs, for one version at a time."""

    _version: int | None = None

    def locate(self, version: int) -> None:
        if version != self._version:
            self._version = None  # until all of it is there
            self._locate(version)
            self._version = version

    @abstractmethod
    def _locate(self, version: int) -> None: ...


class _HostPlaces(_Places):
    """In host memory: in numpy, because torch would wake its threads for each small pass."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._columns = _Columns.of(boxes)
        counts = np.minimum(self._columns.totals, SAMPLES)
        self._all = np.repeat(np.arange(len(boxes)), counts)
        counter = np.arange(len(self._all)) - np.repeat(np.cumsum(counts) - counts, counts)
        self._counter = counter.astype(np.uint64)
        self._large = np.flatnonzero((self._columns.totals > SAMPLES)[self._all])
        self._row = self._all
        self._local: I64 = counter
        self._weight: U64 = self._counter

    def sums(self, run: _Run, first: int, version: int) -> U64:
        self.locate(version)
        rows = first + run.rows
        low, high = np.searchsorted(self._row, (rows[0], rows[-1] + 1))
        at = self._row[low:high] - first
        chosen: Any = slice(None)
        if len(rows) != rows[-1] - rows[0] + 1:  # some of these rows are of another run
            chosen = np.isin(at, run.rows)
            at = at[chosen]
        position = np.searchsorted(run.rows, at)
        local, weight = self._local[low:high][chosen], self._weight[low:high][chosen]
        bits = run.memory.numpy()[run.begins[position] + local].astype(np.int64).view(np.uint64)
        if run.width == 8:
            bits = scramble_array(bits)
        found = np.zeros(len(rows), np.uint64)
        begins = np.flatnonzero(np.diff(position, prepend=-1))
        if begins.size:
            found[position[begins]] = np.add.reduceat((bits + u64(1)) * weight, begins)
        return found

    def _locate(self, version: int) -> None:
        columns = self._columns
        row, index = self._all, self._counter.copy()  # small tensors are taken whole
        key = columns.keys.view(np.uint64)
        if self._large.size:
            of = row[self._large]
            total = columns.totals.view(np.uint64)[of]
            index[self._large] = _strata(index[self._large], total, key[of], version)
        local = index.view(np.int64)
        if not columns.whole:
            inside = np.ones(len(index), np.bool_)
            local = np.zeros(len(index), np.int64)
            for dim in range(columns.shapes.shape[1]):
                at = index.view(np.int64) // columns.steps[row, dim] % columns.shapes[row, dim]
                at -= columns.offsets[row, dim]
                inside &= (at >= 0) & (at < columns.sizes[row, dim])
                local += at * columns.strides[row, dim]
            row, index, local = row[inside], index[inside], local[inside]
        self._row, self._local = row, local
        self._weight = scramble_array(index * u64(GAMMA) + key[row]) | u64(1)


class _GpuPlaces(_Places):
    """On one GPU; what host memory needs isn't: it runs there too, for tests."""

    def __init__(self, boxes: Sequence[Box], device: torch.device) -> None:
        self.device = device
        columns = _Columns.of(boxes)
        rows = [columns.keys, columns.totals]
        for dim in range(0 if columns.whole else columns.shapes.shape[1]):
            for each in (columns.steps, columns.shapes, columns.offsets, columns.sizes):
                rows.append(each[:, dim])
            rows.append(columns.strides[:, dim])
        self._columns = torch.from_numpy(np.stack(rows)[:, :, None]).to(device)
        self._counter = torch.arange(SAMPLES, device=device)[None, :]
        self._local = self._weight = self._counter

    def sums(self, run: _Run, first: int, version: int) -> Callable[[], U64]:
        self.locate(version)
        low, high = first + int(run.rows[0]), first + int(run.rows[-1]) + 1
        local, weight = self._local[low:high], self._weight[low:high]
        if len(run.rows) != high - low:  # some of these rows are of another run
            local, weight = local[run.rows_there], weight[run.rows_there]
        bits = run.memory[run.begins_there + local].to(torch.int64)
        if run.width == 8:
            bits = scramble(bits)
        return run.brought(((bits + 1) * weight).sum(dim=1))

    def _locate(self, version: int) -> None:
        key, total = self._columns[:2]
        noise = scramble(self._counter * GAMMA + (key ^ _signed(version * MIX)))
        low = self._counter * total // SAMPLES
        span = ((self._counter + 1) * total // SAMPLES - low).clamp(min=1)
        small = total <= SAMPLES
        index = torch.where(small, self._counter, low + _remainder(noise, span))
        inside = self._counter < total
        local = index
        if len(self._columns) > 2:
            local = torch.zeros_like(index)
            for step, shape, offset, size, stride in self._columns[2:].view(-1, 5, len(key), 1):
                at = index // step % shape - offset
                inside = inside & (at >= 0) & (at < size)
                local = local + at * stride
        # What is outside looks at the box's first element, and weighs nothing.
        self._local = local.where(inside, 0)
        self._weight = scramble(index * GAMMA + key).bitwise_or_(1).where(inside, 0)


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
