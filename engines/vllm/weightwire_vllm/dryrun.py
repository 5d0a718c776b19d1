"""Run a model's real ``load_weights`` on tensors without data, and watch what it does.

The model's load-time parameters are swapped for meta tensors, so that nothing
of the engine changes; a dispatch mode sees every operation on them, however the
loader spells it.  The result says which elements of which destination were
written, by which checkpoint tensors, and which elements of those were used.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weightwire.errors import TableMismatch, TraceError
from weightwire_vllm import compat
from weightwire_vllm.coverage import Cover, Extent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["LoadTrace", "Offered", "trace_load"]


@dataclass(frozen=True)
class Offered:
    """A tensor that is handed to ``load_weights``: name, shape, dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class LoadTrace:
    """What a load did.

    Attributes:
        written: by destination (``module.tensor``), the elements written.
        writers: by destination, the names of the tensors that reached it.
        claims: by destination and region, the tensors that each write to it came from.
        used: by tensor name, the elements that reached a destination.
        loadable: by destination, every element that a loader could write.
        buffers: destinations that are buffers.
    """

    written: dict[str, Cover] = field(default_factory=dict)
    writers: dict[str, set[str]] = field(default_factory=dict)
    claims: dict[tuple[str, Extent], set[frozenset[str]]] = field(default_factory=dict)
    used: dict[str, Cover] = field(default_factory=dict)
    loadable: dict[str, Extent] = field(default_factory=dict)
    buffers: set[str] = field(default_factory=set)


def trace_load(model: nn.Module, vllm_config: Any, calls: Sequence[Sequence[Offered]]) -> LoadTrace:
    """Trace one ``load_weights`` call for each sequence in ``calls``.

    Raises:
        TableMismatch: the loader refused a tensor (unknown name, wrong shape).
        TraceError: the loader did what can't be followed or replayed.
    """
    with compat.config_context(vllm_config), _swapped(model) as recorder:
        for call in calls:
            current: list[Offered] = []
            weights = recorder.hand_out(call, current)
            try:
                with recorder:
                    model.load_weights(weights)  # type: ignore[operator]  # vLLM's protocol
            except (TraceError, TableMismatch):
                raise
            except NotImplementedError as error:
                raise TraceError(_said(current, "its loader reads values", error)) from error
            except Exception as error:
                raise TableMismatch(_said(current, "the engine refuses it", error)) from error
    return recorder.trace


def _said(current: list[Offered], what: str, error: Exception) -> str:
    text = " ".join((str(error) or type(error).__name__).split())
    if len(text) > 400:
        text = text[:400] + " ..."
    if not current:
        return f"load_weights failed before it took a tensor: {text}"
    last = current[-1]
    return f"tensor {last.name!r} of shape {last.shape}, {last.dtype}: {what}: {text}"


@contextmanager
def _swapped(model: nn.Module) -> Iterator[_Recorder]:
    recorder = _Recorder()
    saved: list[tuple[nn.Module, dict[str, Any], dict[str, Any], set[str]]] = []
    stand_ins: dict[int, Tensor] = {}
    try:
        for path, layer in model.named_modules():
            params, buffers = compat.load_time_tensors(layer)
            saved.append(
                (
                    layer,
                    dict(layer._parameters),
                    dict(layer._buffers),
                    set(layer._non_persistent_buffers_set),
                )
            )
            for kind, found, registry in (
                ("parameter", params, layer._parameters),
                ("buffer", buffers, layer._buffers),
            ):
                live: dict[str, Any] = dict(registry)
                for name in live:
                    if live[name] is not None:
                        del registry[name]
                for name, tensor in found.items():
                    current = live.get(name)
                    # Tied layers share one parameter, and a cold load sees that.
                    shared = None if current is None else stand_ins.get(id(current))
                    if shared is not None and shared.shape == tensor.shape:
                        tensor = shared
                    else:
                        recorder.expect(f"{path}.{name}" if path else name, tensor, kind)
                        if current is not None:
                            stand_ins[id(current)] = tensor
                    registry[name] = tensor
        yield recorder
    finally:
        for layer, old_params, old_buffers, non_persistent in saved:
            layer._parameters.clear()
            layer._parameters.update(old_params)
            layer._buffers.clear()
            layer._buffers.update(old_buffers)
            layer._non_persistent_buffers_set.clear()
            layer._non_persistent_buffers_set.update(non_persistent)


