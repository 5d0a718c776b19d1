"""vLLM's weight sources as ours, and ours as vLLM's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from weightwire.errors import UnsupportedOperation
from weightwire.placements import LocalShard
from weightwire.sources import MappingSource, ModuleSource, WeightSource, WireRules, resolve
from weightwire.streaming import StreamingSource, TensorSpec
from weightwire.views import apply_view
from weightwire_vllm import compat

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["from_vllm", "to_vllm"]


def from_vllm(source: Any) -> WeightSource:
    """What ``open_sender`` takes, for a ``vllm.distributed.weight_transfer.WeightSource``.

    vLLM's own source over a module is sent as the module: shards from where they lie,
    without a gather.  Any other is a collective stream of full tensors, and stays one.

    Raises:
        UnsupportedOperation: its ranks hold different parts (``held_names``).
    """
    if isinstance(source, WeightSource):
        return source
    module = compat.module_of(source)
    if module is not None:
        return ModuleSource(module)
    if source.held_names() is not None:
        raise UnsupportedOperation(
            f"{type(source).__name__} yields only the tensors that a rank holds (held_names): "
            "open the sender with a source of LocalShards instead"
        )
    specs = {meta.name: TensorSpec(tuple(meta.shape), meta.dtype) for meta in source.metadata()}
    return StreamingSource(lambda: iter(source), specs=specs)


def to_vllm(source: WeightSource) -> Any:
    """A ``vllm.distributed.weight_transfer.WeightSource`` that yields what ``source`` holds.

    Tensors have checkpoint names and are full: each DTensor is gathered when it is its
    turn, on all ranks together.  Of tied tensors the first is yielded, as from a module of
    vLLM's: a stream has no other way to say that two names are one tensor.

    Raises:
        UnsupportedOperation: the source is a stream, or declares shards of its own.
    """
    if isinstance(source, StreamingSource):
        raise UnsupportedOperation(
            "a StreamingSource holds no tensors: give vLLM the iterator that it was made of"
        )
    return _vllm_class()(source)


def _vllm_class() -> Any:
    from vllm.distributed.weight_transfer import ParamMeta
    from vllm.distributed.weight_transfer import WeightSource as TheirSource

    class FullTensors(TheirSource):  # type: ignore[misc]  # vLLM is Any here
        def __init__(self, source: WeightSource) -> None:
            self._source = source

        def metadata(self) -> list[Any]:
            with torch.device("meta"):
                made = [
                    (name, torch.empty_like(tensor, device="meta"))
                    for name, tensor in _full(self._source, gather=False)
                ]
            return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in made]

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            yield from _full(self._source, gather=True)

    return FullTensors


def _full(source: WeightSource, *, gather: bool) -> Iterator[tuple[str, Tensor]]:
    """Checkpoint tensors in order; without ``gather`` on meta, for their shapes."""
    tensors = source.tensors()
    for name, tensor in tensors.items():
        if isinstance(tensor, LocalShard):
            raise UnsupportedOperation(
                f"tensor {name!r} is a LocalShard: vLLM's sources yield full tensors, and nothing "
                "says how to gather it"
            )
    views = source.views({n: (tuple(t.shape), t.dtype) for n, t in _plain(tensors).items()})
    ties = resolve(MappingSource(tensors), WireRules()).spec.ties
    inner = {part for view in views for part in view.sources()}
    named = {view.name for view in views}

    def full(name: str) -> Tensor:
        tensor = _plain(tensors)[name].detach()
        if not gather:
            return torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="meta")
        whole = getattr(tensor, "full_tensor", None)
        return tensor if whole is None else whole()

    for name in tensors:
        if name not in inner and name not in named and name not in ties:
            yield name, full(name)
    for view in views:
        yield view.name, apply_view(view, full)


def _plain(tensors: Mapping[str, Tensor | LocalShard]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
