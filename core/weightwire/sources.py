"""What a trainer sends: modules, mappings, or any ``WeightSource``.

Sources are resolved anew at each ``send``: a parameter whose storage was
replaced, offloaded or moved since the last one is read from where it is now.
"""

from __future__ import annotations

import fnmatch
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import msgspec
import torch
from msgspec import Meta
from torch import Tensor, nn

from weightwire.conversion import ModuleViews
from weightwire.devices import device_of
from weightwire.errors import ConfigError, TableMismatch
from weightwire.names import checkpoint_names
from weightwire.placements import LocalBox, LocalShard, local_box, local_part
from weightwire.table import DTYPES, Shard, TensorEntry, dtype_name, validate_tensor_name
from weightwire.views import View

if TYPE_CHECKING:
    from weightwire.streaming import StreamingSource

__all__ = [
    "MappingSource",
    "ModuleSource",
    "Resolved",
    "Resolver",
    "Spec",
    "WeightSource",
    "WireRules",
    "as_source",
    "resolve",
]


class WeightSource(ABC):
    """The weights of one trainer rank.

    ``tensors`` is called once per ``send``, on every trainer rank, and again
    never: what it returns is read until ``send`` returns.  ``views`` follows it.
    """

    @abstractmethod
    def tensors(self) -> Mapping[str, Tensor | LocalShard]:
        """Tensors by name as they are now; order is the table's order.

        Values may be views, of any stride; several names may share storage.  A
        DTensor stands for the shard that lies on this rank.  A trainer that shards
        in a way of its own gives a ``LocalShard``: what it holds, and where that lies.
        """

    @property
    def device(self) -> torch.device:
        """Where transports should stage this rank's tensors, unless they are told otherwise."""
        return torch.device("cpu")

    def views(self, given: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> Sequence[View]:
        """Checkpoint tensors that are made of ``tensors``; by default they are those.

        ``weightwire.views.record_views(given, convert)`` makes them by running the
        trainer's own conversion on tensors without data.

        Args:
            given: global shape and dtype of each tensor, by name.
        """
        return ()


class MappingSource(WeightSource):
    """A mapping of names to tensors, such as a state dict.

    Pass a mapping whose values are replaced between sends, or a function that
    returns one.
    """

    def __init__(self, mapping: Mapping[str, Tensor | LocalShard]) -> None:
        self._mapping = mapping

    def tensors(self) -> Mapping[str, Tensor | LocalShard]:
        return self._mapping

    @property
    def device(self) -> torch.device:
        values = self._mapping.values()
        return device_of(v.local if isinstance(v, LocalShard) else v for v in values)


class ModuleSource(WeightSource):
    """A module: its parameters and persistent buffers, by ``state_dict`` semantics.

    Wrapper prefixes of FSDP, ``torch.compile`` and the like are stripped from
    names at any depth.  Where a ``transformers`` model keeps its weights in another
    layout than its checkpoints (fused experts), it is sent as it lies, with views
    that say what each checkpoint tensor is.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._views = ModuleViews(module)

    def tensors(self) -> Mapping[str, Tensor]:
        state = self._module.state_dict(keep_vars=True)
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        names = checkpoint_names(tensors)
        return {names[name]: value for name, value in tensors.items()}

    @property
    def device(self) -> torch.device:
        return device_of(self._module.parameters())

    def views(self, given: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> Sequence[View]:
        return self._views.of(given)


def as_source(source: nn.Module | Mapping[str, Tensor | LocalShard] | WeightSource) -> WeightSource:
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


class Spec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one trainer rank holds: the table's entries, each with the box that lies here.

    Attributes:
        entries: in order; each has one shard, whose owner says nothing yet.
        ties: alias to carrier.
        views: digest under which this rank's views are in the session, or empty.
        ordered: the entries come in this order; groups keep to it.
    """

    entries: Annotated[tuple[TensorEntry, ...], Meta(max_length=1 << 24)]
    ties: Annotated[dict[str, str], Meta(max_length=1 << 20)]
    views: Annotated[str, Meta(max_length=64)] = ""
    ordered: bool = False


@dataclass(frozen=True)
class Resolved:
    """A source as it is at one ``send``.

    Attributes:
        spec: what this rank holds.
        tensors: this rank's tensor (a shard, where it is sharded) by name.
        views: checkpoint tensors that are made of them.
        stream: what yields the tensors instead, if they come one by one.
    """

    spec: Spec
    tensors: Mapping[str, Tensor]
    views: tuple[View, ...] = ()
    stream: StreamingSource | None = None


class Resolver:
    """Resolves one source for every ``send`` anew.

    While every tensor lies where it lay, with the same shape, strides and placement, what
    was worked out of that still holds: then that is all that is looked at.  It keeps no
    tensor, so that a trainer's memory is free when the trainer gives it up.
    """

    def __init__(self, source: WeightSource, rules: WireRules) -> None:
        self._source = source
        self._rules = rules
        self._seen: list[tuple[object, ...]] = []
        self._spec: Spec | None = None
        self._given: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}

    def resolve(self) -> Resolved:
        """What the source holds now; see ``resolve``."""
        tensors = self._source.tensors()
        items = list(tensors.items())
        with torch.no_grad():
            looked = _look(items)
        seen = [look for look, _ in looked]
        spec = self._spec
        if spec is None or seen != self._seen:
            self._spec = None
            found, given = _resolve(tensors, self._rules)
            self._spec, self._given = found.spec, given
            self._seen = [] if any(local is None for _, local in looked) else seen
        else:
            values = {
                name: local.detach() if local.requires_grad else local
                for (name, _), (_, local) in zip(items, looked, strict=True)
                if name not in spec.ties and local is not None
            }
            found = Resolved(spec, values)
        return replace(found, views=tuple(self._source.views(self._given)))


