"""Watch a loader at dispatch level while it runs on tensors without data.

Python-level spellings don't matter here: ``p[:] = w``, ``p.data.copy_(w)``,
``view_as`` and ``__setitem__`` all arrive as operators.  Tensors are told apart
by their storage, so views need no bookkeeping.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from weightwire.errors import TableMismatch, TraceError
from weightwire.trace.cover import Cover, Extent
from weightwire.trace.tape import Instruction, Kind, LazyWeight, Ref, Tape

__all__ = ["Recorder"]

_aten = torch.ops.aten
_OVERWRITES = frozenset(
    {_aten.copy_.default, _aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default}
)
"""In-place operators whose result doesn't depend on what was there."""
_REBINDS = frozenset({"set_", "resize_", "resize_as_", "swap_", "set_data"})
_SHAPE_ONLY = frozenset(
    {
        *("empty_like", "zeros_like", "ones_like", "full_like"),
        *("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"),
    }
)
"""Operators that take shape and dtype of their operand, and no element."""

Origins = frozenset[tuple[str, Extent]]


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch
    """Writes a tape while it is entered.

    Args:
        destinations: by key, the meta tensors that the loader fills, each with a
            storage of its own (tied ones are given once).
    """

    def __init__(self, destinations: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch
        self.tape = Tape()
        self._storages: dict[int, tuple[Kind, str | int]] = {}
        self._origins: dict[tuple[Kind, str | int], Origins] = {}
        self._destinations = dict(destinations)
        self._alive: list[Tensor] = []  # a storage's address is its identity while it lives
        self._values = 0
        self._last: LazyWeight | None = None
        for key, tensor in destinations.items():
            if not tensor.is_meta:
                raise TypeError(f"destination {key!r} is on {tensor.device}: give its meta tensor")
            self._storages[_storage(tensor)] = (Kind.DESTINATION, key)
            self._alive.append(tensor)
            self.tape.loadable[key] = Extent.of(tensor)

    @property
    def last(self) -> LazyWeight | None:
        """The source that the loader was given last."""
        return self._last

    def hand_out(self, weights: Iterable[LazyWeight]) -> Iterator[tuple[str, Tensor]]:
        """What the loader is given: names and stand-ins, one by one.

        To be called before the recorder is entered: it watches the loader, not this.
        """
        prepared = [(weight, weight.tensor()) for weight in weights]

        def hand() -> Iterator[tuple[str, Tensor]]:
            for weight, tensor in prepared:
                self._last = weight
                self._alive.append(tensor)
                self._storages[_storage(tensor)] = (Kind.SOURCE, weight.name)
                self.tape.sources.append(weight)
                self.tape.used.setdefault(weight.name, Cover(Extent.of(tensor)))
                yield weight.name, tensor

        return hand()

    def named(self, tensor: Tensor) -> Ref:
        """What a tensor that the loader made, or was given, stands for."""
        return self._ref(tensor)

    def check_binding(self, key: str, held: Tensor | None) -> None:
        """After the load: the loader filled a destination and didn't replace it.

        Args:
            key: the destination.
            held: what the model holds there now.

        Raises:
            TraceError: naming the parameter.
        """
        if held is None or held is not self._destinations[key] or not self._is_own(key, held):
            raise TraceError(
                f"parameter {key!r} is replaced by its loader instead of filled: its address would "
                "change; this model can't be updated in place"
            )

    def _is_own(self, key: str, held: Tensor) -> bool:
        return self._storages.get(_storage(held)) == (Kind.DESTINATION, key)

    # ------------------------------------------------------------------ operators

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = _tensors((*args, *kwargs.values()))
        known = [tensor for tensor in tensors if _storage(tensor) in self._storages]
        if not known:
            # Most of what a loader does is bookkeeping on tensors of its own.
            result = func(*args, **kwargs)
            if not any(tensor.is_meta for tensor in _tensors((result,))):
                return result
            operands = tree_map(self._operand, (args, kwargs))
            outputs = self._outputs(result)
            if any(output is not None for output in outputs):
                name = func._schema.name.rpartition("::")[2]
                self._record(func, operands, tensors, [], outputs, name)
            return result
        written = _written(func, args, kwargs)
        name = func._schema.name.rpartition("::")[2]
        if func is _aten._local_scalar_dense.default or name in ("equal", "nonzero"):
            raise TraceError(self._said(known, f"reads values ({func})"))
        if name in _REBINDS:
            raise TraceError(self._said(known, f"moves it to other memory ({func})"))
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise TraceError(self._said(known, f"draws random numbers ({func})"))
        for tensor in written:
            if not self._is_tracked(tensor):
                raise TraceError(
                    self._said(known, f"changes a tensor that is no parameter ({func})")
                )
            if self._storages[_storage(tensor)][0] is Kind.SOURCE:
                self._privatise(tensor)
        # Before the call: an in-place operator on a view changes no extents, but
        # operands must be named by what their storages stand for now.
        operands = tree_map(self._operand, (args, kwargs))
        try:
            result = func(*args, **kwargs)
        except NotImplementedError as error:
            raise TraceError(self._said(known, f"needs values ({func}): {error}")) from error
        self._record(func, operands, tensors, written, self._outputs(result), name)
        return result

    def _is_tracked(self, tensor: Tensor) -> bool:
        return _storage(tensor) in self._storages

    def _operand(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if self._is_tracked(leaf):
            return self._ref(leaf)
        return leaf.detach().clone() if leaf.numel() <= 1 << 16 else leaf

    def _ref(self, tensor: Tensor) -> Ref:
        kind, name = self._storages[_storage(tensor)]
        return Ref(kind, name, Extent.of(tensor), tensor.dtype)

    def _outputs(self, result: Any) -> tuple[Ref | None, ...]:
        """Names for fresh meta tensors; views and real constants have none."""
        found: list[Ref | None] = []
        for leaf in tree_leaves(result):
            if not isinstance(leaf, Tensor) or not leaf.is_meta or self._is_tracked(leaf):
                found.append(None)
                continue
            self._alive.append(leaf)
            self._storages[_storage(leaf)] = (Kind.VALUE, self._values)
            self._values += 1
            found.append(self._ref(leaf))
        return tuple(found)

    def _record(
        self,
        func: Any,
        operands: Any,
        tensors: list[Tensor],
        written: list[Tensor],
        outputs: tuple[Ref | None, ...],
        name: str,
    ) -> None:
        changes = tuple(self._ref(tensor) for tensor in written if self._is_tracked(tensor))
        if not changes and not any(output is not None for output in outputs):
            return  # a view
        reads = [
            tensor
            for tensor in tensors
            if self._is_tracked(tensor)
            and name not in _SHAPE_ONLY
            and not (func in _OVERWRITES and any(tensor is w for w in written))
        ]
        origins = frozenset[tuple[str, Extent]]().union(*(self._origins_of(t) for t in reads))
        for tensor in reads:
            self._check_read(tensor)
        for tensor in written:
            self._write(func, tensor, tensors, origins)
        for output in outputs:
            if output is not None:
                self._origins[output.storage] = origins
        args, kwargs = operands
        self.tape.instructions.append(
            Instruction(
                func,
                args,
                kwargs,
                tuple(self._ref(tensor) for tensor in reads),
                changes,
                outputs,
                len(self.tape.sources) - 1,
            )
        )

    def _privatise(self, tensor: Tensor) -> None:
        """A loader changes what it was given: from here on that is a value of its own."""
        storage = _storage(tensor)
        name = self._storages[storage][1]
        weight = next(w for w in reversed(self.tape.sources) if w.name == name)
        with _disable_current_modes():
            whole = Extent.of(weight.tensor())
        source = Ref(Kind.SOURCE, name, whole, weight.dtype)
        value = Ref(Kind.VALUE, self._values, whole, weight.dtype)
        self._values += 1
        self._storages[storage] = value.storage
        self._origins[value.storage] = frozenset({(weight.name, whole)})
        self.tape.instructions.append(
            Instruction(
                _aten.clone.default,
                (source,),
                {},
                (source,),
                (),
                (value,),
                len(self.tape.sources) - 1,
            )
        )

    # ------------------------------------------------------------------ what it means

    def _origins_of(self, tensor: Tensor) -> Origins:
        kind, name = self._storages[_storage(tensor)]
        if kind is not Kind.SOURCE:
            return self._origins.get((kind, name), frozenset())
        whole = self.tape.used[str(name)].whole
        weight = next(w for w in reversed(self.tape.sources) if w.name == name)
        extent = Extent.of(tensor) if tensor.dtype == weight.dtype else whole
        return frozenset({(str(name), extent)})

    def _check_read(self, tensor: Tensor) -> None:
        """What a loader reads from a destination must be what it has written there before."""
        kind, key = self._storages[_storage(tensor)]
        if kind is not Kind.DESTINATION or tensor.numel() == 0:
            return
        cover = self.tape.written.get(str(key))
        wanted = Cover(self.tape.loadable[str(key)])
        wanted.add(Extent.of(tensor))
        if cover is None or cover.lacks(wanted):
            raise TraceError(
                self._said([tensor], "depends on what the parameter held before the load")
            )

    def _write(self, func: Any, target: Tensor, tensors: list[Tensor], origins: Origins) -> None:
        storage = _storage(target)
        if storage not in self._storages:
            return
        kind, key = self._storages[storage]
        if kind is not Kind.DESTINATION:
            self._origins[kind, key] = self._origins.get((kind, key), frozenset()) | origins
            return
        key = str(key)
        if target.dtype != self._destinations[key].dtype:
            raise TraceError(self._said([target], "writes it as another dtype"))
        if func is _aten.copy_.default and origins:
            self._check_copy(key, target, tensors[1])
        extent = Extent.of(target)
        self.tape.written.setdefault(key, Cover(self.tape.loadable[key])).add(extent)
        writers = self.tape.writers.setdefault(key, set())
        for name, used in origins:
            writers.add(name)
            self.tape.used[name].add(used)
        if origins:
            names = frozenset(name for name, _ in origins)
            self.tape.claims.setdefault((key, extent), set()).add(names)

    def _check_copy(self, key: str, target: Tensor, source: Tensor) -> None:
        name = self._last.name if self._last is not None else "?"
        if target.numel() != source.numel():
            raise TableMismatch(
                f"tensor {name!r}: {tuple(source.shape)} would be broadcast into "
                f"{tuple(target.shape)} of {key!r}: send the full shape"
            )
        if _family(target.dtype) != _family(source.dtype):
            raise TableMismatch(
                f"tensor {name!r} of {source.dtype} would be cast into {key!r} of {target.dtype}: "
                "send the dtype that the engine loads, with its scales"
            )

    def _said(self, tensors: list[Tensor], what: str) -> str:
        """Parameter, tensor and loader, for a message."""
        keys = [
            str(name)
            for kind, name in (self._storages[_storage(t)] for t in tensors if self._is_tracked(t))
            if kind is Kind.DESTINATION
        ]
        where, key = self._loader()
        key = keys[0] if keys else key
        parameter = f"parameter {key!r}: " if key else ""
        source = f"tensor {self._last.name!r}: " if self._last is not None else ""
        return (
            f"{parameter}{source}{where} {what}, which can't be traced: this model can't be "
            "updated in place; restart the engine to change its weights"
        )

    def _loader(self) -> tuple[str, str]:
        """The innermost function that isn't torch's or ours, and the parameter it was given."""
        frame = sys._getframe(1)
        where, key = "", ""
        while frame is not None:
            module = frame.f_globals.get("__name__", "")
            if not module.startswith(("torch.", "weightwire.")):
                if not where:
                    code = frame.f_code
                    where = f"{code.co_qualname} ({module}, line {frame.f_lineno})"
                for value in frame.f_locals.values():
                    if isinstance(value, Tensor) and value.is_meta:
                        kind, name = self._storages.get(_storage(value), (None, ""))
                        if kind is Kind.DESTINATION:
                            return where, str(name)
            if frame.f_back is None:
                break
            frame = frame.f_back
        return where or "its loader", key


def _family(dtype: torch.dtype) -> str:
    if dtype.is_floating_point:
        return "float8" if dtype.itemsize == 1 else "float"
    return "bool" if dtype == torch.bool else "integer"


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among an operator's arguments or results: by themselves, or in lists."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found.extend(_tensors(value))
    return found


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        found.extend(leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
    return found
