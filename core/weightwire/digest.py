"""A 64-bit digest of tensor elements that adds up over boxes.

``digest(tensor) = sum over elements of mix(key, global index, bits) mod 2**64``.
It is the same however a tensor is cut into boxes, so what owners serve and what
receivers hold can be compared without moving bytes.  ``key`` comes from the
tensor's name; equal bits at another place, or in another tensor, count
differently.  It finds faults, not forgeries.

``full`` takes every element.  ``sample`` takes ``SAMPLES`` places of each
tensor, the same ones on both sides, others for each version.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weightwire.copying import INTEGERS
from weightwire.hostmemory import array_of

__all__ = [
    "SAMPLES",
    "Verify",
    "box_digest",
    "box_digests",
    "combine",
    "sample_box_digests",
    "sample_digests",
    "tensor_key",
]

U64 = NDArray[np.uint64]
Verify = Literal["off", "sample", "full"]

SAMPLES = 256
"""Places per tensor that ``sample`` compares; a smaller tensor is compared whole."""

_CHUNK = 1 << 16  # elements whose intermediate values stay in a core's cache
_MASK = (1 << 64) - 1
# Odd constants of SplitMix64 (Steele, Lea, Flood: Fast Splittable PRNGs, 2014), as int64.
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


@functools.lru_cache(maxsize=1 << 17)
def tensor_key(name: str) -> int:
    """The tensor's key: a signed 64-bit integer from its checkpoint name."""
    return int.from_bytes(
        hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True
    )


def box_digest(
    box: Tensor,
    *,
    key: int,
    shape: tuple[int, ...],
    offsets: tuple[int, ...],
    verify: Verify,
    version: int,
) -> int:
    """Digest of one box of a tensor.

    Args:
        box: its elements, contiguous, of the wire dtype.
        key: from ``tensor_key``.
        shape: the tensor's global shape.
        offsets: the box's first index in each dimension.
        verify: ``full``, or ``sample`` (the places depend on ``version``).

    Returns:
        An integer from 0 to 2**64 - 1; 0 for an empty box and for ``off``.
    """
    if verify == "off" or box.numel() == 0:
        return 0
    flat = box.reshape(-1).view(INTEGERS[box.element_size()])
    whole = tuple(box.shape) == tuple(shape)
    if verify == "full":
        return _full(flat, key, None if whole else (tuple(box.shape), shape, offsets))
    total = math.prod(shape)
    places = sample_places(total, key, version)
    if not whole:
        local, inside = _to_local(places, tuple(box.shape), shape, offsets)
        places, local = places[inside], local[inside]
    else:
        local = places
    bits = flat[local.to(flat.device)].to(torch.int64)
    mixed = _mix(places.to(flat.device), bits, key, wide=box.element_size() == 8)
    return int(mixed.sum().item()) & _MASK


def sample_digests(tensors: Sequence[Tensor], keys: Sequence[int], version: int) -> list[int]:
    """Sample digests of whole tensors of one device, computed together.

    Equal to ``box_digest(..., verify="sample")`` of each, in a fixed number of
    passes over all of them instead of a dozen over each.  In numpy, because
    torch would wake its thread pool for each of these small passes.
    """
    kept = [i for i, tensor in enumerate(tensors) if tensor.numel()]
    digests = [0] * len(tensors)
    if not kept:
        return digests
    flats = [tensors[i].reshape(-1).view(INTEGERS[tensors[i].element_size()]) for i in kept]
    key = np.array([keys[i] for i in kept], np.int64).view(np.uint64)
    total = np.array([flat.numel() for flat in flats], np.uint64)
    counts = np.minimum(total, SAMPLES).astype(np.int64)
    begins = np.cumsum(counts) - counts
    # Small tensors are taken whole: their indices count up from where each begins.
    index = (np.arange(counts.sum()) - np.repeat(begins, counts)).astype(np.uint64)
    large = np.flatnonzero(total > SAMPLES)
    if large.size:
        places = _strata(total[large, None], key[large, None], version)
        index[np.repeat(total > SAMPLES, counts)] = places.ravel()
    width = np.array([flat.element_size() for flat in flats])
    bits = _gather_whole(flats, index, begins, counts, width, total <= SAMPLES)
    sums = _sums(index, bits, begins, counts, key, width == 8)
    for i, value in zip(kept, sums.tolist(), strict=True):
        digests[i] = value
    return digests


