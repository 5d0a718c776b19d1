"""Which bytes an owner sends to a reader, cut into messages: the same on both ends.

A reader's plan is its regions.  Intersected with an owner's shards they are
*pieces*, boxes of one tensor.  A large piece is a message of its own, split
where it exceeds a bucket, so that it can leave from and land in the tensors
themselves; small ones are packed one after another.  Messages that follow each
other leave together, as a *batch*, which one bucket can hold.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from weightwire.errors import TableMismatch
from weightwire.layout import intersection
from weightwire.table import Region, Shard, TensorTable

__all__ = [
    "Batch",
    "ChannelPlan",
    "GroupShards",
    "Message",
    "Piece",
    "ReadPlan",
    "decode_regions",
    "encode_regions",
    "shards_by_owner",
]

Point = tuple[int, ...]
GroupShards = Sequence[Mapping[int, Shard]]
"""By group and tensor: an owner's shard, or what of it travels in that group."""

LARGE = 256 << 10
"""Bytes from which on a piece travels by itself."""

PACKED = 16 << 20
"""Most bytes of a packed message: over Gloo the next is packed while this one travels."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of one tensor.

    Attributes:
        region: position in the reader's regions.
        tensor: index into the table's tensors.
        begin, sizes: in the tensor's global index space.
        is_shard, is_region: whether it is all of the owner's shard, or of the region;
            with thousands of small tensors cutting each costs more than sending them.
    """

    region: int
    tensor: int
    begin: Point
    sizes: Point
    nbytes: int
    is_shard: bool
    is_region: bool


@dataclass(frozen=True, slots=True)
class Message:
    """Pieces that travel together, one after another without gaps."""

    pieces: tuple[Piece, ...]
    nbytes: int


Batch = tuple[Message, ...]


class ChannelPlan:
    """What one owner sends to the readers of one plan, group by group.

    Args:
        bucket_bytes: most bytes of a batch.

    Attributes:
        nbytes: payload of all groups.
    """

    def __init__(self, groups: Mapping[int, Sequence[Message]], bucket_bytes: int) -> None:
        self._groups = {
            group: tuple(_batches(messages, bucket_bytes)) for group, messages in groups.items()
        }
        self.nbytes = sum(m.nbytes for messages in groups.values() for m in messages)

    def of_group(self, group: int) -> tuple[Batch, ...]:
        return self._groups.get(group, ())

    @property
    def groups(self) -> frozenset[int]:
        return frozenset(self._groups)


class ReadPlan:
    """A reader's regions, to be intersected with owners' shards.

    Args:
        bucket_bytes: most bytes of a message.
    """

    def __init__(self, table: TensorTable, regions: Sequence[Region], bucket_bytes: int) -> None:
        self._table = table
        self._bucket_bytes = bucket_bytes
        self._by_tensor: dict[int, list[tuple[int, Region]]] = {}
        for position, region in enumerate(regions):
            self._by_tensor.setdefault(region.tensor, []).append((position, region))

    def channel(self, held: GroupShards) -> ChannelPlan:
        """Of the owner that holds these shards in each group."""
        groups = {}
        for group, shards in enumerate(held):
            pieces = [
                piece
                for i, shard in shards.items()
                for position, region in self._by_tensor.get(i, ())
                for piece in self._pieces(position, region, shard)
            ]
            if pieces:
                groups[group] = list(self._messages(pieces))
        return ChannelPlan(groups, self._bucket_bytes)

    def _pieces(self, position: int, region: Region, shard: Shard) -> Iterator[Piece]:
        common = intersection(region, shard)
        if common is None:
            return
        begin = common.offsets
        end = tuple(b + n for b, n in zip(begin, common.sizes, strict=True))
        itemsize = self._table.tensors[region.tensor].torch_dtype.itemsize
        for low, high, nbytes in _split(begin, end, itemsize, self._bucket_bytes):
            sizes = tuple(e - b for b, e in zip(low, high, strict=True))
            is_shard, is_region = sizes == shard.sizes, sizes == region.sizes
            yield Piece(position, region.tensor, low, sizes, nbytes, is_shard, is_region)

    def _messages(self, pieces: Sequence[Piece]) -> Iterator[Message]:
        most = min(PACKED, self._bucket_bytes)
        packed: list[Piece] = []
        nbytes = 0
        for piece in pieces:
            if piece.nbytes >= min(LARGE, most):
                yield Message((piece,), piece.nbytes)
                continue
            if nbytes + piece.nbytes > most:
                yield Message(tuple(packed), nbytes)
                packed, nbytes = [], 0
            packed.append(piece)
            nbytes += piece.nbytes
        if packed:
            yield Message(tuple(packed), nbytes)


