"""Layers as vLLM's layerwise reload knows them: load-time tensors, processing, attention."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "MoeKernel",
    "Registries",
    "absorbed_weights",
    "drop_moe_kernels",
    "finish_attention",
    "forget_dummy_scales",
    "give_moe_kernels",
    "is_attention",
    "is_processed",
    "layer_info",
    "load_time_tensors",
    "materialised",
    "post_process",
    "stays_live",
    "take_moe_kernels",
    "unwrapped",
]

MoeKernel = tuple[Any, Any, Any]
"""Quant method, its kernel, its quant config."""


class Registries:
    """What a module's parameters and buffers are now, to be put back later."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self.parameters = dict(layer._parameters)
        self.buffers = dict(layer._buffers)
        self.non_persistent = set(layer._non_persistent_buffers_set)

    def put_back(self) -> None:
        """Hold exactly these again."""
        for registry, before in (
            (self.layer._parameters, self.parameters),
            (self.layer._buffers, self.buffers),
        ):
            registry.clear()
            registry.update(before)  # type: ignore[arg-type]  # the two differ in value type
        self.layer._non_persistent_buffers_set.clear()
        self.layer._non_persistent_buffers_set.update(self.non_persistent)


def layer_info(layer: nn.Module) -> Any:
    """vLLM's reload record of a layer (``LayerReloadingInfo``)."""
    from vllm.model_executor.model_loader.reload import layerwise

    return layerwise.get_layerwise_info(layer)


