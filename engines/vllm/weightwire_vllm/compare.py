"""Compare the whole state of two engines, bit for bit.

A snapshot digests every tensor that can be reached from a model: parameters and
buffers, and tensors in plain attributes, containers, closures and objects that
aren't modules.  Key-value caches and configuration are left out: they aren't
weights.  Snapshots are plain data, so that engines of two processes compare.

In the process that runs the engine (``VLLM_ENABLE_V1_MULTIPROCESSING=0``, one
rank), ``llm.apply_model(snapshot)`` works as it stands: nothing is serialised.
"""

from __future__ import annotations

import functools
import hashlib
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from weightwire.errors import UnsupportedOperation
from weightwire_vllm import compat

__all__ = [
    "Difference",
    "Snapshot",
    "TensorDigest",
    "comparable_engines",
    "compare",
    "flip_bit",
    "reachable_tensors",
    "snapshot",
]

_NOT_WEIGHTS = frozenset({"kv_cache", "kv_caches"})
_OPAQUE_HANDLE = "handler_tensor"  # holds an address: the packed weight can't be read back
_CONFIG_PACKAGES = ("vllm.config", "transformers.", "vllm.transformers_utils")
_OPAQUE = (
    str,
    bytes,
    int,
    float,
    complex,
    type,
    Enum,
    types.ModuleType,
    types.BuiltinFunctionType,
    torch.dtype,
    torch.device,
    torch.Size,
    torch.Generator,
)


class TensorDigest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor's identity: shape, dtype, and a digest of its logical bytes."""

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    digest: str


class Snapshot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every tensor reachable from a model.

    Attributes:
        tensors: by path.
        aliases: further paths of the very same tensor, to the first path.
    """

    tensors: dict[str, TensorDigest]
    aliases: dict[str, str]

    def encode(self) -> bytes:
        """As JSON, for another process."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, payload: bytes) -> Snapshot:
        return msgspec.json.decode(payload, type=cls)


@dataclass(frozen=True)
class Difference:
    """Outcome of a comparison.

    Attributes:
        compared_tensors: tensors that both have.
        compared_bytes: their bytes.
        differing: paths whose shape, dtype or bits differ.
        missing: paths that only one has.
        retied: paths that alias another tensor in only one, or a different one.
    """

    compared_tensors: int
    compared_bytes: int
    differing: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    retied: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        return not (self.differing or self.missing or self.retied) and self.compared_tensors > 0


def snapshot(model: nn.Module) -> Snapshot:
    """Digest everything reachable from ``model``.

    Raises:
        UnsupportedOperation: weights are packed where they can't be read.
    """
    walk = _Walk()
    walk.visit("", model)
    for path in walk.found:
        if path.endswith(_OPAQUE_HANDLE):
            raise UnsupportedOperation(
                f"{path} hides a packed weight: build the engine inside comparable_engines()"
            )
    return Snapshot(
        {path: _digest(tensor) for path, tensor in walk.found.items()}, dict(walk.aliases)
    )


