"""What expert kernels keep of weights: processing builds them anew, CUDA graphs know the first.

A kernel and its quantisation config refer to scales, and hold tensors that are derived from
them.  Those of the first load stay, and what is derived is copied into them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from weightwire.errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from weightwire_vllm.compat import MoeKernel

__all__ = ["derived_copies"]

_DEPTH = 6


def derived_copies(
    path: str, first: Iterable[MoeKernel], live: Iterable[Tensor | None]
) -> Iterator[tuple[Tensor, Tensor]]:
    """What the kernels of the first load hold, with what those that were just built hold.

    Args:
        path: of the layer, for errors.
        first: the kernels of the first load.
        live: the layer's own memory, which is filled anyway.

    Raises:
        TraceError: it can't be copied into place; names it.
    """
    filled = {tensor.untyped_storage().data_ptr() for tensor in live if tensor is not None}
    for method, kernel, config in first:
        if method.moe_kernel is kernel and method.moe_quant_config is config:
            continue
        new = _tensors({"kernel": method.moe_kernel, "config": method.moe_quant_config})
        for name, old in _tensors({"kernel": kernel, "config": config}).items():
            if not old.numel() or old.untyped_storage().data_ptr() in filled:
                continue
            value = new.get(name)
            if value is old:
                continue
            if value is None or (value.shape, value.dtype) != (old.shape, old.dtype):
                raise TraceError(
                    f"{path}: its expert kernel's {name} is {tuple(old.shape)}, {old.dtype}, and "
                    "has no such successor after processing: it can't be updated in place; "
                    "restart the engine to change this layer"
                )
            yield old, value


def _tensors(value: Any) -> dict[str, Tensor]:
    """Tensors reachable by attributes and containers, modules left out."""
    found: dict[str, Tensor] = {}
    seen: dict[int, Any] = {}

    def visit(name: str, item: Any, depth: int) -> None:
        if isinstance(item, Tensor):
            found[name] = item
        if isinstance(item, (Tensor, nn.Module, str, bytes, int, float, type)) or item is None:
            return
        if depth == _DEPTH or id(item) in seen:
            return
        seen[id(item)] = item
        for key, child in _children(item):
            visit(f"{name}.{key}" if name else str(key), child, depth + 1)

    visit("", value, 0)
    return found


def _children(item: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(item, dict):
        return list(item.items())
    if isinstance(item, (list, tuple)):
        return list(enumerate(item))
    if type(item).__module__.startswith(("torch", "vllm.config", "transformers")):
        return []
    return list(getattr(item, "__dict__", {}).items())