def load_time_tensors(layer: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Fresh meta copies of the parameters and buffers that a cold load fills.

    Returns:
        Parameters and buffers by local name, with their classes, attributes and
        original loaders, owning no data.  Tensors that vLLM leaves live during
        a reload (biases) are included.
    """
    from vllm.model_executor.model_loader.reload import meta, sanitize

    params, buffers = layer_info(layer).restore_metadata
    found: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
    for kind, recorded, live in (
        (0, params, layer._parameters),
        (1, buffers, layer._buffers),
    ):
        for name, tensor in recorded.items():
            copied = meta.to_meta_tensor(tensor)
            found[kind][name] = sanitize.restore_layer_refs(copied, layer)
        for name, current in live.items():
            if current is not None and name in meta.SKIP_TENSORS and name not in recorded:
                found[kind][name] = meta.to_meta_tensor(current)
    return found


def unwrapped(tensor: Tensor) -> Tensor:
    """The tensor without the loader that layerwise reload may have wrapped around its own."""
    from vllm.model_executor.model_loader.reload import layerwise

    if getattr(getattr(tensor, "weight_loader", None), "__name__", "") == "online_process_loader":
        original = layerwise._get_original_loader(tensor)
        tensor.weight_loader = original  # type: ignore[attr-defined]  # vLLM's own protocol
    return tensor


def is_attention(layer: nn.Module) -> bool:
    """True for layers that vLLM processes after all others."""
    from vllm.model_executor.layers import attention

    check = getattr(attention, "is_deferred_attention_layer", None)
    if check is not None:
        return bool(check(layer))
    kinds = tuple(
        getattr(attention, name)
        for name in ("Attention", "MLAAttention", "MMEncoderAttention")
        if hasattr(attention, name)
    )
    return isinstance(layer, kinds) and hasattr(layer, "process_weights_after_loading")


def materialised(
    like: Tensor, device: torch.device, memory: torch.UntypedStorage | None = None
) -> Tensor:
    """An uninitialised tensor in a load-time tensor's layout, class and attributes.

    Args:
        memory: where it shall lie, if not in memory of its own.
    """
    layout = (tuple(like.shape), like.stride())
    if memory is None:
        tensor = torch.empty_strided(*layout, dtype=like.dtype, device=device)
    else:
        tensor = torch.empty(0, dtype=like.dtype, device=device).set_(memory, 0, *layout)
    tensor.__class__ = like.__class__  # what vLLM does itself
    tensor.__dict__ = like.__dict__.copy()
    return tensor


def stays_live(name: str) -> bool:
    """Whether a cold load fills this tensor where post-processing finds it (biases)."""
    from vllm.model_executor.model_loader.reload import meta

    return name in meta.SKIP_TENSORS


def is_processed(layer: nn.Module) -> bool:
    """Whether a cold load post-processes the layer."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    return isinstance(getattr(layer, "quant_method", None), QuantizeMethodBase)


def post_process(layer: nn.Module) -> None:
    """What a cold load does to a layer once its weights are in it."""
    if hasattr(layer, "_already_called_process_weights_after_loading"):
        # Online quantisation processes a layer once, unless it is told to again.
        delattr(layer, "_already_called_process_weights_after_loading")
    method: Any = layer.quant_method
    with _timed(layer, method):
        method.process_weights_after_loading(layer)
    update: Any = getattr(layer, "update_param_tp_status", None)
    if update is not None:
        update()  # parameters made anew carry the global rank until then


def _timed(layer: nn.Module, method: Any) -> AbstractContextManager[Any]:
    """vLLM's clock of online quantisation, which some of its methods need; new in 0.32."""
    from vllm.model_executor.model_loader import utils

    timing: Any = getattr(utils, "online_quantization_timing_context", None)
    if timing is None:
        return nullcontext()
    from vllm.model_executor.layers.quantization.online.fp8 import OnlineLinearBase
    from vllm.model_executor.layers.quantization.online.moe_base import OnlineMoEMethodBase

    if not isinstance(method, (OnlineLinearBase, OnlineMoEMethodBase)):
        return nullcontext()
    clock: AbstractContextManager[Any] = timing(layer, method)
    return clock


def finish_attention(layer: nn.Module, config: Any) -> None:
    """Derive what an attention layer keeps of its own, MLA's absorbed weights above all."""
    process: Any = layer.process_weights_after_loading
    process(config.model_config.dtype)


def forget_dummy_scales(layer: nn.Module, config: Any) -> None:
    """Set an attention layer's scales to what a checkpoint without any leaves there.

    vLLM's dummy load fills them at random with everything else, and no later load touches
    them: a checkpoint's are refused (see ``make_units``), and those that vLLM measures
    itself aren't these.
    """
    from vllm.model_executor.layers.attention.attention import set_default_quant_scales
    from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

    is_dummy = str(config.load_config.load_format) == "dummy"
    measures = getattr(config.cache_config, "calculate_kv_scales", False)
    reads = isinstance(getattr(layer, "quant_method", None), BaseKVCacheMethod)
    if is_dummy and reads and not measures:
        set_default_quant_scales(layer, register_buffer=False)


def absorbed_weights(model: nn.Module) -> dict[str, Tensor]:
    """What MLA layers derive from their weights and keep in plain attributes, by path."""
    return {
        f"{path}.{name}": value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name in ("W_UV", "W_UK_T") and isinstance(value, Tensor) and value.numel()
    }


def take_moe_kernels(layer: nn.Module) -> list[MoeKernel]:
    """The kernel of an expert layer, if ``layer`` is one.

    Processing builds another, on CPU only while there is none: a reload would leave
    plain weights there where the kernel expects packed ones.
    """
    method = getattr(layer, "quant_method", None)
    kernel = getattr(method, "moe_kernel", None)
    if kernel is None:
        return []
    return [(method, kernel, getattr(method, "moe_quant_config", None))]


def drop_moe_kernels(taken: Iterable[MoeKernel]) -> None:
    """Forget the kernels where processing builds them, and packs for them, only once: on CPU."""
    from vllm.platforms import current_platform

    for method, _, _ in taken:
        if current_platform.is_cpu():
            method.moe_kernel = None


def give_moe_kernels(taken: Iterable[MoeKernel]) -> None:
    """Put the kernels back."""
    for method, kernel, quant_config in taken:
        method.moe_kernel = kernel
        method.moe_quant_config = quant_config
