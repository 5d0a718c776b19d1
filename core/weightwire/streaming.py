"""Sources that yield full tensors one by one, on all trainer ranks together.

Trainers that shard in ways of their own (Megatron's bridges, verl, vLLM's weight sources)
export weights by an iterator whose every step is a collective: all ranks take part, and
each gets the full tensor.  A group's tensors are copied into slots as they come, so that
no rank ever holds a model.

All ranks step through a whole transfer group before any of them hands it over, whether
they serve something of it or not.  So no rank waits in the iterator for one that waits
for a reader.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from weightwire.cuts import Cuts
from weightwire.errors import ConfigError, TableMismatch, UnsupportedOperation
from weightwire.placements import local_box
from weightwire.sources import Resolved, Spec, WeightSource, WireRules
from weightwire.table import Shard, TensorEntry, TensorTable, dtype_name, validate_tensor_name

if TYPE_CHECKING:
    from weightwire.contract import Backend

__all__ = ["Stream", "StreamingSource", "TensorSpec", "refuse_lockstep"]


class TensorSpec(NamedTuple):
    """What is known of a tensor before it is there.

    Attributes:
        shape: full shape.
        dtype: as the iterator yields it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


class StreamingSource(WeightSource):
    """A collective iterator of full tensors.

    Args:
        stream: called once per ``send`` on every trainer rank; yields names and full
            tensors in one order on all ranks.  A tensor need only hold its values
            until the next step.  Its collectives have their own timeouts: a deadline
            of ``send`` can't end them.
        specs: every name with its ``TensorSpec``, or with a tensor of its shape and dtype
            (on the meta device, say), in the order of the iterator: that becomes the
            table's.  By default they are taken by going through the iterator once
            more, at the first ``send``.
        ties: alias to the name that carries its value; aliases may be yielded, and are
            passed over.
        device: where the tensors that it yields lie.

    The order may differ from that of ``specs`` as long as what comes early fits in
    ``group_bytes``; it is held until its group's turn.
    """

    def __init__(
        self,
        stream: Callable[[], Iterable[tuple[str, Tensor]]],
        *,
        specs: Mapping[str, TensorSpec | Tensor] | None = None,
        ties: Mapping[str, str] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if not callable(stream):
            raise ConfigError(
                f"StreamingSource's stream is a {type(stream).__name__}: give a function that "
                "returns a new iterator of (name, tensor) pairs"
            )
        self._stream = stream
        self._device = torch.device(device)
        self._given = None if specs is None else {n: _spec(s) for n, s in specs.items()}
        self._specs = self._given
        self._ties = dict(ties or {})

    @property
    def device(self) -> torch.device:
        return self._device

    def tensors(self) -> Mapping[str, Tensor]:
        raise UnsupportedOperation("a StreamingSource has no mapping of tensors: it yields them")

    def resolve(self, rules: WireRules) -> Resolved:
        """What it will yield.  Goes through the iterator when that isn't known."""
        if self._specs is None:
            self._specs = self._first_pass()
        if not self._specs:
            raise ConfigError("the source has no tensors: its iterator yields nothing")
        rules.check_matches([*self._specs, *self._ties])
        for alias, name in self._ties.items():
            if alias in self._specs or name not in self._specs:
                raise ConfigError(
                    f"tie {alias!r} -> {name!r}: the alias must not be among the specs, and the "
                    "name it stands for must"
                )
        entries = []
        for name, spec in self._specs.items():
            validate_tensor_name(name)
            wire = dtype_name(rules.for_tensor(name, spec.dtype))
            whole = Shard(0, (0,) * len(spec.shape), spec.shape)
            entries.append(TensorEntry(name, spec.shape, wire, (whole,)))
        return Resolved(Spec(tuple(entries), self._ties, ordered=True), {}, stream=self)

    def open(self, table: TensorTable, rank: int, budget: int) -> Stream:
        """Begin a pass through the iterator.

        Args:
            rank: this trainer rank; what others serve is never held.
            budget: bytes that may be held for later groups.
        """
        assert self._specs is not None  # noqa: S101 - resolve() has set it
        stream = Stream(self._pairs(), self._specs, self._ties, table, rank, budget)
        stream.device = self._device
        return stream

    def forget(self) -> None:
        """Take the specs anew at the next ``send``, unless they were given."""
        self._specs = self._given

    def _pairs(self) -> Generator[tuple[str, Tensor], None, None]:
        """A new pass through the iterator."""
        found = self._stream()
        if not isinstance(found, Iterable):
            raise ConfigError(
                f"StreamingSource's stream returned a {type(found).__name__}: return an iterator "
                "of (name, tensor) pairs"
            )
        return _unpacked(iter(found))

    def _first_pass(self) -> dict[str, TensorSpec]:
        found: dict[str, TensorSpec] = {}
        for name, tensor in self._pairs():
            if name in self._ties:
                continue
            if name in found:
                raise ConfigError(f"the iterator yields {name!r} twice: names are keys")
            found[name] = _spec(_whole(name, tensor))
        return found


def _unpacked(iterator: Iterator[Any]) -> Generator[tuple[str, Tensor], None, None]:
    """Its pairs; closing this closes it."""
    try:
        for pair in iterator:
            try:
                name, tensor = pair
            except (TypeError, ValueError):
                raise ConfigError(
                    f"the iterator yields a {type(pair).__name__} that is no pair: yield "
                    "(name, tensor)"
                ) from None
            yield name, tensor
    finally:
        close = getattr(iterator, "close", None)
        if close is not None:
            close()


def refuse_lockstep(source: WeightSource, backend: Backend, world_size: int) -> None:
    """A stream and a collective backend may wait for each other.

    The iterator's own collectives need every trainer rank, and so do the backend's
    groups: a rank that waits for its receivers holds up the iterator that they wait for.

    Raises:
        UnsupportedOperation: both have several ranks.
    """
    streams = isinstance(source, StreamingSource)
    if streams and world_size > 1 and backend.capabilities.flow == "collective":
        raise UnsupportedOperation(
            f"a StreamingSource on {world_size} trainer ranks and backend {backend.name!r}, whose "
            "groups are collective, could wait for each other: send the sharded tensors "
            "themselves, or choose a backend that isn't collective"
        )


class Stream:
    """One pass through a collective iterator, group by group.

    Attributes:
        device: where the tensors that it yields lie.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        iterator: Generator[tuple[str, Tensor], None, None],
        specs: Mapping[str, TensorSpec],
        ties: Mapping[str, str],
        table: TensorTable,
        rank: int,
        budget: int,
    ) -> None:
        self._iterator = iterator
        self._specs = specs
        self._ties = ties
        self._budget = budget
        cuts = Cuts(table)
        self._last_group = {
            entry.name: max(group for group, _ in cuts.parts(i))
            for i, entry in enumerate(table.tensors)
        }
        self._mine = {
            entry.name for entry in table.tensors if any(s.owner == rank for s in entry.shards)
        }
        self._seen: set[str] = set()
        self._current: tuple[str, Tensor] | None = None
        self._early: dict[str, Tensor | None] = {}
        self._early_nbytes = 0

    def take(self, group: int, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Step through the iterator until a group's tensors have all come.

        Every rank does, also one that serves none of them.

        Yields:
            Name and tensor, in any order; the tensor holds until the next one.  What
            this rank doesn't serve may be left out.
        """
        pending = set(names)
        for name in [name for name in self._early if name in pending]:
            tensor = self._early[name]
            pending.discard(name)
            if tensor is not None:
                yield name, tensor
            if self._last_group[name] <= group:
                del self._early[name]
                self._early_nbytes -= self._nbytes(name)
        if self._current is not None and self._current[0] in pending:
            pending.discard(self._current[0])
            yield self._current
        while pending:
            self._hold_current(group)
            name, tensor = self._step(pending)
            self._current = (name, tensor)
            if name in pending:
                pending.discard(name)
                yield name, tensor

    def finish(self) -> None:
        """Go to the iterator's end, as every rank does.

        Raises:
            TableMismatch: it yields more than it had announced.
        """
        self._current = None
        self._early.clear()
        for name, _ in self._iterator:
            if name not in self._ties:
                raise TableMismatch(self._unexpected(name))

    def close(self) -> None:
        """Leave the iterator wherever it is.  Idempotent."""
        self._current = None
        self._early.clear()
        self._iterator.close()

    def _hold_current(self, group: int) -> None:
        """Before the next step: keep what came before its group, if this rank serves it."""
        current, self._current = self._current, None
        if current is None or self._last_group[current[0]] <= group:
            return
        name, tensor = current
        # Counted alike on every rank, so that all of them fail, or none.
        self._early_nbytes += self._nbytes(name)
        if self._early_nbytes > self._budget:
            raise ConfigError(
                f"tensor {name!r} is yielded before its turn and doesn't fit in what may be held "
                f"({self._early_nbytes} of {self._budget} bytes): give specs in the order of the "
                "iterator, or raise group_bytes"
            )
        self._early[name] = tensor.clone() if name in self._mine else None

    def _step(self, pending: set[str]) -> tuple[str, Tensor]:
        for name, tensor in self._iterator:
            if name in self._ties:
                continue
            if name not in self._specs or name in self._seen:
                raise TableMismatch(self._unexpected(name))
            self._seen.add(name)
            tensor = _whole(name, tensor)
            if _spec(tensor) != self._specs[name]:
                raise TableMismatch(
                    f"tensor {name!r} is {tensor.dtype}{list(tensor.shape)} now, and was announced "
                    f"as {self._specs[name].dtype}{list(self._specs[name].shape)}: send again, or "
                    "correct specs="
                )
            return name, tensor
        raise TableMismatch(
            f"the iterator ended without tensor {min(pending)!r}: it has to yield the same names "
            "each time"
        )

    def _nbytes(self, name: str) -> int:
        shape, dtype = self._specs[name]
        return torch.Size(shape).numel() * dtype.itemsize

    def _unexpected(self, name: str) -> str:
        what = "twice" if name in self._seen else "and had not announced it"
        return f"the iterator yields tensor {name!r} {what}: correct it, or specs="


def _spec(given: TensorSpec | Tensor) -> TensorSpec:
    if isinstance(given, Tensor):
        return TensorSpec(tuple(given.shape), given.dtype)
    shape, dtype = given
    return TensorSpec(tuple(shape), dtype)


def _whole(name: str, tensor: Tensor) -> Tensor:
    box = local_box(name, tensor)
    if box.sizes != box.shape:
        raise ConfigError(
            f"the iterator yields {name!r} as a shard of {box.shape}: yield full tensors, or give "
            "the shards as a mapping"
        )
    return box.local
