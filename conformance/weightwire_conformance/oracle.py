"""What must arrive, rebuilt from a seed in the process that receives it.

Shares no code with table, planner, pipeline or transport: numpy makes bytes,
torch only holds them, and bytes are compared, never values.  Floating-point
tensors begin with what is easily lost: NaNs with payloads, signalling NaNs,
negative zero, subnormals, infinities.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "CONVERSIONS",
    "MODELS",
    "Cut",
    "Cuts",
    "Leaf",
    "Model",
    "arriving",
    "difference",
    "model",
    "piece",
    "pristine",
    "source",
    "target",
    "whole",
]

Layout = Literal["dense", "strided", "transposed", "narrowed", "expanded"]
Kind = Literal["bits", "numbers"]

_EXPONENTS = {
    # exponent bits, mantissa bits
    torch.float8_e4m3fn: (4, 3),
    torch.float8_e5m2: (5, 2),
    torch.float16: (5, 10),
    torch.bfloat16: (8, 7),
    torch.float32: (8, 23),
    torch.float64: (11, 52),
}


@dataclass(frozen=True)
class Leaf:
    """One tensor of a model.

    Attributes:
        layout: how it lies in the trainer's memory; the receiver's is dense.
        kind: any ``bits``, or ordinary ``numbers`` that a cast leaves meaningful.
        cast: dtype on the wire and at the receiver, where it isn't the trainer's.
        tied: name of the tensor whose memory it shares.
        taken: for a checkpoint tensor: the trainer's, and of which expert which rows it is.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout = "dense"
    kind: Kind = "bits"
    cast: torch.dtype | None = None
    tied: str | None = None
    taken: tuple[Leaf, int, int, int] | None = None


Model = Sequence[Leaf]


@dataclass(frozen=True)
class Cut:
    """One of the ``parts`` into which ``torch.chunk`` cuts a dimension: the last may be empty."""

    dimension: int
    parts: int
    index: int


Cuts = Callable[[Leaf], Sequence[Cut]]
"""How a rank's piece of a tensor is cut out of it, one cut after another."""


def whole(leaf: Leaf) -> Sequence[Cut]:
    """A rank that holds all of every tensor."""
    del leaf
    return ()


def piece(leaf: Leaf, cuts: Cuts) -> tuple[slice, ...]:
    """The indices of a rank's piece."""
    sides = [(0, extent) for extent in leaf.shape]
    for cut in cuts(leaf):
        begin, end = sides[cut.dimension]
        step = -(-(end - begin) // cut.parts)
        first = min(begin + cut.index * step, end)
        sides[cut.dimension] = (first, min(first + step, end))
    return tuple(slice(begin, end) for begin, end in sides)


# ------------------------------------------------------------------ models


def _uneven() -> Iterable[Leaf]:
    """Sizes that no number of ranks divides, and tensors smaller than that number."""
    yield Leaf("embed.weight", (23, 10), torch.bfloat16)
    for i in range(2):
        yield Leaf(f"layers.{i}.up.weight", (13, 7), torch.float32)
        yield Leaf(f"layers.{i}.experts.weight", (5, 3, 11), torch.float8_e4m3fn)
        yield Leaf(f"layers.{i}.norm.weight", (7,), torch.float64)
        yield Leaf(f"layers.{i}.steps", (), torch.int64)
    yield Leaf("single.weight", (1, 9), torch.float16)
    yield Leaf("mask", (11,), torch.bool)
    yield Leaf("nothing", (0, 4), torch.float32)


def _layers(count: int = 3, width: int = 96) -> Iterable[Leaf]:
    """A little of everything, in layers of equal shapes."""
    yield Leaf("embed.weight", (3, width), torch.bfloat16)
    for i in range(count):
        yield Leaf(f"layers.{i}.up.weight", (width, 24), torch.bfloat16)
        yield Leaf(f"layers.{i}.norm.weight", (width,), torch.float32)
        yield Leaf(f"layers.{i}.steps", (), torch.int64)
    yield Leaf("head.weight", (5, width), torch.float16)
    yield Leaf("mask", (71,), torch.bool)
    yield Leaf("nothing", (0, 4), torch.float32)


def _dtypes() -> Iterable[Leaf]:
    for dtype in (
        *_EXPONENTS,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.bool,
    ):
        yield Leaf(f"{str(dtype).removeprefix('torch.')}.weight", (17, 5), dtype)


def _specials() -> Iterable[Leaf]:
    for dtype in _EXPONENTS:
        yield Leaf(f"{str(dtype).removeprefix('torch.')}.specials", (64,), dtype)


def _scalars() -> Iterable[Leaf]:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64):
        yield Leaf(f"scalar.{str(dtype).removeprefix('torch.')}", (), dtype)


