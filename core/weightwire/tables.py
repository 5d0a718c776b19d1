"""Building a tensor table from a resolved source."""

from __future__ import annotations

import heapq

import msgspec

from weightwire.grouping import make_groups
from weightwire.sources import Resolved
from weightwire.table import Shard, TensorEntry, TensorTable

__all__ = ["build_table"]


def build_table(resolved: Resolved, world_size: int, group_bytes: int) -> TensorTable:
    """The table of weights that every trainer rank holds in full.

    Each tensor is served by one rank; the bytes are spread evenly, largest
    tensors first.  Every rank computes the same table.
    """
    entries = _spread(tuple(resolved.entries), world_size)
    table = TensorTable(
        world_size=world_size,
        tensors=entries,
        groups=make_groups(entries, group_bytes),
        ties=dict(resolved.ties),
    )
    table.validate()
    return table


def _spread(entries: tuple[TensorEntry, ...], world_size: int) -> tuple[TensorEntry, ...]:
    if world_size == 1:
        return entries
    loads = [(0, rank) for rank in range(world_size)]
    owners = [0] * len(entries)
    for i in sorted(range(len(entries)), key=lambda i: (-entries[i].nbytes, i)):
        load, rank = heapq.heappop(loads)
        owners[i] = rank
        heapq.heappush(loads, (load + entries[i].nbytes, rank))
    return tuple(
        msgspec.structs.replace(entry, shards=(Shard(owner, (0,) * len(entry.shape), entry.shape),))
        for entry, owner in zip(entries, owners, strict=True)
    )