def sample_box_digests(
    boxes: Sequence[Tensor],
    keys: Sequence[int],
    shapes: Sequence[tuple[int, ...]],
    offsets: Sequence[tuple[int, ...]],
    version: int,
) -> list[int]:
    """Sample digests of boxes of one device, as ``box_digest`` gives them, in few passes.

    Boxes of one tensor share its places.
    """
    digests = [0] * len(boxes)
    by_tensor: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for i, box in enumerate(boxes):
        if box.numel():
            by_tensor.setdefault((keys[i], shapes[i]), []).append(i)
    kept: list[int] = []
    found: list[U64] = []
    local: list[U64] = []
    for (key_of, shape), members in by_tensor.items():
        at = sample_places(math.prod(shape), key_of, version).numpy()
        first = [offsets[i] for i in members]
        sizes = [tuple(boxes[i].shape) for i in members]
        for i, (inside, flat) in zip(members, _in_boxes(at, shape, first, sizes), strict=True):
            if len(inside):
                kept.append(i)
                found.append(at[inside].astype(np.uint64))
                local.append(flat.astype(np.uint64))
    if not kept:
        return digests
    flats = [boxes[i].reshape(-1).view(INTEGERS[boxes[i].element_size()]) for i in kept]
    counts = np.array([len(at) for at in found], np.int64)
    begins = np.cumsum(counts) - counts
    bits = _gather(flats, np.concatenate(local), begins, counts)
    wide = np.array([flat.element_size() == 8 for flat in flats])
    key = np.array([keys[i] for i in kept], np.int64).view(np.uint64)
    sums = _sums(np.concatenate(found), bits, begins, counts, key, wide)
    for i, value in zip(kept, sums.tolist(), strict=True):
        digests[i] = value
    return digests