def _empty() -> Iterable[Leaf]:
    yield Leaf("rows", (0, 3), torch.bfloat16)
    yield Leaf("columns", (4, 0), torch.float32)
    yield Leaf("alone", (0,), torch.int64)
    yield Leaf("beside.weight", (5, 3), torch.float32)


def _buffers() -> Iterable[Leaf]:
    yield Leaf("norm.weight", (12,), torch.float32)
    yield Leaf("norm.running_mean", (12,), torch.float32)
    yield Leaf("norm.num_batches_tracked", (), torch.int64)
    yield Leaf("attention.positions", (33,), torch.int32)
    yield Leaf("experts.map", (3, 7), torch.int16)
    yield Leaf("experts.enabled", (19,), torch.bool)
    yield Leaf("codebook", (4, 16), torch.uint8)


def _noncontiguous() -> Iterable[Leaf]:
    yield Leaf("strided", (6, 10), torch.float32, "strided")
    yield Leaf("transposed", (9, 5), torch.bfloat16, "transposed")
    yield Leaf("narrowed", (6, 13), torch.float16, "narrowed")
    yield Leaf("expanded", (4, 6), torch.float32, "expanded")
    yield Leaf("dense", (5, 5), torch.float32)


def _tied() -> Iterable[Leaf]:
    yield Leaf("embed.weight", (12, 8), torch.bfloat16)
    yield Leaf("layers.0.weight", (8, 8), torch.bfloat16)
    yield Leaf("lm_head.weight", (12, 8), torch.bfloat16, tied="embed.weight")


def _names() -> Iterable[Leaf]:
    for name in (
        "x",
        "Ω.gewicht.β",
        "with space",
        "UPPER.lower",
        "upper.LOWER",
        "a-b_c.d",
        "trailing.",
        "..leading",
        "quote'\"",
        "100%.{}$HOME",
        "重み.0",
        "weights/nested/name",
        "l" * 300,
    ):
        yield Leaf(name, (3, 3), torch.float32)


def _tiny(count: int = 300) -> Iterable[Leaf]:
    for i in range(count):
        yield Leaf(f"layers.{i // 10}.part{i % 10}.bias", (1 + i % 3,), torch.float32)


