"""Which tensor lies in which file, at which offset: a pure function of the table.

All trainer ranks and all receivers compute it for themselves and agree.  A file
has one writer, the rank that owns its tensors.  Files are safetensors: a length
(u64, little-endian), a JSON header padded with spaces, then the data without
gaps.  The format wants tensors aligned to their dtype, so wider dtypes come first.
"""

from __future__ import annotations

import heapq
import json
import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightwire.cuts import Cuts
from weightwire.errors import TableMismatch, UnsupportedOperation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightwire.table import TensorEntry, TensorTable

__all__ = [
    "INDEX_NAME",
    "MAX_FILES_PER_RANK",
    "Layout",
    "Piece",
    "Place",
    "ShardFile",
    "plan_layout",
]

INDEX_NAME = "model.safetensors.index.json"
MAX_FILES_PER_RANK = 64

_MAX_FILE_NBYTES = 4 << 30  # loaders go file by file, in parallel where there are several
_MAX_HEADER_NBYTES = 100_000_000  # safetensors refuses longer ones
_DATA_ALIGNMENT = 4096  # page-aligned data: chunks are whole pages

_SAFETENSORS_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
}


@dataclass(frozen=True)
class Place:
    """Where a tensor's bytes lie.

    Attributes:
        file: index into the layout's files.
        offset: first byte, from the start of the file.
        nbytes: bytes.
    """

    file: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Piece:
    """What of a tensor travels in one transfer group: one range of its bytes.

    Attributes:
        group: index into the table's groups.
        begin: first byte, from the start of the tensor.
        nbytes: bytes.
    """

    group: int
    begin: int
    nbytes: int


@dataclass(frozen=True)
class ShardFile:
    """One safetensors file.

    Attributes:
        name: base name.
        owner: trainer rank that writes it.
        tensors: table indices, in the order of their data.
        header: its first bytes, up to the data.
        nbytes: size of the whole file.
    """

    name: str
    owner: int
    tensors: tuple[int, ...]
    header: bytes
    nbytes: int


@dataclass(frozen=True)
class Layout:
    """The files of every version that follows one table.

    Attributes:
        files: in the order of their names.
        places: by table index.
        owners: trainer rank that writes the tensor, by table index.
        pieces: by table index, in the order of their bytes; one, unless the tensor
            is cut over several groups.
    """

    files: tuple[ShardFile, ...]
    places: tuple[Place, ...]
    owners: tuple[int, ...]
    pieces: tuple[tuple[Piece, ...], ...]

    def piece(self, tensor: int, group: int) -> Piece | None:
        """What of a tensor travels in a group, if anything."""
        return next((piece for piece in self.pieces[tensor] if piece.group == group), None)


def plan_layout(table: TensorTable, files_per_rank: int) -> Layout:
    """Lay the table's tensors out.

    Args:
        table: validated.
        files_per_rank: files over which a rank spreads its tensors, group by
            group, so that the threads of one ``put`` write to different files.

    Raises:
        UnsupportedOperation: a tensor has more than one owner, or a header would
            be larger than safetensors allows.
        TableMismatch: a name that safetensors reserves.
    """
    owners = tuple(_owner(entry) for entry in table.tensors)
    owned: dict[int, list[list[int]]] = defaultdict(list)
    dealt: set[int] = set()
    for group in table.groups:
        by_owner: dict[int, list[int]] = defaultdict(list)
        for tensor in group.tensors:
            if tensor in dealt:
                continue  # another part of a tensor that is cut over several groups
            dealt.add(tensor)
            by_owner[owners[tensor]].append(tensor)
        for owner, tensors in by_owner.items():
            owned[owner].append(tensors)
    bins: list[tuple[int, list[int]]] = []
    for owner in sorted(owned):
        bins += [(owner, members) for members in _spread(table, owned[owner], files_per_rank)]

    places: dict[int, Place] = {}
    files: list[ShardFile] = []
    for position, (owner, members) in enumerate(bins):
        members.sort(key=lambda tensor: -table.tensors[tensor].torch_dtype.itemsize)
        name = f"model-{position + 1:05d}-of-{len(bins):05d}.safetensors"
        header = _header(table, members, name)
        offset = len(header)
        for tensor in members:
            nbytes = table.tensors[tensor].nbytes
            places[tensor] = Place(position, offset, nbytes)
            offset += nbytes
        files.append(ShardFile(name, owner, tuple(members), header, offset))
    cuts = Cuts(table)
    return Layout(
        tuple(files),
        tuple(places[i] for i in range(len(owners))),
        owners,
        tuple(_pieces(cuts, i, entry) for i, entry in enumerate(table.tensors)),
    )


def _pieces(cuts: Cuts, tensor: int, entry: TensorEntry) -> tuple[Piece, ...]:
    itemsize = entry.torch_dtype.itemsize
    found = []
    begin = 0
    for group, part in cuts.parts(tensor):
        nbytes = math.prod(part.sizes) * itemsize
        found.append(Piece(group, begin, nbytes))
        begin += nbytes
    return tuple(found)


def _owner(entry: TensorEntry) -> int:
    if entry.name == "__metadata__":
        raise TableMismatch(
            f"tensor name {entry.name!r} is reserved by safetensors: rename the tensor"
        )
    holders = [shard for shard in entry.shards if all(shard.sizes)]
    if len(holders) > 1:
        raise UnsupportedOperation(
            f"tensor {entry.name!r} has {len(holders)} shards: the filesystem backend writes "
            "tensors with one owner; gather it, or choose another backend"
        )
    if holders:
        return holders[0].owner
    return entry.shards[0].owner if entry.shards else 0


def _spread(
    table: TensorTable, groups: Sequence[Sequence[int]], files_per_rank: int
) -> list[list[int]]:
    """Deal each group's tensors out, largest first, to the file with least of this group."""
    tensors = [tensor for group in groups for tensor in group]
    total = sum(table.tensors[tensor].nbytes for tensor in tensors)
    count = min(len(tensors), max(files_per_rank, -(-total // _MAX_FILE_NBYTES)))
    members: list[list[int]] = [[] for _ in range(count)]
    filled = [0] * count
    for group in groups:
        heap = [(0, filled[i], i) for i in range(count)]
        heapq.heapify(heap)
        for tensor in sorted(group, key=lambda t: -table.tensors[t].nbytes):
            nbytes = table.tensors[tensor].nbytes
            of_group, _, i = heap[0]
            members[i].append(tensor)
            filled[i] += nbytes
            heapq.heapreplace(heap, (of_group + nbytes, filled[i], i))
    return [file for file in members if file]


def _header(table: TensorTable, members: Sequence[int], name: str) -> bytes:
    content: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for tensor in members:
        entry = table.tensors[tensor]
        end = begin + entry.nbytes
        content[entry.name] = {
            "dtype": _SAFETENSORS_DTYPES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _DATA_ALIGNMENT)
    if len(text) > _MAX_HEADER_NBYTES:
        raise UnsupportedOperation(
            f"the header of {name} would have {len(text)} bytes, more than safetensors reads: "
            "raise `files_per_rank`"
        )
    return len(text).to_bytes(8, "little") + text