def _in_boxes(
    at: NDArray[np.int64],
    shape: tuple[int, ...],
    offsets: Sequence[tuple[int, ...]],
    sizes: Sequence[tuple[int, ...]],
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Which of a tensor's places lie in each box, and where there; for all boxes at once."""
    begin = np.array(offsets, np.int64).reshape(len(offsets), len(shape))
    extent = np.array(sizes, np.int64).reshape(len(sizes), len(shape))
    inside = np.ones((len(begin), len(at)), np.bool_)
    flat = np.zeros((len(begin), len(at)), np.int64)
    for dim, axis in enumerate(np.unravel_index(at, shape) if shape else ()):
        moved = axis - begin[:, dim, None]
        inside &= (moved >= 0) & (moved < extent[:, dim, None])
        flat = flat * extent[:, dim, None] + moved
    for box, chosen in enumerate(inside):
        which = np.flatnonzero(chosen)
        yield which, flat[box, which]


def _sums(
    index: U64,
    bits: U64,
    begins: NDArray[np.int64],
    counts: NDArray[np.int64],
    key: U64,
    wide: NDArray[np.bool_],
) -> U64:
    """By tensor or box, the sum of mix(key, index, bits); see ``_mix``."""
    if wide.any():
        bits = np.where(np.repeat(wide, counts), _np_scramble(bits), bits)
    weight = _np_scramble(index * _u64(_GAMMA) + np.repeat(key, counts)) | _u64(1)
    return np.asarray(np.add.reduceat((bits + _u64(1)) * weight, begins), np.uint64)


def box_digests(
    boxes: Sequence[Tensor],
    keys: Sequence[int],
    shapes: Sequence[tuple[int, ...]],
    offsets: Sequence[tuple[int, ...]],
    verify: Verify,
    version: int,
) -> list[int]:
    """Digests of boxes; when sampled, all of one device together."""
    digests = [0] * len(boxes)
    together: dict[tuple[torch.device, bool], list[int]] = {}
    for i, box in enumerate(boxes):
        if verify == "sample":
            whole = tuple(box.shape) == shapes[i]
            together.setdefault((box.device, whole), []).append(i)
        else:
            digests[i] = box_digest(
                box,
                key=keys[i],
                shape=shapes[i],
                offsets=offsets[i],
                verify=verify,
                version=version,
            )
    for (_, whole), chosen in together.items():
        some, their_keys = [boxes[i] for i in chosen], [keys[i] for i in chosen]
        if whole:
            sampled = sample_digests(some, their_keys, version)
        else:
            places = [shapes[i] for i in chosen], [offsets[i] for i in chosen]
            sampled = sample_box_digests(some, their_keys, *places, version)
        for i, digest in zip(chosen, sampled, strict=True):
            digests[i] = digest
    return digests


def _gather_whole(
    flats: Sequence[Tensor],
    index: U64,
    begins: NDArray[np.int64],
    counts: NDArray[np.int64],
    width: NDArray[np.int64],
    whole: NDArray[np.bool_],
) -> U64:
    """``_gather``, where those that are ``whole`` give all their elements: these in one pass."""
    if flats[0].device.type != "cpu" or not whole.any():
        return _gather(flats, index, begins, counts)
    bits = np.empty(len(index), np.uint64)
    for size in np.unique(width[whole]).tolist():
        chosen = whole & (width == size)
        values = torch.cat([flats[i] for i in np.flatnonzero(chosen).tolist()])
        bits[np.repeat(chosen, counts)] = values.to(torch.int64).numpy().view(np.uint64)
    rest = np.flatnonzero(~whole).tolist()
    if rest:
        found = _gather([flats[i] for i in rest], index, begins[rest], counts[rest])
        bits[np.repeat(~whole, counts)] = found
    return bits


def _gather(
    flats: Sequence[Tensor], index: U64, begins: NDArray[np.int64], counts: NDArray[np.int64]
) -> U64:
    """The bits at each tensor's places, sign-extended to 64 bits, one after another."""
    places = [
        index[begin : begin + count].astype(np.int64)
        for begin, count in zip(begins, counts, strict=True)
    ]
    if flats[0].device.type == "cpu":
        parts = [array_of(flat)[at] for flat, at in zip(flats, places, strict=True)]
        return np.concatenate([part.astype(np.int64) for part in parts]).view(np.uint64)
    return _gather_on_device(flats, places)


def _gather_on_device(flats: Sequence[Tensor], places: Sequence[NDArray[np.int64]]) -> U64:
    """One kernel for all tensors of one storage and element size, not one for each tensor.

    A group's tensors lie in one slot, so that thousands of them cost what one does.
    """
    begins = np.cumsum([0, *(len(at) for at in places)])
    found = np.empty(begins[-1], np.int64)
    together: dict[tuple[int, int], list[int]] = {}
    for i, flat in enumerate(flats):
        key = (flat.untyped_storage().data_ptr(), flat.element_size())
        together.setdefault(key, []).append(i)
    for (address, size), chosen in together.items():
        first = flats[chosen[0]]
        storage = torch.empty(0, dtype=first.dtype, device=first.device)
        storage.set_(first.untyped_storage())
        index = np.concatenate(
            [places[i] + (flats[i].data_ptr() - address) // size for i in chosen]
        )
        bits = storage[torch.from_numpy(index).to(first.device)].to(torch.int64).cpu().numpy()
        ends = np.cumsum([len(places[i]) for i in chosen])
        for i, part in zip(chosen, np.split(bits, ends[:-1]), strict=True):
            found[begins[i] : begins[i + 1]] = part
    return found.view(np.uint64)


def sample_places(total: int, key: int, version: int) -> Tensor:
    """Global flat indices that ``sample`` looks at: int64, distinct, at most ``SAMPLES``."""
    if total <= SAMPLES:
        return torch.arange(total, dtype=torch.int64)
    places = _strata(_u64(total), _u64(key), version)
    return torch.from_numpy(places.astype(np.int64))


def _strata(total: U64 | np.uint64, key: U64 | np.uint64, version: int) -> U64:
    """One place in each of ``SAMPLES`` equal strata: every part of a tensor is covered."""
    counter = np.arange(SAMPLES, dtype=np.uint64)
    noise = _np_scramble(counter * _u64(_GAMMA) + (key ^ _u64(version * _MIX_1)))
    begin = counter * total // _u64(SAMPLES)
    end = (counter + _u64(1)) * total // _u64(SAMPLES)
    return np.asarray(begin + noise % (end - begin), np.uint64)


def _np_scramble(value: U64) -> U64:
    value = (value ^ (value >> _u64(30))) * _u64(_MIX_1)
    value = (value ^ (value >> _u64(27))) * _u64(_MIX_2)
    return value ^ (value >> _u64(31))


def _u64(value: int) -> np.uint64:
    return np.uint64(value & _MASK)


def _full(
    flat: Tensor,
    key: int,
    place: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None,
) -> int:
    total = 0
    for begin in range(0, flat.numel(), _CHUNK):
        bits = flat[begin : begin + _CHUNK].to(torch.int64)
        index = torch.arange(begin, begin + bits.numel(), dtype=torch.int64, device=flat.device)
        if place is not None:
            index = _to_global(index, *place)
        total += int(_mix(index, bits, key, wide=flat.element_size() == 8).sum().item())
    return total & _MASK


def _mix(index: Tensor, bits: Tensor, key: int, *, wide: bool) -> Tensor:
    weight = _scramble(index * _GAMMA + key)
    # An odd weight makes any change of one element change the sum.  Weights of two places
    # differ by few low bits' worth: eight-byte elements that differ only in their high bits
    # (their signs) could change places unnoticed if they weren't scrambled too.
    if wide:
        bits = _scramble(bits)
    return (bits + 1) * weight.bitwise_or_(1)


def _scramble(value: Tensor) -> Tensor:
    value = (value ^ _shift(value, 30)) * _MIX_1
    value = (value ^ _shift(value, 27)) * _MIX_2
    return value ^ _shift(value, 31)


def _shift(value: Tensor, by: int) -> Tensor:
    """Logical shift to the right of int64."""
    return (value >> by).bitwise_and_((1 << (64 - by)) - 1)


def _strides(shape: tuple[int, ...]) -> list[int]:
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * shape[i + 1]
    return strides


def _to_global(
    index: Tensor, box: tuple[int, ...], shape: tuple[int, ...], offsets: tuple[int, ...]
) -> Tensor:
    result = torch.zeros_like(index)
    for inner, size, outer, offset in zip(
        _strides(box), box, _strides(shape), offsets, strict=True
    ):
        result += ((index // inner) % size + offset) * outer
    return result


def _to_local(
    index: Tensor, box: tuple[int, ...], shape: tuple[int, ...], offsets: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Local flat indices, and which of the global ones lie in the box."""
    result = torch.zeros_like(index)
    inside = torch.ones_like(index, dtype=torch.bool)
    rows = zip(_strides(box), box, _strides(shape), shape, offsets, strict=True)
    for inner, size, outer, extent, offset in rows:
        at = (index // outer) % extent - offset
        inside &= (at >= 0) & (at < size)
        result += at * inner
    return result, inside


def combine(digest: int, verify: Verify) -> str:
    """A digest as reports show it."""
    return "" if verify == "off" else f"{digest:016x}"
