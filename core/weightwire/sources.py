"""What a trainer sends: modules, mappings, or any ``WeightSource``.

Sources are resolved anew at each ``send``: a parameter whose storage was
replaced, offloaded or moved since the last one is read from where it is now.
"""

from __future__ import annotations

import fnmatch
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from weightwire.errors import ConfigError, UnsupportedOperation
from weightwire.names import checkpoint_names
from weightwire.table import DTYPES, Shard, TensorEntry, dtype_name, validate_tensor_name

__all__ = [
    "MappingSource",
    "ModuleSource",
    "Resolved",
    "WeightSource",
    "WireRules",
    "as_source",
    "resolve",
]


class WeightSource(ABC):
    """The weights of one trainer rank.

    ``tensors`` is called once per ``send``, on every trainer rank, and again
    never: what it returns is read until ``send`` returns.
    """

    @abstractmethod
    def tensors(self) -> Mapping[str, Tensor]:
        """Tensors by name as they are now; order is the table's order.

        Values may be views, of any stride; several names may share storage.
        """


class MappingSource(WeightSource):
    """A mapping of names to tensors, such as a state dict.

    Pass a mapping whose values are replaced between sends, or a function that
    returns one.
    """

    def __init__(self, mapping: Mapping[str, Tensor]) -> None:
        self._mapping = mapping

    def tensors(self) -> Mapping[str, Tensor]:
        return self._mapping


class ModuleSource(WeightSource):
    """A module: its parameters and persistent buffers, by ``state_dict`` semantics.

    Wrapper prefixes of FSDP, ``torch.compile`` and the like are stripped from
    names at any depth.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def tensors(self) -> Mapping[str, Tensor]:
        state = self._module.state_dict(keep_vars=True)
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        names = checkpoint_names(tensors)
        return {names[name]: value for name, value in tensors.items()}


def as_source(source: nn.Module | Mapping[str, Tensor] | WeightSource) -> WeightSource:
    """Wrap what ``open_sender`` was given."""
    if isinstance(source, WeightSource):
        return source
    if isinstance(source, nn.Module):
        return ModuleSource(source)
    if isinstance(source, Mapping):
        return MappingSource(source)
    raise ConfigError(
        f"source is a {type(source).__name__}: give an nn.Module, a mapping of names to tensors, "
        "or a WeightSource"
    )


@dataclass(frozen=True)
class WireRules:
    """Which dtype a floating-point tensor has on the wire.

    Attributes:
        dtype: name of the wire dtype, or None: as stored.
        keep: shell patterns of names that stay as stored, such as ``*.router.bias``.
    """

    dtype: str | None = None
    keep: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.dtype is not None:
            torch_dtype = DTYPES.get(self.dtype)
            if torch_dtype is None or not torch_dtype.is_floating_point:
                floats = ", ".join(name for name, t in DTYPES.items() if t.is_floating_point)
                raise ConfigError(f"wire_dtype={self.dtype!r} isn't a float dtype: use {floats}")
        elif self.keep:
            raise ConfigError("keep_dtype has no effect without wire_dtype: set wire_dtype too")

    def for_tensor(self, name: str, stored: torch.dtype) -> torch.dtype:
        if self.dtype is None or not stored.is_floating_point or self._kept(name):
            return stored
        return DTYPES[self.dtype]

    def check_matches(self, names: Iterable[str]) -> None:
        """Raise ``ConfigError`` for a pattern that matches no name."""
        names = list(names)
        for pattern in self.keep:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
                raise ConfigError(
                    f"keep_dtype pattern {pattern!r} matches no tensor: correct it or take it out"
                )

    def _kept(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.keep)


@dataclass(frozen=True)
class Resolved:
    """A source as it is at one ``send``.

    Attributes:
        entries: the table's entries without owners, in order (every rank the same).
        tensors: this rank's tensor for each entry.
        ties: alias to carrier.
    """

    entries: Sequence[TensorEntry]
    tensors: Sequence[Tensor]
    ties: Mapping[str, str]


def resolve(source: WeightSource, rules: WireRules) -> Resolved:
    """Read a source: names, shapes, wire dtypes, ties.

    Two names tie when their tensors are one piece of memory, seen the same way;
    the first carries the value.
    """
    tensors = source.tensors()
    if not tensors:
        raise ConfigError("the source has no tensors: is the module empty?")
    rules.check_matches(tensors)
    entries: list[TensorEntry] = []
    values: list[Tensor] = []
    ties: dict[str, str] = {}
    carriers: dict[tuple[object, ...], str] = {}
    for name, tensor in tensors.items():
        validate_tensor_name(name)
        _require_plain(name, tensor)
        value = tensor.detach()
        identity = _identity(value)
        if identity is not None and identity in carriers:
            ties[name] = carriers[identity]
            continue
        if identity is not None:
            carriers[identity] = name
        shape = tuple(value.shape)
        wire = dtype_name(rules.for_tensor(name, value.dtype))
        entries.append(TensorEntry(name, shape, wire, (Shard(0, (0,) * len(shape), shape),)))
        values.append(value)
    return Resolved(entries, values, ties)


def _require_plain(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise ConfigError(f"source tensor {name!r} is a {type(tensor).__name__}, not a tensor")
    if type(tensor).__name__ == "DTensor":
        raise UnsupportedOperation(
            f"source tensor {name!r} is a DTensor: sharded sources aren't supported yet; "
            "send full tensors from each rank"
        )
    if tensor.is_meta:
        raise ConfigError(f"source tensor {name!r} is on the meta device: materialise it first")
    if tensor.layout is not torch.strided:
        raise ConfigError(f"source tensor {name!r} has layout {tensor.layout}: send a dense tensor")


def _identity(tensor: Tensor) -> tuple[object, ...] | None:
    if tensor.numel() == 0:
        return None
    return (
        tensor.device,
        tensor.data_ptr(),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
    )
