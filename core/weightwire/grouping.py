"""Transfer groups: which tensors travel together, in which order."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from weightwire.errors import ConfigError
from weightwire.table import Group, Part, TensorEntry

__all__ = ["MAX_PARTS", "layer_key", "make_groups"]

MAX_PARTS = 1 << 16
"""Most parts of one tensor: far above what any sensible budget gives."""


def layer_key(name: str) -> tuple[str, int] | None:
    """The prefix before the outermost index in a name, and that index.

    ``model.layers.3.mlp.experts.7.w1`` belongs to ``("model.layers", 3)``.
    """
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdecimal() and len(part) < 10:
            return ".".join(parts[:i]), int(part)
    return None


def make_groups(
    entries: Sequence[TensorEntry], budget: int, *, ordered: bool = False
) -> tuple[Group, ...]:
    """One group per decoder layer, merged up to ``budget`` bytes, split only above it.

    Tensors outside any layer go before the layers when they come before the
    first one in the table, else after the last.  A tensor larger than the
    budget is cut into parts, each in another group: no group exceeds the budget.

    Args:
        ordered: keep to the entries' order, whatever layer they belong to.

    Raises:
        ConfigError: the budget is below one element, or so small that a tensor
            falls into more than ``MAX_PARTS`` parts.
    """
    if budget < 8:
        raise ConfigError(f"group_bytes={budget} is below one element: use at least 8")
    groups: list[list[_Member]] = []
    filled = 0
    for layer in [list(range(len(entries)))] if ordered else _layers(entries):
        members = [member for i in layer for member in _members(i, entries[i], budget)]
        nbytes = sum(member.nbytes for member in members)
        if groups and filled + nbytes <= budget:
            groups[-1].extend(members)
            filled += nbytes
            continue
        groups.append([])
        filled = 0
        for member in members:
            # Two parts of one tensor never fit together: each is as large as it can be.
            if groups[-1] and filled + member.nbytes > budget:
                groups.append([])
                filled = 0
            groups[-1].append(member)
            filled += member.nbytes
    return tuple(
        Group(
            tuple(member.tensor for member in group),
            {member.tensor: member.part for member in group if member.part is not None},
        )
        for group in groups
        if group
    )


class _Member(NamedTuple):
    tensor: int
    part: Part | None
    nbytes: int


def _members(tensor: int, entry: TensorEntry, budget: int) -> list[_Member]:
    if entry.nbytes <= budget:
        return [_Member(tensor, None, entry.nbytes)]
    itemsize = entry.torch_dtype.itemsize
    dim, index_nbytes = 0, entry.nbytes  # one index of each dimension before ``dim``
    while (index_nbytes := index_nbytes // entry.shape[dim]) > budget:
        dim += 1
    step = budget // index_nbytes
    count = math.prod(entry.shape[:dim]) * -(-entry.shape[dim] // step)
    if count > MAX_PARTS:
        raise ConfigError(
            f"group_bytes={budget} cuts tensor {entry.name!r} of {entry.nbytes} bytes into {count} "
            f"parts, more than {MAX_PARTS}: raise it"
        )
    inner = entry.shape[dim + 1 :]
    members = []
    for index in itertools.product(*map(range, entry.shape[:dim])):
        for begin in range(0, entry.shape[dim], step):
            extent = min(step, entry.shape[dim] - begin)
            part = Part((*index, begin, *(0 for _ in inner)), (*(1 for _ in index), extent, *inner))
            members.append(_Member(tensor, part, math.prod(part.sizes) * itemsize))
    return members


def _layers(entries: Sequence[TensorEntry]) -> list[list[int]]:
    before: list[int] = []
    after: list[int] = []
    layers: dict[tuple[str, int], list[int]] = {}
    prefixes: dict[str, int] = {}
    for i, entry in enumerate(entries):
        key = layer_key(entry.name)
        if key is None:
            (after if layers else before).append(i)
            continue
        prefixes.setdefault(key[0], len(prefixes))
        layers.setdefault(key, []).append(i)
    ordered = sorted(layers, key=lambda key: (prefixes[key[0]], key[1]))
    return [part for part in [before, *(layers[key] for key in ordered), after] if part]