def _batches(messages: Sequence[Message], most: int) -> Iterator[Batch]:
    """Runs of messages of at most ``most`` bytes together, or of one."""
    batch: list[Message] = []
    nbytes = 0
    for message in messages:
        if batch and nbytes + message.nbytes > most:
            yield tuple(batch)
            batch, nbytes = [], 0
        batch.append(message)
        nbytes += message.nbytes
    if batch:
        yield tuple(batch)


def _split(
    begin: Point, end: Point, itemsize: int, most: int
) -> Iterator[tuple[Point, Point, int]]:
    """Boxes of at most ``most`` bytes, cut along the first dimension that has several rows."""
    sizes = [e - b for b, e in zip(begin, end, strict=True)]
    nbytes = math.prod(sizes) * itemsize
    if nbytes <= most:
        yield begin, end, nbytes
        return
    dim = next(i for i, size in enumerate(sizes) if size > 1)
    row = nbytes // sizes[dim]
    rows = max(1, most // row)
    for at in range(begin[dim], end[dim], rows):
        low = (*begin[:dim], at, *begin[dim + 1 :])
        high = (*end[:dim], min(at + rows, end[dim]), *end[dim + 1 :])
        yield from _split(low, high, itemsize, most)


def shards_by_owner(table: TensorTable) -> Mapping[int, GroupShards]:
    """What each owner serves in each group; a rank has at most one shard of a tensor."""
    found: dict[int, list[dict[int, Shard]]] = {}
    for group, members in enumerate(table.groups):
        for i in members.tensors:
            part = members.parts.get(i)
            for shard in table.tensors[i].shards:
                if part is not None:
                    here = part.meet(shard.offsets, shard.sizes)
                    if here is None:
                        continue
                    shard = Shard(shard.owner, here.offsets, here.sizes)
                if shard.owner not in found:
                    found[shard.owner] = [{} for _ in table.groups]
                found[shard.owner][group][i] = shard
    return found


def encode_regions(regions: Sequence[Region]) -> bytes:
    """Little-endian 64-bit integers: tensor, dimensions, offsets, sizes of each region."""
    flat: list[int] = []
    for region in regions:
        flat += (region.tensor, len(region.sizes), *region.offsets, *region.sizes)
    return np.asarray(flat, dtype="<i8").tobytes()


def decode_regions(payload: bytes, table: TensorTable, who: str) -> list[Region]:
    """Regions that another process planned, each inside its tensor.

    Raises:
        TableMismatch: they aren't; names ``who``.
    """
    if len(payload) % 8:
        raise _wrong(who)
    flat: list[int] = np.frombuffer(payload, dtype="<i8").tolist()
    regions = []
    at = 0
    while at < len(flat):
        if at + 2 > len(flat):
            raise _wrong(who)
        tensor, dims = flat[at], flat[at + 1]
        at += 2
        if not 0 <= tensor < len(table.tensors) or dims != len(table.tensors[tensor].shape):
            raise _wrong(who)
        offsets, sizes = tuple(flat[at : at + dims]), tuple(flat[at + dims : at + 2 * dims])
        at += 2 * dims
        if at > len(flat) or any(
            offset < 0 or size < 0 or offset + size > extent
            for offset, size, extent in zip(
                offsets, sizes, table.tensors[tensor].shape, strict=True
            )
        ):
            raise _wrong(who)
        regions.append(Region(tensor, offsets, sizes))
    if len(set(regions)) != len(regions):
        raise _wrong(who)
    return regions


def _wrong(who: str) -> TableMismatch:
    return TableMismatch(
        f"{who} sent a plan that doesn't fit the tensor table: "
        "run one weightwire version on all sides"
    )