def _large(nbytes: int = 3 << 20) -> Iterable[Leaf]:
    yield Leaf("before.weight", (16,), torch.float32)
    yield Leaf("large.weight", (nbytes // 2048, 1024), torch.bfloat16)
    yield Leaf("after.weight", (16,), torch.float32)


def _masters(width: int = 256) -> Iterable[Leaf]:
    """Masters in float32 that travel as bfloat16, but for the router's bias."""
    for i in range(2):
        yield Leaf(
            f"layers.{i}.weight",
            (width, 12),
            torch.float32,
            kind="numbers",
            cast=torch.bfloat16,
        )
    yield Leaf("router.bias", (width,), torch.float32, kind="numbers")
    yield Leaf("steps", (), torch.int64)


def _halves() -> Iterable[Leaf]:
    yield Leaf("master.weight", (33, 9), torch.float64, kind="numbers", cast=torch.float16)
    yield Leaf("half.weight", (33, 9), torch.bfloat16, kind="numbers", cast=torch.float16)
    yield Leaf("count", (3,), torch.int32)


def _twins(count: int = 6) -> Iterable[Leaf]:
    """Tensors that only their names tell apart."""
    for i in range(count):
        yield Leaf(f"layers.{i}.weight", (64, 8), torch.float32)


def _extra() -> Iterable[Leaf]:
    yield from _layers()
    yield Leaf("layers.0.extra.weight", (4,), torch.float32)


def _reshaped() -> Iterable[Leaf]:
    for leaf in _layers():
        yield Leaf("head.weight", (6, 96), torch.float16) if leaf.name == "head.weight" else leaf


def _retyped() -> Iterable[Leaf]:
    for leaf in _layers():
        yield Leaf("head.weight", (5, 96), torch.bfloat16) if leaf.name == "head.weight" else leaf


def _misspelt() -> Iterable[Leaf]:
    for leaf in _layers():
        yield Leaf(leaf.name.replace("layers.1.up", "layers.1.upp"), leaf.shape, leaf.dtype)


def _escaping() -> Iterable[Leaf]:
    yield Leaf("../outside.weight", (4,), torch.float32)


def _fused(count: int = 2, experts: int = 4, width: int = 5) -> Iterable[Leaf]:
    """Experts as a trainer holds them: all of a layer in one tensor, gate above up."""
    yield Leaf("embed.weight", (7, width), torch.bfloat16)
    for i in range(count):
        yield Leaf(f"layers.{i}.norm.weight", (width,), torch.float32)
        yield Leaf(f"layers.{i}.gate_up", (experts, 6, width), torch.bfloat16)
        yield Leaf(f"layers.{i}.down", (experts, width, 3), torch.float32)


def _unfused(count: int = 2, experts: int = 4, width: int = 5) -> Iterable[Leaf]:
    """The same under checkpoint names: one tensor an expert."""
    for leaf in _fused(count, experts, width):
        stem, _, last = leaf.name.rpartition(".")
        taken = {"gate_up": (("gate", 0, 3), ("up", 3, 6)), "down": (("down", 0, width),)}
        if last not in taken:
            yield leaf
        for name, begin, end in taken.get(last, ()):
            for expert in range(experts):
                yield Leaf(
                    f"{stem}.experts.{expert}.{name}.weight",
                    (end - begin, leaf.shape[2]),
                    leaf.dtype,
                    taken=(leaf, expert, begin, end),
                )


def _unfuse(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a trainer of fused experts does to save a checkpoint, copies and all."""
    saved: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        stem, _, last = key.rpartition(".")
        if last not in ("gate_up", "down"):
            saved[key] = tensor
            continue
        parts = [part.contiguous() for part in tensor.chunk(2 if last == "gate_up" else 1, dim=1)]
        names = ("gate", "up") if last == "gate_up" else ("down",)
        for name, part in zip(names, parts, strict=True):
            for expert, weight in enumerate(part.unbind(0)):
                saved[f"{stem}.experts.{expert}.{name}.weight"] = weight
    return saved


CONVERSIONS = {"fused": _unfuse}
"""By model, how its trainer makes checkpoint tensors of its own."""


MODELS: Mapping[str, Callable[..., Iterable[Leaf]]] = {
    "buffers": _buffers,
    "dtypes": _dtypes,
    "empty": _empty,
    "escaping": _escaping,
    "extra": _extra,
    "fused": _fused,
    "halves": _halves,
    "large": _large,
    "layers": _layers,
    "masters": _masters,
    "misspelt": _misspelt,
    "names": _names,
    "noncontiguous": _noncontiguous,
    "reshaped": _reshaped,
    "retyped": _retyped,
    "scalars": _scalars,
    "specials": _specials,
    "tied": _tied,
    "tiny": _tiny,
    "twins": _twins,
    "unfused": _unfused,
    "uneven": _uneven,
}
"""By the name that scenarios use; each takes its sizes as keyword arguments."""


def model(name: str, sizes: Mapping[str, Any]) -> Model:
    return tuple(MODELS[name](**sizes))


# ------------------------------------------------------------------ values


def _specials_of(dtype: torch.dtype) -> list[int]:
    """Bit patterns that a copy through arithmetic would lose."""
    exponent, mantissa = _EXPONENTS[dtype]
    sign = 1 << (exponent + mantissa)
    top = ((1 << exponent) - 1) << mantissa
    return [
        sign,  # -0.0
        1,  # the smallest subnormal
        sign | ((1 << mantissa) - 1),  # the largest subnormal, negative
        top,  # infinity, where the format has one
        sign | top,
        top | (1 << (mantissa - 1)) | 1,  # a NaN with a payload
        sign | top | (1 << (mantissa - 1)) | 1,
        top | 1,  # a signalling NaN
        sign | top | ((1 << mantissa) - 1),
    ]


def _generator(leaf: Leaf, version: int, seed: int) -> np.random.Generator:
    key = hashlib.blake2b(f"{seed}/{version}/{leaf.name}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))


def _bits(leaf: Leaf, version: int, seed: int) -> Tensor:
    count = math.prod(leaf.shape)
    size = count * leaf.dtype.itemsize
    if not count:
        return torch.empty(leaf.shape, dtype=leaf.dtype)
    raw = bytearray(_generator(leaf, version, seed).bytes(size))
    if leaf.dtype == torch.bool:
        raw = bytearray(byte & 1 for byte in raw)
    if leaf.dtype in _EXPONENTS:
        width = leaf.dtype.itemsize
        for i, pattern in enumerate(_specials_of(leaf.dtype)[: max(0, count - 1)]):
            raw[i * width : (i + 1) * width] = pattern.to_bytes(width, "little")
    return torch.frombuffer(raw, dtype=torch.uint8).view(leaf.dtype).reshape(leaf.shape)


def _numbers(leaf: Leaf, version: int, seed: int) -> Tensor:
    values = _generator(leaf, version, seed).standard_normal(leaf.shape)
    flat = values.reshape(-1)
    specials = [-0.0, 1e-40, -1e-45, float("inf"), 65504.0, 1.0 + 2.0**-9]
    flat[: len(specials)] = specials[: flat.size]
    return torch.from_numpy(values).to(leaf.dtype)


def _stored(leaf: Leaf, version: int, seed: int) -> Tensor:
    """The trainer's values."""
    if leaf.taken is not None:
        fused, expert, begin, end = leaf.taken
        return _stored(fused, version, seed)[expert, begin:end]
    make = _numbers if leaf.kind == "numbers" else _bits
    value = make(leaf, version, seed)
    return value[:, :1].expand(value.shape) if leaf.layout == "expanded" else value


def arriving(leaf: Leaf, version: int, seed: int) -> Tensor:
    """The receiver's values: casts are torch's own."""
    stored = _stored(leaf, version, seed)
    return stored if leaf.cast is None else stored.to(leaf.cast)


def _raw(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


# ------------------------------------------------------------------ both sides' memory


def source(
    leaves: Model,
    version: int,
    seed: int,
    into: dict[str, Tensor] | None,
    cuts: Cuts = whole,
    device: str = "cpu",
) -> dict[str, Tensor]:
    """A trainer rank's tensors with a version in them; in ``into``'s memory when it is given."""
    if into is not None:
        made = into
    else:
        with torch.device(device):
            made = _allocate(leaves, cuts)
    with torch.no_grad():
        for leaf in leaves:
            if leaf.tied is None:
                value = _stored(leaf, version, seed)[piece(leaf, cuts)]
                where = made[leaf.name]
                if leaf.layout == "expanded":
                    where, value = where[:, :1], value[:, :1]
                _put(where, value)
    return made


def _put(where: Tensor, value: Tensor) -> None:
    if where.is_contiguous() and where.numel():
        _raw_view(where).copy_(_raw(value))  # bytes: a copy of floats might quiet a NaN
    elif where.numel():
        where.copy_(value)


def _raw_view(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _allocate(leaves: Model, cuts: Cuts) -> dict[str, Tensor]:
    made: dict[str, Tensor] = {}
    for leaf in leaves:
        if leaf.tied is not None:
            made[leaf.name] = made[leaf.tied]
            continue
        match leaf.layout:
            case "dense":
                made[leaf.name] = _empty_piece(leaf, cuts, leaf.dtype)
            case "strided":
                rows, columns = leaf.shape
                made[leaf.name] = torch.empty(2 * rows, 3 * columns, dtype=leaf.dtype)[::2, ::3]
            case "transposed":
                made[leaf.name] = torch.empty(leaf.shape[::-1], dtype=leaf.dtype).t()
            case "narrowed":
                rows, columns = leaf.shape
                made[leaf.name] = torch.empty(rows, columns + 9, dtype=leaf.dtype)[:, 4:-5]
            case "expanded":
                made[leaf.name] = torch.empty(leaf.shape[0], 1, dtype=leaf.dtype).expand(leaf.shape)
    return made


def _empty_piece(leaf: Leaf, cuts: Cuts, dtype: torch.dtype) -> Tensor:
    return torch.empty([side.stop - side.start for side in piece(leaf, cuts)], dtype=dtype)


def target(leaves: Model, cuts: Cuts = whole, device: str = "cpu") -> dict[str, Tensor]:
    """An inference rank's tensors, filled with what no version has: NaNs, and -1 in integers."""
    made: dict[str, Tensor] = {}
    for leaf in leaves:
        if leaf.tied is not None:
            made[leaf.name] = made[leaf.tied]
            continue
        with torch.device(device):
            made[leaf.name] = _empty_piece(leaf, cuts, leaf.cast or leaf.dtype)
        if made[leaf.name].numel():
            _raw_view(made[leaf.name]).fill_(1 if leaf.dtype == torch.bool else 255)
    return made


def pristine(leaves: Model, held: Mapping[str, Tensor], cuts: Cuts = whole) -> bool:
    """Whether a target is as ``target`` made it."""
    fresh = target(leaves, cuts)
    return all(torch.equal(_raw(held[name]), _raw(value)) for name, value in fresh.items())


def difference(
    leaves: Model, held: Mapping[str, Tensor], version: int, seed: int, cuts: Cuts = whole
) -> str | None:
    """Where a target isn't this version, byte for byte; None when it is."""
    by_name = {leaf.name: leaf for leaf in leaves}
    for leaf in leaves:
        origin = by_name[leaf.tied] if leaf.tied is not None else leaf
        value = arriving(origin, version, seed)[piece(origin, cuts)]
        have, want = _raw(held[leaf.name]), _raw(value)
        if have.shape != want.shape:
            return f"tensor {leaf.name!r} has {have.numel()} bytes, not {want.numel()}"
        if not torch.equal(have, want):
            wrong = int((have != want).sum())
            first = int((have != want).nonzero()[0])
            return (
                f"tensor {leaf.name!r} isn't version {version}: {wrong} of {want.numel()} bytes "
                f"differ, the first at {first} (has {int(have[first]):#04x}, should have "
                f"{int(want[first]):#04x})"
            )
    return None
