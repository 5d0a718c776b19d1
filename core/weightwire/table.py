"""The tensor table: what a trainer publishes for one layout of its weights.

A table is a value: two tables with equal content have equal digests, on every
rank and in every process.  It holds tensors with their shards, transfer groups
in order, ties, and checkpoint views.  Nothing from the other side is used before
``validate``.
"""

from __future__ import annotations

import functools
import hashlib
import math
import operator
import random
from collections.abc import Sequence
from typing import Annotated

import msgspec
import torch
from msgspec import Meta

from weightwire.errors import TableMismatch
from weightwire.views import View, shape_of

__all__ = [
    "DTYPES",
    "MAX_DIMS",
    "MAX_NAME",
    "CheckpointTensor",
    "Group",
    "Part",
    "Region",
    "Shard",
    "TensorEntry",
    "TensorTable",
    "dtype_from_name",
    "dtype_name",
    "tiles",
    "validate_tensor_name",
]

MAX_NAME = 1024
MAX_DIMS = 16
MAX_BLOCKS = 64
_MAX_ELEMENTS = 1 << 56
_PRIME = (1 << 61) - 1
_RANDOM = random.SystemRandom()  # what the other side can't foresee

DTYPES: dict[str, torch.dtype] = {
    "bool": torch.bool,
    "uint8": torch.uint8,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
"""Dtypes that travel, by the name used in tables and configs."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """The table's name of a dtype; ``TableMismatch`` when it can't travel."""
    try:
        return _NAMES[dtype]
    except KeyError:
        raise TableMismatch(
            f"dtype {dtype} can't travel: cast the tensor to one of {', '.join(DTYPES)}"
        ) from None


def dtype_from_name(name: str) -> torch.dtype:
    """The torch dtype that a table's name stands for."""
    try:
        return DTYPES[name]
    except KeyError:
        raise TableMismatch(
            f"unknown wire dtype {name!r}: this weightwire knows {', '.join(DTYPES)}; upgrade it"
        ) from None


def validate_tensor_name(name: str) -> str:
    """Return ``name`` if it is fit for a table, else raise ``TableMismatch``.

    Names travel into headers, indices and messages, and a backend may use them
    in paths: no control characters, no absolute path, no ``..`` component.
    """
    if not isinstance(name, str):
        raise TableMismatch(f"tensor name {name!r} isn't a string: name tensors by strings")
    return _validated(name)


@functools.lru_cache(maxsize=1 << 17)
def _validated(name: str) -> str:
    if not name or len(name) > MAX_NAME:
        raise TableMismatch(
            f"tensor name {name[:64]!r} has {len(name)} characters: use 1 to {MAX_NAME}"
        )
    if not name.isprintable():
        raise TableMismatch(f"tensor name {name!r} has unprintable characters: rename the tensor")
    parts = name.replace("\\", "/").split("/")
    if name[0] in "/\\" or ".." in parts or "." in parts or "" in parts:
        raise TableMismatch(
            f"tensor name {name!r} reads as a path that leaves its directory: rename the tensor"
        )
    return name


Index = Annotated[int, Meta(ge=0, le=_MAX_ELEMENTS)]
Dims = Annotated[tuple[Index, ...], Meta(max_length=MAX_DIMS)]


class Shard(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A box of one tensor that one trainer rank serves.

    Attributes:
        owner: trainer rank that serves it.
        offsets: first index in each dimension of the global tensor.
        sizes: extent in each dimension.
    """

    owner: Annotated[int, Meta(ge=0, le=1 << 20)]
    offsets: Dims
    sizes: Dims


class TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One tensor on the wire.

    Attributes:
        name: checkpoint name.
        shape: global shape, in elements.
        dtype: wire dtype, a key of ``DTYPES``.
        shards: disjoint boxes that together cover the tensor.
        blocks: equal blocks of columns in which shards lie in slots, one after
            another; with 1 they lie row by row.
    """

    name: Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
    shape: Dims
    dtype: Annotated[str, Meta(max_length=32)]
    shards: Annotated[tuple[Shard, ...], Meta(max_length=1 << 20)]
    blocks: Annotated[int, Meta(ge=1, le=MAX_BLOCKS)] = 1

    @property
    def torch_dtype(self) -> torch.dtype:
        return dtype_from_name(self.dtype)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.torch_dtype.itemsize


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A box of a tensor that is one contiguous range of its row-major elements.

    Attributes:
        offsets: first index in each dimension.
        sizes: extent in each dimension, in elements.
    """

    offsets: Dims
    sizes: Dims

    def meet(self, offsets: Sequence[int], sizes: Sequence[int]) -> Part | None:
        """The elements that this box and another one have in common, or None."""
        begins = tuple(map(max, self.offsets, offsets))
        ends = [
            min(a + m, b + n)
            for a, m, b, n in zip(self.offsets, self.sizes, offsets, sizes, strict=True)
        ]
        extents = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
        return Part(begins, extents) if all(extent > 0 for extent in extents) else None

    def is_tiled_by(self, boxes: Sequence[tuple[Sequence[int], Sequence[int]]]) -> bool:
        """Whether boxes (offsets, sizes) hold every element of this one exactly once.

        Boxes that stick out of it don't.
        """
        inside = all(
            len(offsets) == len(sizes) == len(self.sizes)
            and all(
                0 <= begin <= at and at + size <= begin + extent
                for at, size, begin, extent in zip(
                    offsets, sizes, self.offsets, self.sizes, strict=True
                )
            )
            for offsets, sizes in boxes
        )
        return inside and tiles(
            self.sizes,
            [(tuple(map(operator.sub, at, self.offsets)), sizes) for at, sizes in boxes],
        )


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A transfer group: the unit of staging, announcing, verifying and replay.

    Attributes:
        tensors: indices into the table's tensors.  A tensor larger than the budget
            is in several groups, in each with one part of it.
        parts: by tensor index, the part that travels in this group, for the
            tensors that are cut; the others are here whole.
    """

    tensors: Annotated[tuple[int, ...], Meta(max_length=1 << 24)]
    parts: Annotated[dict[int, Part], Meta(max_length=1 << 24)] = {}


class Region(msgspec.Struct, frozen=True, array_like=True):
    """A box of one tensor that one inference rank reads.

    Attributes:
        tensor: index into the table's tensors.
        offsets: first index in each dimension.
        sizes: extent in each dimension, in elements.
    """

    tensor: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, index: int, entry: TensorEntry) -> Region:
        """The region that is the whole tensor."""
        return cls(index, (0,) * len(entry.shape), entry.shape)


class CheckpointTensor(msgspec.Struct, frozen=True):
    """A tensor under a name that an engine loads.

    Attributes:
        name: checkpoint name.
        shape: in elements.
        dtype: wire dtype.
        view: how it is made of the table's tensors, or None: it is one of them, or
            an alias of one.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    view: View | None = None


class TensorTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a trainer publishes for one layout.

    Attributes:
        world_size: number of trainer ranks.
        tensors: in a fixed order; a tensor's position is its index.
        groups: transfer groups, in the order in which they travel.
        ties: alias name to the name of the tensor that carries its value.
        views: checkpoint tensors that are made of others.  A tensor of which a view
            is made isn't a checkpoint tensor itself, unless a view has its name.
    """

    world_size: Annotated[int, Meta(ge=1, le=1 << 20)]
    tensors: Annotated[tuple[TensorEntry, ...], Meta(max_length=1 << 24)]
    groups: Annotated[tuple[Group, ...], Meta(max_length=1 << 24)]
    ties: Annotated[dict[str, str], Meta(max_length=1 << 20)] = {}
    views: Annotated[tuple[View, ...], Meta(max_length=1 << 24)] = ()

    @property
    def nbytes(self) -> int:
        """Payload of one version, in bytes; ties count once."""
        return sum(entry.nbytes for entry in self.tensors)

    @property
    def max_group_nbytes(self) -> int:
        """Bytes of the largest transfer group."""
        return max((self.group_nbytes(i) for i in range(len(self.groups))), default=0)

    def group_nbytes(self, group: int) -> int:
        """Bytes of one transfer group."""
        members = self.groups[group]
        return sum(
            self.tensors[i].nbytes
            if i not in members.parts
            else math.prod(members.parts[i].sizes) * self.tensors[i].torch_dtype.itemsize
            for i in members.tensors
        )

    def part(self, group: int, tensor: int) -> Part:
        """The box of a tensor that travels in a group: all of it, unless it is cut."""
        cut = self.groups[group].parts.get(tensor)
        shape = self.tensors[tensor].shape
        return Part((0,) * len(shape), shape) if cut is None else cut

    def index(self) -> dict[str, int]:
        """Position of each tensor by name; aliases are not included."""
        return {entry.name: i for i, entry in enumerate(self.tensors)}

    def names(self) -> list[str]:
        """Every name of the trainer's: tensors, then aliases."""
        return [entry.name for entry in self.tensors] + list(self.ties)

    def named(self) -> dict[str, TensorEntry]:
        """The tensor that has each name, or that carries an alias's value."""
        return {name: self.tensors[i] for name, i in self._positions().items()}

    def _positions(self) -> dict[str, int]:
        index = self.index()
        index.update({alias: index[name] for alias, name in self.ties.items()})
        return index

    def checkpoint(self) -> list[CheckpointTensor]:
        """The checkpoint tensors, in the order in which the bytes of each are complete.

        Aliases come right behind the tensor that carries their value.
        """
        positions = self._positions()
        turn = {i: n for n, i in enumerate(i for group in self.groups for i in group.tensors)}
        shapes = {name: self.tensors[i].shape for name, i in positions.items()}
        inner = {source for view in self.views for source in view.sources()}
        found: list[tuple[int, CheckpointTensor]] = []
        for name, i in positions.items():
            if name not in inner:
                entry = self.tensors[i]
                found.append((turn[i], CheckpointTensor(name, entry.shape, entry.torch_dtype)))
        for view in self.views:
            parts = [positions[part.source] for part in view.parts]
            dtype = self.tensors[parts[0]].torch_dtype
            tensor = CheckpointTensor(view.name, shape_of(view, shapes), dtype, view)
            found.append((max(turn[i] for i in parts), tensor))
        return [tensor for _, tensor in sorted(found, key=lambda item: item[0])]

    def encode(self) -> bytes:
        """Canonical bytes of the table."""
        groups = (
            msgspec.structs.replace(group, parts=dict(sorted(group.parts.items())))
            if len(group.parts) > 1
            else group
            for group in self.groups
        )
        ties = dict(sorted(self.ties.items()))
        # msgspec sorts dicts of strings only.
        return msgspec.msgpack.encode(
            msgspec.structs.replace(self, groups=tuple(groups), ties=ties)
        )

    def digest(self) -> str:
        """Hex digest of the canonical bytes: equal tables have equal digests."""
        return hashlib.blake2b(self.encode(), digest_size=16).hexdigest()

    @classmethod
    def decode(cls, payload: bytes) -> TensorTable:
        """Parse and validate bytes that came from another process.

        Raises:
            TableMismatch: malformed, or its parts contradict each other.
        """
        try:
            table = msgspec.msgpack.decode(payload, type=cls)
        except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
            raise TableMismatch(
                f"tensor table can't be read ({error}): run one weightwire version on both sides"
            ) from error
        table.validate()
        return table

    def validate(self) -> None:
        """Check what types can't: names, groups, shard coverage, ties.

        Raises:
            TableMismatch: naming the first tensor that is wrong.
        """
        seen: set[str] = set()
        for entry in self.tensors:
            validate_tensor_name(entry.name)
            if entry.name in seen:
                raise TableMismatch(f"tensor {entry.name!r} is in the table twice: names are keys")
            seen.add(entry.name)
            if entry.blocks > 1 and (not entry.shape or entry.shape[-1] % entry.blocks):
                raise TableMismatch(
                    f"tensor {entry.name!r} of shape {entry.shape} can't lie in {entry.blocks} "
                    "blocks of columns: run one weightwire version on both sides"
                )
            if entry.torch_dtype.itemsize * entry.numel > _MAX_ELEMENTS:
                raise TableMismatch(f"tensor {entry.name!r} of shape {entry.shape} is too large")
            _validate_shards(entry, self.world_size)
        for alias, name in self.ties.items():
            validate_tensor_name(alias)
            if alias in seen or name not in seen:
                raise TableMismatch(
                    f"tie {alias!r} -> {name!r} doesn't name one tensor and one alias"
                )
        self._validate_views()
        self._validate_groups()

    def _validate_groups(self) -> None:
        whole: list[int] = []
        parts: dict[int, list[Part]] = {}
        for group in self.groups:
            if len(set(group.tensors)) != len(group.tensors) or not (
                group.parts.keys() <= set(group.tensors)
            ):
                raise TableMismatch("a transfer group names a tensor twice, or a part of no tensor")
            whole.extend(i for i in group.tensors if i not in group.parts)
            for i, part in group.parts.items():
                parts.setdefault(i, []).append(part)
        if sorted([*whole, *parts]) != list(range(len(self.tensors))):
            raise TableMismatch("transfer groups don't hold every tensor exactly once")
        for i, found in parts.items():
            entry = self.tensors[i]
            if entry.blocks > 1 and any(part.sizes[-1:] != entry.shape[-1:] for part in found):
                raise TableMismatch(
                    f"tensor {entry.name!r} lies in blocks of columns and its rows are cut: "
                    "run one weightwire version on both sides"
                )
            if not all(_is_part(entry.shape, part) for part in found) or not tiles(
                entry.shape, [(part.offsets, part.sizes) for part in found]
            ):
                raise TableMismatch(
                    f"tensor {entry.name!r}: its parts in the transfer groups don't make it up"
                )

    def _validate_views(self) -> None:
        if not self.views:
            return
        positions = self._positions()
        shapes = {name: self.tensors[i].shape for name, i in positions.items()}
        inner = {source for view in self.views for source in view.sources()}
        seen: set[str] = set()
        for view in self.views:
            validate_tensor_name(view.name)
            if view.name in seen or (view.name in positions and view.name not in inner):
                raise TableMismatch(
                    f"checkpoint tensor {view.name!r} is in the table twice: names are keys"
                )
            seen.add(view.name)
            shape = shape_of(view, shapes)
            if len(shape) > MAX_DIMS or math.prod(shape) > _MAX_ELEMENTS:
                raise TableMismatch(
                    f"checkpoint tensor {view.name!r} of shape {shape} is too large: "
                    "run one weightwire version on both sides"
                )
            dtypes = {self.tensors[positions[part.source]].dtype for part in view.parts}
            if len(dtypes) > 1:
                raise TableMismatch(
                    f"checkpoint tensor {view.name!r} is made of {', '.join(sorted(dtypes))}: "
                    "name all of its parts in keep_dtype, or none"
                )


def _is_part(shape: Sequence[int], part: Part) -> bool:
    """Whether a box lies in a tensor, isn't empty and is one contiguous range of it."""
    if not len(part.offsets) == len(part.sizes) == len(shape) or not all(part.sizes):
        return False
    if any(o + n > extent for o, n, extent in zip(part.offsets, part.sizes, shape, strict=True)):
        return False
    dim = next((d for d, n in enumerate(part.sizes) if n > 1), len(shape))
    return part.sizes[dim + 1 :] == tuple(shape[dim + 1 :])


def _validate_shards(entry: TensorEntry, world_size: int) -> None:
    volume = 0
    rank = len(entry.shape)
    boxes: list[Shard] = []
    for shard in entry.shards:
        if (
            shard.owner >= world_size
            or len(shard.offsets) != rank
            or len(shard.sizes) != rank
            or any(
                o + s > n for o, s, n in zip(shard.offsets, shard.sizes, entry.shape, strict=True)
            )
        ):
            raise TableMismatch(f"tensor {entry.name!r}: shard {shard} lies outside {entry.shape}")
        size = math.prod(shard.sizes)
        volume += size
        if size:
            boxes.append(shard)
    if volume != entry.numel:
        raise TableMismatch(
            f"tensor {entry.name!r}: shards hold {volume} of {entry.numel} elements; "
            "every element needs exactly one owner"
        )
    if not tiles(entry.shape, [(box.offsets, box.sizes) for box in boxes]):
        raise TableMismatch(
            f"tensor {entry.name!r}: its shards overlap; every element needs exactly one owner"
        )


def tiles(shape: Sequence[int], boxes: Sequence[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Whether boxes (offsets, sizes) inside ``shape`` hold every element exactly once.

    Each index of each dimension gets a random weight and each element the
    product of its indices' weights, modulo a prime: the boxes' weights add up to
    that of the whole.  Boxes that don't tile it pass by a chance of less than
    2**-56 (Schwartz 1980), in time linear in their number.
    """
    if sum(math.prod(sizes) for _, sizes in boxes) != math.prod(shape):
        return False
    if sum(1 for _, sizes in boxes if math.prod(sizes)) < 2:
        return True
    # Only sums over ranges are needed: the sum below each boundary is the random number.
    below: list[dict[int, int]] = [{0: 0} for _ in shape]

    def weight(offsets: Sequence[int], sizes: Sequence[int]) -> int:
        product = 1
        for sums, begin, size in zip(below, offsets, sizes, strict=True):
            ends = [sums.setdefault(i, _RANDOM.randrange(_PRIME)) for i in (begin, begin + size)]
            product = product * (ends[1] - ends[0]) % _PRIME
        return product

    parts = sum(weight(offsets, sizes) for offsets, sizes in boxes) % _PRIME
    return parts == weight((0,) * len(shape), shape)