def _look(
    items: Sequence[tuple[str, Tensor | LocalShard]],
) -> list[tuple[tuple[object, ...], Tensor | None]]:
    """By which it shows that nothing has changed, and each tensor's local part.

    What shows nothing has no local part.
    """
    first: dict[int, int] = {}
    looked: list[tuple[tuple[object, ...], Tensor | None]] = []
    for number, (name, tensor) in enumerate(items):
        local, placed = local_part(tensor)
        if local is None or local.is_meta or local.is_nested or local.layout is not torch.strided:
            looked.append(((name,), None))
            continue
        # Those without memory are told apart by which of them are one object.
        at = local.data_ptr() or (first.setdefault(id(tensor), number), "empty")
        look = (
            name,
            at,
            local.shape,
            local.stride(),
            local.dtype,
            local.device,
            local.untyped_storage().nbytes(),
            local.is_conj(),
            local.is_neg(),
            placed,
        )
        looked.append((look, local))
    return looked


def resolve(source: WeightSource, rules: WireRules) -> Resolved:
    """Read a source: names, shapes, wire dtypes, boxes, ties, views.

    Two names tie when their tensors are one object, or one piece of memory seen
    the same way; the first carries the value.
    """
    return Resolver(source, rules).resolve()


def _resolve(
    tensors: Mapping[str, Tensor | LocalShard], rules: WireRules
) -> tuple[Resolved, dict[str, tuple[tuple[int, ...], torch.dtype]]]:
    """Without views; and the global shape and the dtype of each tensor."""
    if not tensors:
        raise ConfigError("the source has no tensors: is the module empty?")
    rules.check_matches(tensors)
    entries: list[TensorEntry] = []
    values: dict[str, Tensor] = {}
    ties: dict[str, str] = {}
    carriers: dict[tuple[object, ...], str] = {}
    wires: dict[str, str] = {}
    # All at once, and kept: a mapping may make its values on access, and an object that is
    # gone leaves its identity to the next one.
    items = list(tensors.items())
    given: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    boxes = [local_box(validate_tensor_name(name), tensor) for name, tensor in items]
    seen = Counter(id(tensor) for _, tensor in items)
    begins = Counter(box.local.data_ptr() for box in boxes)
    for (name, tensor), box in zip(items, boxes, strict=True):
        given[name] = (box.shape, box.local.dtype)
        carrier = None
        if seen[id(tensor)] > 1 or begins[box.local.data_ptr()] > 1:
            identities = _identities(tensor, box)
            carrier = next((carriers[key] for key in identities if key in carriers), None)
            if carrier is None:
                carriers.update(dict.fromkeys(identities, name))
        try:
            wire = dtype_name(rules.for_tensor(name, box.local.dtype))
        except TableMismatch as error:
            raise TableMismatch(f"tensor {name!r}: {error}") from error
        if carrier is not None:
            if wire != wires[carrier]:
                raise ConfigError(
                    f"tensor {name!r} is tied to {carrier!r} and can't be {wire} on the wire while "
                    f"that is {wires[carrier]}: name both in keep_dtype, or neither"
                )
            ties[name] = carrier
            continue
        wires[name] = wire
        entries.append(TensorEntry(name, box.shape, wire, (Shard(0, box.offsets, box.sizes),)))
        values[name] = box.local
    return Resolved(Spec(tuple(entries), ties), values), given


def _identities(tensor: Tensor | LocalShard, box: LocalBox) -> list[tuple[object, ...]]:
    # An empty shard has no memory to go by, on this rank only: then the object decides.
    found: list[tuple[object, ...]] = [("object", id(tensor))]
    local = box.local
    if local.numel():
        place = (local.device, local.data_ptr(), local.stride(), tuple(local.shape), local.dtype)
        lazily = (local.is_conj(), local.is_neg())  # other values of the same memory
        found.append(("memory", *place, *lazily, box.shape, box.offsets))
    return found
