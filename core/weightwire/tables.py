"""Building a tensor table from what each trainer rank holds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from weightwire.blocks import column_blocks
from weightwire.cuts import Cuts
from weightwire.errors import TableMismatch
from weightwire.grouping import make_groups
from weightwire.materialise import checkpoint_table
from weightwire.sources import Spec
from weightwire.table import Shard, TensorEntry, TensorTable
from weightwire.views import View

__all__ = ["build_table", "merge_views"]

Box = tuple[tuple[int, ...], tuple[int, ...]]


def build_table(
    specs: Sequence[Spec],
    group_bytes: int,
    *,
    whole: bool = False,
    column_slices: int = 1,
    views: Sequence[View] = (),
) -> TensorTable:
    """The table of what the ranks hold together; every rank computes the same one.

    A box that several ranks hold is served by one of them: the bytes are spread
    evenly, largest boxes first.

    Args:
        specs: by trainer rank.
        group_bytes: budget of a transfer group.
        whole: each tensor is served by one rank, whoever holds its shards; checkpoint
            tensors are made before they are sent.
        column_slices: in how many slices of columns readers read (``WeightTarget``): large
            matrices lie in slots in as many blocks of columns.
        views: checkpoint tensors, of all ranks.

    Raises:
        TableMismatch: ranks disagree on a tensor, or its boxes don't tile it.
    """
    holders: dict[str, dict[Box, list[int]]] = {}
    entries: dict[str, tuple[TensorEntry, int]] = {}
    ties: dict[str, str] = {}
    for rank, spec in enumerate(specs):
        for entry in spec.entries:
            first, its_rank = entries.setdefault(entry.name, (entry, rank))
            if (first.shape, first.dtype) != (entry.shape, entry.dtype):
                raise TableMismatch(
                    f"tensor {entry.name!r} is {entry.dtype}{list(entry.shape)} on trainer rank "
                    f"{rank} and {first.dtype}{list(first.shape)} on rank {its_rank}: "
                    "give all ranks one model"
                )
            boxes = holders.setdefault(entry.name, {})
            for shard in entry.shards:
                if math.prod(shard.sizes) or not entry.numel:
                    boxes.setdefault((shard.offsets, shard.sizes), []).append(rank)
        for alias, name in spec.ties.items():
            if ties.setdefault(alias, name) != name:
                raise TableMismatch(
                    f"tensor {alias!r} is tied to {name!r} on trainer rank {rank} and to "
                    f"{ties[alias]!r} elsewhere: give all ranks one model"
                )
    for alias in ties:
        if alias in entries:
            raise TableMismatch(
                f"tensor {alias!r} is tied on one trainer rank and not on rank "
                f"{entries[alias][1]}: give all ranks one model"
            )
    tensors = _spread([entry for entry, _ in entries.values()], holders, len(specs))
    table = TensorTable(
        world_size=len(specs),
        tensors=tensors,
        groups=make_groups(tensors, group_bytes, ordered=any(spec.ordered for spec in specs)),
        ties=ties,
        views=tuple(views),
    )
    table.validate()
    if whole and views:
        return checkpoint_table(table, specs, group_bytes)
    if whole and any(len(entry.shards) > 1 for entry in tensors):
        return msgspec.structs.replace(table, tensors=_gather(tensors, len(specs)))
    return _in_blocks(table, column_slices) if column_slices != 1 and not whole else table


def _in_blocks(table: TensorTable, slices: int) -> TensorTable:
    cuts = Cuts(table)
    tensors = (
        msgspec.structs.replace(
            entry, blocks=column_blocks(entry, [part for _, part in cuts.parts(i)], slices)
        )
        for i, entry in enumerate(table.tensors)
    )
    return msgspec.structs.replace(table, tensors=tuple(tensors))


def merge_views(views: Mapping[int, Sequence[View]]) -> tuple[View, ...]:
    """The views of all ranks, each once.

    Args:
        views: by a rank that has them.

    Raises:
        TableMismatch: two ranks make one checkpoint tensor differently.
    """
    merged: dict[str, View] = {}
    for rank, of_rank in sorted(views.items()):
        for view in of_rank:
            if merged.setdefault(view.name, view) != view:
                raise TableMismatch(
                    f"checkpoint tensor {view.name!r} is made otherwise on trainer rank {rank}: "
                    "give all ranks one model"
                )
    return tuple(merged.values())


def _gather(entries: Sequence[TensorEntry], world_size: int) -> tuple[TensorEntry, ...]:
    """Give each tensor that is cut one owner; those that are whole stay where they are."""
    loads = [0] * world_size
    for entry in entries:
        if len(entry.shards) == 1:
            loads[entry.shards[0].owner] += entry.nbytes
    owners: dict[int, int] = {}
    cut = [i for i, entry in enumerate(entries) if len(entry.shards) > 1]
    for i in sorted(cut, key=lambda i: (-entries[i].nbytes, i)):
        owners[i] = min(range(world_size), key=lambda rank: (loads[rank], rank))
        loads[owners[i]] += entries[i].nbytes
    return tuple(
        msgspec.structs.replace(
            entry, shards=(Shard(owners[i], (0,) * len(entry.shape), entry.shape),)
        )
        if i in owners
        else entry
        for i, entry in enumerate(entries)
    )


def _spread(
    entries: Sequence[TensorEntry], holders: dict[str, dict[Box, list[int]]], world_size: int
) -> tuple[TensorEntry, ...]:
    """Give each box one of its holders: the one with the fewest bytes so far."""
    pieces = [
        (math.prod(sizes) * entry.torch_dtype.itemsize, i, (offsets, sizes), ranks)
        for i, entry in enumerate(entries)
        for (offsets, sizes), ranks in holders[entry.name].items()
    ]
    pieces.sort(key=lambda piece: (-piece[0], piece[1], piece[2]))
    loads = [0] * world_size
    shards: list[list[Shard]] = [[] for _ in entries]
    for nbytes, i, (offsets, sizes), ranks in pieces:
        owner = min(ranks, key=lambda rank: (loads[rank], rank))
        loads[owner] += nbytes
        shards[i].append(Shard(owner, offsets, sizes))
    return tuple(
        msgspec.structs.replace(
            entry, shards=tuple(sorted(found, key=lambda s: (s.offsets, s.owner)))
        )
        for entry, found in zip(entries, shards, strict=True)
    )
