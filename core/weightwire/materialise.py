"""Checkpoint tensors made at the trainer, for backends that write whole tensors.

A file that any Hugging Face loader can read holds checkpoint tensors.  Where a
table has views, its tensors are replaced by them, each with one owner that makes
it when its group is staged: no more than a group is ever made at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import msgspec
from torch import Tensor

from weightwire.grouping import make_groups
from weightwire.sources import Spec
from weightwire.table import Shard, TensorEntry, TensorTable
from weightwire.views import View, apply_view

__all__ = ["CheckpointTensors", "checkpoint_table", "whole_holders"]


def checkpoint_table(table: TensorTable, specs: Sequence[Spec], group_bytes: int) -> TensorTable:
    """A table of checkpoint tensors, each whole at one owner.

    The owner holds what the tensor is made of, if any rank does; else it is put
    together there.  Bytes are spread evenly, largest tensors first.

    Args:
        table: of the trainer's own tensors.
        specs: what each trainer rank holds.
    """
    holders = whole_holders(specs)
    carriers = {**{name: name for name in table.index()}, **table.ties}
    entries: list[TensorEntry] = []
    able: list[set[int]] = []  # by entry, the ranks that need nobody else's bytes
    everyone = set(range(table.world_size))
    inner = {source for view in table.views for source in view.sources()}
    named = table.named()
    aliases: dict[str, str] = {}
    for tensor in table.checkpoint():
        if tensor.view is None and tensor.name in table.ties:
            carrier = table.ties[tensor.name]
            if carrier not in inner:
                aliases[tensor.name] = carrier
                continue
        whole = (Shard(0, (0,) * len(tensor.shape), tensor.shape),)
        sources = tensor.view.sources() if tensor.view else {tensor.name}
        dtype = named[min(sources)].dtype
        entries.append(TensorEntry(tensor.name, tensor.shape, dtype, whole))
        ranks = [holders.get(carriers[source], set()) for source in sources]
        able.append(everyone.intersection(*ranks) or everyone)
    loads = [0] * table.world_size
    for i in sorted(range(len(entries)), key=lambda i: (-entries[i].nbytes, i)):
        owner = min(able[i], key=lambda rank: (loads[rank], rank))
        loads[owner] += entries[i].nbytes
        shard = msgspec.structs.replace(entries[i].shards[0], owner=owner)
        entries[i] = msgspec.structs.replace(entries[i], shards=(shard,))
    made = TensorTable(
        world_size=table.world_size,
        tensors=tuple(entries),
        groups=make_groups(entries, group_bytes),
        ties=aliases,
    )
    made.validate()
    return made


def whole_holders(specs: Sequence[Spec]) -> dict[str, set[int]]:
    """By tensor, the ranks that hold all of it."""
    holders: dict[str, set[int]] = {}
    for rank, spec in enumerate(specs):
        for entry in spec.entries:
            if any(math.prod(shard.sizes) == entry.numel for shard in entry.shards):
                holders.setdefault(entry.name, set()).add(rank)
    return holders


class CheckpointTensors(Mapping[str, Tensor]):
    """This rank's tensors, and checkpoint tensors made of them when they are asked for.

    Args:
        tensors: by name; of a shard's shape where it is one.
        views: checkpoint tensors.
        ties: alias to carrier.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], views: Sequence[View], ties: Mapping[str, str]
    ) -> None:
        self._tensors = tensors
        self._views = {view.name: view for view in views}
        self._ties = ties

    def __getitem__(self, name: str) -> Tensor:
        view = self._views.get(name)
        return self.source(name) if view is None else apply_view(view, self.source)

    def makes(self, name: str) -> bool:
        """Whether the tensor is made when it is asked for, in memory of its own perhaps."""
        return name in self._views

    def source(self, name: str) -> Tensor:
        """One of the trainer's own tensors."""
        return self._tensors[self._ties.get(name, name)]

    def __iter__(self) -> Iterator[str]:
        return iter({**self._tensors, **self._views})

    def __len__(self) -> int:
        return len({**self._tensors, **self._views})
