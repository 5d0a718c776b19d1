"""What one rank reads from one owner, as runs of bytes: core's routes, cut up by group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weightwire.cuts import Cuts
from weightwire.layout import ALIGNMENT, Place, lay_out, slot_layout
from weightwire.routes import Routes, Served, route
from weightwire.table import Region, TensorTable

__all__ = ["GroupPlan", "Runs", "extents", "plan_groups", "rebased"]

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


def extents(table: TensorTable, group: int, owner: int) -> tuple[Offsets, Offsets]:
    """First byte and length of each tensor of an owner's slot that isn't empty, in order."""
    places = slot_layout(table, group, owner).places.values()
    found = [(place.begin, place.nbytes) for place in places if place.nbytes]
    both = np.array(found, dtype=np.uint64).reshape(-1, 2)
    return both[:, 0].copy(), both[:, 1].copy()


def plan_groups(table: TensorTable, regions: Sequence[Region]) -> dict[int, GroupPlan]:
    """What to read, by group.  The slot is laid out as core lays it out: region by region."""
    routes = route(Served(table), regions)
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
        owners = _by_owner(routes, int(bounds[group]), int(bounds[group + 1]), places)
        plans[group] = GroupPlan(table, group, tuple(positions), tuple(places), nbytes, owners)
    return plans


def _by_owner(routes: Routes, begin: int, end: int, places: Sequence[Place]) -> dict[int, Runs]:
    owners, first = np.unique(routes.owner[begin:end], return_index=True)
    stops = [*first[1:].tolist(), end - begin]
    filled = np.array([(p.begin, p.nbytes) for p in places if p.nbytes], np.int64).reshape(-1, 2)
    found = {}
    for owner, start, stop in zip(owners.tolist(), first.tolist(), stops, strict=True):
        rows = slice(begin + start, begin + stop)
        found[owner] = _joined(
            routes.source[rows], routes.target[rows], routes.nbytes[rows], filled
        )
    return found


def _joined(
    source: NDArray[np.int64],
    target: NDArray[np.int64],
    nbytes: NDArray[np.int64],
    places: NDArray[np.int64],
) -> Runs:
    """Runs joined over the padding that both slots have between the same two tensors.

    Between the end of a region and the begin of the next one lies nothing of anybody's.
    """
    place = np.searchsorted(places[:, 0], target, side="right") - 1
    begins = target == places[place, 0]
    ends = target + nbytes == places[place].sum(axis=1)
    gap = source[1:] - (source[:-1] + nbytes[:-1])
    joins = (gap == target[1:] - (target[:-1] + nbytes[:-1])) & (gap > 0) & (gap < ALIGNMENT)
    joins &= ends[:-1] & begins[1:]
    first = np.flatnonzero(np.concatenate(([True], ~joins)))
    last = np.concatenate((first[1:] - 1, [len(source) - 1]))
    length = source[last] + nbytes[last] - source[first]
    return Runs(
        source[first].astype(np.uint64),
        target[first].astype(np.uint64),
        length.astype(np.uint64),
    )
