"""Transfer groups: which tensors travel together, in which order."""

from __future__ import annotations

from collections.abc import Sequence

from weightwire.errors import ConfigError
from weightwire.table import Group, TensorEntry

__all__ = ["DEFAULT_GROUP_BYTES", "layer_key", "make_groups"]

DEFAULT_GROUP_BYTES = 256 << 20


def layer_key(name: str) -> tuple[str, int] | None:
    """The prefix before the outermost index in a name, and that index.

    ``model.layers.3.mlp.experts.7.w1`` belongs to ``("model.layers", 3)``.
    """
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdecimal() and len(part) < 10:
            return ".".join(parts[:i]), int(part)
    return None


def make_groups(entries: Sequence[TensorEntry], budget: int) -> tuple[Group, ...]:
    """One group per decoder layer, merged up to ``budget`` bytes, split only above it.

    Tensors outside any layer go before the layers when they come before the
    first one in the table, else after the last.  A tensor larger than the
    budget is a group of its own.

    Raises:
        ConfigError: the budget is below one element.
    """
    if budget < 8:
        raise ConfigError(f"group_bytes={budget} is below one element: use at least 8")
    groups: list[list[int]] = []
    filled = 0
    for layer in _layers(entries):
        nbytes = sum(entries[i].nbytes for i in layer)
        if groups and filled + nbytes <= budget:
            groups[-1].extend(layer)
            filled += nbytes
            continue
        groups.append([])
        filled = 0
        for i in layer:
            if groups[-1] and filled + entries[i].nbytes > budget:
                groups.append([])
                filled = 0
            groups[-1].append(i)
            filled += entries[i].nbytes
    return tuple(Group(tuple(group)) for group in groups if group)


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
