"""What a model's ranks read from whom, before anything runs: requests and results.

Engines make such plans with their own tracer and planner, on tensors without data.
They are found by the entry-point group ``weightwire.planners``: a function that
takes a ``PlanRequest`` and yields a ``RankPlan`` for each rank.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weightwire.errors import BackendUnavailable
from weightwire.grouping import layer_key
from weightwire.options import DEFAULT_GROUP_BYTES
from weightwire.routes import Routes, Served, joined, route
from weightwire.sources import Spec
from weightwire.table import Region, Shard, TensorEntry, TensorTable, dtype_name
from weightwire.tables import build_table
from weightwire.topology import Inference, Trainer
from weightwire.views import View

__all__ = [
    "GroupPlan",
    "Plan",
    "PlanRequest",
    "RankPlan",
    "find_planner",
    "rank_plan",
    "trainer_table",
]

ENTRY_POINTS = "weightwire.planners"


@dataclass(frozen=True)
class PlanRequest:
    """What to plan.

    Attributes:
        model: a directory with a Hugging Face ``config.json``; no weights are read.
        trainer: how the trainer holds the model.
        inference: how the engine does.
        ranks: inference ranks to plan.
        wire_dtype: a key of ``weightwire.table.DTYPES``, or None: the config's own.
        group_bytes: budget of a transfer group.
    """

    model: Path
    trainer: Trainer
    inference: Inference
    ranks: tuple[int, ...]
    wire_dtype: str | None = None
    group_bytes: int = DEFAULT_GROUP_BYTES


@dataclass(frozen=True)
class GroupPlan:
    """One transfer group of one rank.

    Attributes:
        group: index into the table's groups.
        name: what travels in it: a layer, or its first tensor.
        nbytes: that the rank reads.
        descriptors: contiguous runs, merged, as a one-sided backend prepares them.
        replayed: operations that bring them into place.
        owners: bytes by the trainer rank that serves them.
    """

    group: int
    name: str
    nbytes: int
    descriptors: int
    replayed: int
    owners: dict[int, int]


@dataclass(frozen=True)
class RankPlan:
    """What one inference rank reads.

    Attributes:
        rank: inference rank.
        groups: those of which it reads something.
        unmatched: checkpoint tensors that it can't use, and parameters that nothing fills.
    """

    rank: int
    groups: tuple[GroupPlan, ...]
    unmatched: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(group.nbytes for group in self.groups)

    @property
    def descriptors(self) -> int:
        return sum(group.descriptors for group in self.groups)

    @property
    def replayed(self) -> int:
        return sum(group.replayed for group in self.groups)

    @property
    def owners(self) -> dict[int, int]:
        """Bytes by trainer rank."""
        total: dict[int, int] = {}
        for group in self.groups:
            for owner, nbytes in group.owners.items():
                total[owner] = total.get(owner, 0) + nbytes
        return dict(sorted(total.items()))


@dataclass
class Plan:
    """The ranks' plans together.

    Attributes:
        request: what was asked for.
        ranks: in the order asked for.
    """

    request: PlanRequest
    ranks: list[RankPlan] = field(default_factory=list)

    @property
    def largest_group_bytes(self) -> int:
        """Bytes of the largest arena that a rank needs: of one group."""
        return max((group.nbytes for rank in self.ranks for group in rank.groups), default=0)

    @property
    def unmatched(self) -> list[str]:
        """Names that no planned rank can match."""
        found = dict.fromkeys(name for rank in self.ranks for name in rank.unmatched)
        return sorted(found)

    def as_json(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        return {
            "ranks": [
                {
                    "rank": rank.rank,
                    "nbytes": rank.nbytes,
                    "descriptors": rank.descriptors,
                    "groups": [dataclasses.asdict(group) for group in rank.groups],
                    "owners": rank.owners,
                    "replayed": rank.replayed,
                }
                for rank in self.ranks
            ],
            "largest_group_bytes": self.largest_group_bytes,
            "unmatched": self.unmatched,
        }


Planner = Callable[[PlanRequest], Iterator[RankPlan]]


def find_planner(engine: str) -> Planner:
    """The planner of an engine that is installed.

    Raises:
        BackendUnavailable: it isn't, or what it needs isn't.
    """
    found = {entry.name: entry for entry in metadata.entry_points(group=ENTRY_POINTS)}
    if engine not in found:
        raise BackendUnavailable(
            f"no planner for engine {engine!r} is installed: there are "
            f"{', '.join(sorted(found)) or 'none'}"
        )
    try:
        planner: Planner = found[engine].load()
    except ImportError as error:
        raise BackendUnavailable(
            f"the planner of {engine!r} needs {error.name or error}: install it"
        ) from error
    return planner


def rank_plan(
    rank: int,
    served: Served,
    regions: Sequence[Region],
    replayed: Mapping[int, int],
    unmatched: Sequence[str] = (),
) -> RankPlan:
    """Count what a rank's target has planned.

    Args:
        served: where the trainer's shards lie.
        regions: what the target reads.
        replayed: operations by group; those of the last, which no group has, count there.
    """
    table = served.table
    routes = route(served, regions)
    descriptors = joined(routes, served, regions)
    counts = np.bincount(descriptors.group, minlength=len(table.groups))
    nbytes, owners = _bytes_by_owner(routes, len(table.groups), table.world_size)
    groups = []
    for group in np.flatnonzero(counts).tolist():
        mine = owners[group]
        groups.append(
            GroupPlan(
                group=group,
                name=group_name(table, group),
                nbytes=int(nbytes[group]),
                descriptors=int(counts[group]),
                replayed=replayed.get(group, 0),
                owners={o: int(mine[o]) for o in np.flatnonzero(mine).tolist()},
            )
        )
    rest = sum(
        n for group, n in replayed.items() if not 0 <= group < len(counts) or not counts[group]
    )
    if groups and rest:
        groups[-1] = dataclasses.replace(groups[-1], replayed=groups[-1].replayed + rest)
    return RankPlan(rank, tuple(groups), tuple(unmatched))


def _bytes_by_owner(routes: Routes, groups: int, world: int) -> tuple[Any, Any]:
    flat = np.bincount(
        routes.group * world + routes.owner, weights=routes.nbytes, minlength=groups * world
    )
    owners = flat.reshape(groups, world)
    return owners.sum(axis=1), owners


def group_name(table: TensorTable, group: int) -> str:
    """The layers of a group, or its first tensor."""
    members = table.groups[group].tensors
    first, last = (layer_key(table.tensors[i].name) for i in (members[0], members[-1]))
    if first is None or last is None or first[0] != last[0]:
        return table.tensors[members[0]].name
    return f"{first[0]}.{first[1]}" + (f" to {last[1]}" if last[1] != first[1] else "")


def trainer_table(
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    ties: Mapping[str, str],
    views: Sequence[View],
    trainer: Trainer,
    group_bytes: int,
    is_expert: Callable[[str], bool],
    column_slices: int,
) -> TensorTable:
    """The table that a trainer of this topology would publish to readers of ranges.

    Args:
        tensors: global shape and wire dtype, by name, without aliases.
        ties: alias to carrier.
        views: checkpoint tensors that are made of others.
        is_expert: whether dimension 0 of a tensor counts experts.
        column_slices: of the engine (``WeightTarget.column_slices``): large matrices lie in
            as many blocks of columns, as one-sided backends stage them.
    """
    specs = []
    for rank in range(trainer.fsdp):
        entries = []
        for name, (shape, dtype) in tensors.items():
            offsets, sizes = _box(shape, rank, trainer, is_expert(name))
            entries.append(TensorEntry(name, shape, dtype_name(dtype), (Shard(0, offsets, sizes),)))
        specs.append(Spec(tuple(entries), dict(ties)))
    specs *= trainer.replicas
    return build_table(specs, group_bytes, column_slices=column_slices, views=views)


def _box(
    shape: tuple[int, ...], rank: int, trainer: Trainer, is_expert: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    offsets, sizes = [0] * len(shape), list(shape)
    if not shape or trainer.fsdp == 1:
        return tuple(offsets), tuple(sizes)
    cuts = [(0, rank, trainer.fsdp)]
    if is_expert and trainer.ep > 1 and len(shape) > 1:
        rest = trainer.fsdp // trainer.ep
        cuts = [(0, rank // rest, trainer.ep), (1, rank % rest, rest)]
    for dim, index, count in cuts:
        step = math.ceil(shape[dim] / count)  # as torch.chunk cuts
        begin = min(index * step, shape[dim])
        offsets[dim], sizes[dim] = begin, min(step, shape[dim] - begin)
    if 0 in sizes:
        offsets = [0] * len(shape)
    return tuple(offsets), tuple(sizes)