def reachable_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every tensor reachable from ``model`` by path, aliases left out."""
    walk = _Walk()
    walk.visit("", model)
    return walk.found


def compare(left: Snapshot, right: Snapshot) -> Difference:
    """Compare two snapshots."""
    both = [path for path in left.tensors if path in right.tensors]
    return Difference(
        compared_tensors=len(both),
        compared_bytes=sum(left.tensors[path].nbytes for path in both),
        differing=tuple(path for path in both if left.tensors[path] != right.tensors[path]),
        missing=tuple(sorted(left.tensors.keys() ^ right.tensors.keys())),
        retied=tuple(
            sorted(
                path
                for path in left.aliases.keys() | right.aliases.keys()
                if left.aliases.get(path) != right.aliases.get(path)
            )
        ),
    )


def flip_bit(model: nn.Module, name: str | None = None) -> str:
    """Flip the lowest bit of one element of a running engine's weights.

    Args:
        name: a parameter; the largest by default.

    Returns:
        The parameter's name.
    """
    parameters = {key: p for key, p in model.named_parameters() if p.numel() and not p.is_meta}
    if name is None:
        name = max(parameters, key=lambda key: parameters[key].numel())
    parameter = parameters[name].data
    # Through the storage, because packed parameters needn't be contiguous.
    raw = torch.empty(0, dtype=torch.uint8, device=parameter.device)
    raw.set_(parameter.untyped_storage())
    raw[parameter.storage_offset() * parameter.element_size()] ^= 1
    return name


@contextmanager
def comparable_engines() -> Iterator[None]:
    """Keep the linear weights of the engines that live inside this visible.

    On CPU vLLM packs linear weights into opaque handles and empties the
    parameters: two engines would then compare equal whatever they hold.  It is
    a switch of this process, and a reload packs as the start did: build,
    update and use an engine wholly inside, or wholly outside.
    """
    undo = compat.set_packing(enabled=False)
    try:
        yield
    finally:
        undo()


def _digest(tensor: Tensor) -> TensorDigest:
    hasher = hashlib.blake2b(digest_size=16)
    nbytes = tensor.numel() * tensor.element_size()
    if tensor.is_meta:
        hasher.update(b"meta")
    elif nbytes:
        dense = tensor.detach().cpu().contiguous().reshape(-1)
        hasher.update(dense.view(torch.uint8).numpy().data)
    return TensorDigest(
        tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), nbytes, hasher.hexdigest()
    )


@dataclass
class _Walk:
    found: dict[str, Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    _seen: dict[int, Any] = field(default_factory=dict)
    _first: dict[tuple[Any, ...], str] = field(default_factory=dict)

    def visit(self, path: str, value: Any) -> None:
        # A loop, not recursion: object graphs are deeper than the stack.
        queue: list[tuple[str, Any]] = [(path, value)]
        while queue:
            where, item = queue.pop()
            if item is None or isinstance(item, _OPAQUE):
                continue
            if isinstance(item, Tensor):
                self._tensor(where, item)
            if id(item) in self._seen:
                continue
            self._seen[id(item)] = item  # kept, so that its id stays its own
            children = [
                (f"{where}.{name}" if where else name, child) for name, child in _children(item)
            ]
            queue.extend(reversed(children))

    def _tensor(self, path: str, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        # The storage object, not its address: empty storages share one address.
        key = (storage._cdata, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        first = self._first.setdefault((*key, tensor.dtype), path)
        if first == path:
            self.found[path] = tensor
        elif path not in self.found:
            self.aliases[path] = first


def _children(item: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(item, nn.Module):
        for registry in (item._parameters, item._buffers, item._modules):
            yield from registry.items()
        hidden = {"_parameters", "_buffers", "_modules"}
        yield from _attributes(item, hidden)
    elif isinstance(item, Mapping):
        for key in list(item):
            if key not in _NOT_WEIGHTS:
                yield f"[{key}]", item[key]
    elif isinstance(item, (list, tuple, set, frozenset)):
        for index, child in enumerate(item):
            yield f"[{index}]", child
    elif isinstance(item, functools.partial):
        yield "func", item.func
        yield "args", item.args
        yield "keywords", item.keywords
    elif isinstance(item, types.MethodType):
        yield "__self__", item.__self__
    elif isinstance(item, types.FunctionType):
        yield "defaults", item.__defaults__
        yield "kwdefaults", item.__kwdefaults__
        for name, cell in zip(item.__code__.co_freevars, item.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:  # a cell that isn't filled yet
                continue
    elif not type(item).__module__.startswith(_CONFIG_PACKAGES):
        yield from _attributes(item, set())


def _attributes(item: Any, hidden: set[str]) -> Iterator[tuple[str, Any]]:
    for name, child in list(getattr(item, "__dict__", {}).items()):
        if name not in hidden and name not in _NOT_WEIGHTS:
            yield name, child
    for owner in type(item).__mro__:
        slots = owner.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in _NOT_WEIGHTS and not name.startswith("__"):
                yield name, getattr(item, name, None)
