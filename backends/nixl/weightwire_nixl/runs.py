"""What one rank reads from one owner, as runs of bytes: core's routes, cut up by group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weightwire.cuts import Cuts
from weightwire.layout import Place, lay_out, slot_layout
from weightwire.routes import Routes, Served, joined, route
from weightwire.table import Region, TensorTable

__all__ = ["GroupPlan", "Runs", "extents", "in_pieces", "plan_groups", "rebased"]

Offsets = NDArray[np.uint64]


@dataclass(frozen=True)
class Runs:
    """Contiguous pieces, sorted by their place at the owner, neighbours merged.

    Attributes:
        source: first byte in the owner's slot.
        target: first byte in the reader's slot.
        nbytes: length.
    """

    source: Offsets
    target: Offsets
    nbytes: Offsets

    def __len__(self) -> int:
        return len(self.source)


@dataclass(frozen=True)
class GroupPlan:
    """One group of one inference rank.

    Attributes:
        positions: of its regions in the plan, in the order in which they lie in the slot.
        places: of these regions in the slot.
        nbytes: of the slot.
        owners: what is read from whom.
    """

    table: TensorTable
    group: int
    positions: tuple[int, ...]
    places: tuple[Place, ...]
    nbytes: int
    owners: dict[int, Runs]


def rebased(offsets: Offsets, nbytes: Offsets, base: int, device: int) -> NDArray[np.uint64]:
    """Descriptors, N by 3: address, bytes, device."""
    found = np.empty((len(offsets), 3), dtype=np.uint64)
    np.add(offsets, np.uint64(base), out=found[:, 0])
    found[:, 1] = nbytes
    found[:, 2] = device
    return found


def in_pieces(
    here: NDArray[np.uint64], there: NDArray[np.uint64], count: int
) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Descriptors at both ends, cut into at least ``count`` pieces of about equal length."""
    lengths = here[:, 1]
    step = np.uint64(max(1, -(-int(lengths.sum()) // count)))
    pieces = np.maximum(np.uint64(1), (lengths + step - np.uint64(1)) // step).astype(np.int64)
    which = np.repeat(np.arange(len(here)), pieces)
    first = np.repeat(np.cumsum(pieces) - pieces, pieces)
    begin = (np.arange(len(which)) - first).astype(np.uint64) * step
    found = []
    for end in (here, there):
        cut = end[which]
        cut[:, 0] += begin
        cut[:, 1] = np.minimum(step, lengths[which] - begin)
        found.append(cut)
    return found[0], found[1]


def extents(table: TensorTable, group: int, owner: int) -> tuple[Offsets, Offsets]:
    """First byte and length of each tensor of an owner's slot that isn't empty, in order."""
    places = slot_layout(table, group, owner).places.values()
    found = [(place.begin, place.nbytes) for place in places if place.nbytes]
    both = np.array(found, dtype=np.uint64).reshape(-1, 2)
    return both[:, 0].copy(), both[:, 1].copy()


def plan_groups(table: TensorTable, regions: Sequence[Region]) -> dict[int, GroupPlan]:
    """What to read, by group.  The slot is laid out as core lays it out: region by region."""
    served = Served(table)
    routes = joined(route(served, regions), served, regions)
    bounds = np.searchsorted(routes.group, np.arange(len(table.groups) + 1))
    cuts = Cuts(table)
    by_group: dict[int, dict[int, list[int]]] = {}
    for position, region in enumerate(regions):
        members = by_group.setdefault(cuts.group_of(region), {})
        members.setdefault(region.tensor, []).append(position)
    plans = {}
    for group in sorted(by_group):
        positions = [p for i in table.groups[group].tensors for p in by_group[group].get(i, ())]
        places, nbytes = lay_out(
            [(table.tensors[regions[p].tensor].torch_dtype, regions[p].sizes) for p in positions]
        )
        owners = _by_owner(routes, int(bounds[group]), int(bounds[group + 1]))
        plans[group] = GroupPlan(table, group, tuple(positions), tuple(places), nbytes, owners)
    return plans


def _by_owner(routes: Routes, begin: int, end: int) -> dict[int, Runs]:
    owners, first = np.unique(routes.owner[begin:end], return_index=True)
    stops = [*first[1:].tolist(), end - begin]
    found = {}
    for owner, start, stop in zip(owners.tolist(), first.tolist(), stops, strict=True):
        rows = slice(begin + start, begin + stop)
        found[owner] = Runs(
            routes.source[rows].astype(np.uint64),
            routes.target[rows].astype(np.uint64),
            routes.nbytes[rows].astype(np.uint64),
        )
    return found
