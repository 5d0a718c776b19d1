"""What a load did, as data: operations on named tensors, in order.

Views need no operation of their own: whatever was viewed, an operand is a
strided extent of a storage.  So a chain of views on a source is one extent, and
the first operation that makes new storage (a cast, a copy, arithmetic) is the
first instruction: what is before it can be read, what is after it is replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from weightwire.trace.cover import Cover, Extent

__all__ = ["Instruction", "Kind", "LazyWeight", "Ref", "Tape"]


@dataclass(frozen=True)
class LazyWeight:
    """A tensor that owns no data, as a loader is given it.

    Attributes:
        name: checkpoint name.
        shape: full shape.
        dtype: wire dtype.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def tensor(self) -> Tensor:
        """A stand-in on the meta device: shape, strides and dtype, and no memory."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


class Kind(Enum):
    """What a storage stands for."""

    SOURCE = "source"
    DESTINATION = "destination"
    VALUE = "value"


class Ref(NamedTuple):
    """A strided view of one storage.

    Attributes:
        kind: of the storage.
        name: checkpoint name, destination's key, or a value's number.
        extent: in elements of ``dtype``, from the storage's begin.
        dtype: as which its bytes are read.
    """

    kind: Kind
    name: str | int
    extent: Extent
    dtype: torch.dtype

    @property
    def storage(self) -> tuple[Kind, str | int]:
        return self.kind, self.name

    @property
    def span(self) -> tuple[int, int]:
        """First byte of the storage that it touches, and the one after its last."""
        item = self.dtype.itemsize
        if 0 in self.extent.sizes:
            return self.extent.offset * item, self.extent.offset * item
        reach = sum(
            (size - 1) * stride
            for size, stride in zip(self.extent.sizes, self.extent.strides, strict=True)
        )
        return self.extent.offset * item, (self.extent.offset + reach + 1) * item


@dataclass(frozen=True)
class Instruction:
    """One operation.

    Attributes:
        func: the operator.
        args, kwargs: its arguments, tensors replaced by ``Ref``.
        reads: operands whose elements have influence.
        writes: operands that it changes.
        outputs: fresh values, in the order of the result's tensors; None where a
            result is a view of an operand.
        during: position of the source that the loader had just been given.
    """

    func: Callable[..., Any]
    args: Any
    kwargs: dict[str, Any]
    reads: tuple[Ref, ...]
    writes: tuple[Ref, ...]
    outputs: tuple[Ref | None, ...]
    during: int

    @cached_property
    def is_copy(self) -> bool:
        """A plain copy of one view into another, casts included."""
        return (
            self.func is torch.ops.aten.copy_.default
            and isinstance(self.args[1], Ref)
            and len(self.args) + len(self.kwargs) == 2
        )

    def operands(self) -> Iterator[Ref]:
        """Every tensor it touches."""
        for leaf in tree_leaves((self.args, self.kwargs), is_leaf=lambda x: isinstance(x, Ref)):
            if isinstance(leaf, Ref):
                yield leaf


@dataclass
class Tape:
    """One traced load.

    Attributes:
        instructions: in the order in which the loader ran them.
        sources: what the loader was given, in that order.
        loadable: by destination, every element that a loader could write.
        written: by destination, the elements written.
        writers: by destination, the names of the sources that reached it.
        claims: by destination and region, the sources that each write came from.
        used: by source, the elements that reached a destination.
    """

    instructions: list[Instruction] = field(default_factory=list)
    sources: list[LazyWeight] = field(default_factory=list)
    loadable: dict[str, Extent] = field(default_factory=dict)
    written: dict[str, Cover] = field(default_factory=dict)
    writers: dict[str, set[str]] = field(default_factory=dict)
    claims: dict[tuple[str, Extent], set[frozenset[str]]] = field(default_factory=dict)
    used: dict[str, Cover] = field(default_factory=dict)