Origins = frozenset[tuple[str, Extent]]


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch
        self.trace = LoadTrace()
        self._ignored = compat.loader_ignores()
        self._destinations: dict[int, str] = {}
        self._direct: set[str] = set()
        self._sources: dict[int, str] = {}
        self._derived: dict[int, Origins] = {}
        self._alive: list[Tensor] = []  # a storage's address is its identity only while it lives
        self._inside = 0
        self._scalars: Origins = frozenset()
        self._last = ""

    def expect(self, key: str, tensor: Tensor, kind: str) -> None:
        """Register a destination, and watch its loader as layerwise reload does."""
        self._alive.append(tensor)
        self._destinations[_storage(tensor)] = key
        self.trace.loadable[key] = Extent.of(tensor)
        if kind == "buffer":
            self.trace.buffers.add(key)
        if key.rpartition(".")[2] in self._ignored:
            self._direct.add(key)
        else:
            compat.rewrapped(tensor, self._watched(compat.original_loader(tensor)))

    def hand_out(
        self, call: Sequence[Offered], current: list[Offered]
    ) -> Iterator[tuple[str, Tensor]]:
        for offered in call:
            current.append(offered)
            self._last = offered.name
            # Not under the mode: the loader, not this generator, is watched.
            with torch.utils._python_dispatch._disable_current_modes():
                tensor = torch.empty(offered.shape, dtype=offered.dtype, device="meta")
            self._alive.append(tensor)
            self._sources[_storage(tensor)] = offered.name
            if offered.name not in self.trace.used:
                self.trace.used[offered.name] = Cover(Extent.of(tensor))
            yield offered.name, tensor

    def _watched(self, original: Callable[..., Any]) -> Callable[..., Any]:
        # Mirrors vLLM's wrapper, so that loaders which look at names and
        # attributes of a weight loader see what they will see in the reload.
        @functools.wraps(original, assigned=("__doc__", "__annotations__"))
        def load(*args: Any, **kwargs: Any) -> Any:
            self._inside += 1
            try:
                return original(*args, **kwargs)
            finally:
                self._inside -= 1

        return load

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            # One-element scales are read as numbers and filled in; the number
            # itself has no influence on where it goes.
            self._scalars |= self._origins(args[0])
            return True if args[0].dtype == torch.bool else 1
        written = _written(func, args, kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        read = [t for t in tensors if not any(t is w for w in written)]
        origins = frozenset[tuple[str, Extent]]().union(*(self._origins(t) for t in read))
        for destination in written:
            self._write(func, destination, read, origins)
        result = func(*args, **kwargs)
        if not written:
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor) and not self._known(_storage(leaf)):
                    self._alive.append(leaf)
                    self._derived[_storage(leaf)] = origins
        return result

    def _known(self, storage: int) -> bool:
        return storage in self._destinations or storage in self._sources or storage in self._derived

    def _origins(self, tensor: Tensor) -> Origins:
        storage = _storage(tensor)
        name = self._sources.get(storage)
        if name is not None:
            return frozenset({(name, Extent.of(tensor))})
        return self._derived.get(storage, frozenset())

    def _write(self, func: Any, target: Tensor, read: list[Tensor], origins: Origins) -> None:
        storage = _storage(target)
        key = self._destinations.get(storage)
        if key is None:
            if storage in self._derived:
                self._derived[storage] |= origins
            elif storage not in self._sources:
                raise TraceError(
                    f"tensor {self._last!r}: its loader changes a tensor that is no parameter or "
                    f"buffer ({func}); load it with a newer weightwire or restart the engine"
                )
            return
        if not self._inside and key not in self._direct:
            raise TraceError(
                f"parameter {key!r} is written by load_weights itself ({func}, tensor "
                f"{self._last!r}), not by its weight loader: vLLM's layerwise reload loses that"
            )
        if func is torch.ops.aten.copy_.default and origins:
            _check_copy(key, self._last, target, read[0])
        extent = Extent.of(target)
        whole = self.trace.loadable[key]
        self.trace.written.setdefault(key, Cover(whole)).add(extent)
        writers = self.trace.writers.setdefault(key, set())
        origins |= self._scalars
        for name, used in origins:
            writers.add(name)
            self.trace.used[name].add(used)
        if origins:
            names = frozenset(name for name, _ in origins)
            self.trace.claims.setdefault((key, extent), set()).add(names)
        self._scalars = frozenset()


def _check_copy(key: str, name: str, target: Tensor, source: Tensor) -> None:
    if target.numel() != source.numel():
        raise TableMismatch(
            f"tensor {name!r}: {tuple(source.shape)} would be broadcast into {tuple(target.shape)} "
            f"of {key!r}: send the full shape"
        )
    if _kind(target.dtype) != _kind(source.dtype):
        raise TableMismatch(
            f"tensor {name!r} of {source.dtype} would be cast into {key!r} of {target.dtype}: "
            "send the dtype that the engine loads, with its scales"
        )


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_floating_point:
        return "float8" if dtype.itemsize == 1 else "float"
    return "bool" if dtype == torch.bool else "integer"


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
