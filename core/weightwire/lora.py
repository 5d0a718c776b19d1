"""LoRA trainers: what is sent of a model whose layers PEFT has wrapped.

Two ways.  *Merged*: engines get base weights with the adapters added, and know nothing of
LoRA.  *The adapter alone*: engines that serve it get its small matrices, by PEFT's names.

PEFT isn't imported: its layers are told by what they hold (``lora_A``, ``lora_B``, ``scaling``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from weightwire.errors import ConfigError, UnsupportedOperation
from weightwire.names import strip_wrappers
from weightwire.sources import WeightSource
from weightwire.streaming import StreamingSource, TensorSpec

__all__ = ["LoraAdapter", "MergedLora"]

_PREFIX = "base_model.model."
_MATRICES = ("lora_A", "lora_B")
_OTHERS = ("lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")


class MergedLora(StreamingSource):
    """A PEFT model as the model that it would be merged into; the model itself stays as it is.

    Tensors have the names and dtypes of the base model's, and the bits that PEFT's ``merge``
    gives them.  They are made one by one, on every rank: a sharded trainer (FSDP2) gathers one
    layer's at a time.  ``modules_to_save`` take the place of what they replace.

    Args:
        model: with linear layers that PEFT's ``LoraConfig`` has wrapped.

    Raises:
        ConfigError: no layer has an adapter.
        UnsupportedOperation: an active adapter isn't a plain one of a linear layer (DoRA,
            embeddings, convolutions, quantised base weights); names the layer.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        specs: dict[str, TensorSpec] = {}
        ties: dict[str, str] = {}
        first: dict[int, str] = {}
        for name, tensor, layer in self._entries():
            if layer is not None:
                for adapter in _active(layer):
                    _check(name, layer, adapter)
            elif id(tensor) in first:
                ties[name] = first[id(tensor)]
                continue
            else:  # what an adapter is added to is tied to nothing: the others stay as they are
                first[id(tensor)] = name
            specs[name] = TensorSpec(tuple(tensor.shape), tensor.dtype)
        some = next(model.parameters()).device
        super().__init__(self._stream_merged, specs=specs, ties=ties, device=some)

    def _entries(self) -> Iterator[tuple[str, Tensor, Any]]:
        """Names of the merged model, with base tensors and the layers whose adapters are added."""
        layers = dict(_layers(self._model))
        for name, tensor in self._model.state_dict(keep_vars=True).items():
            path, _, leaf = name.rpartition(".")
            stripped = _base_name(name)
            if stripped is not None:
                wrapped = path.endswith(".base_layer") and leaf == "weight"
                yield (
                    stripped,
                    tensor,
                    layers.get(path.removesuffix(".base_layer") if wrapped else ""),
                )

    def _stream_merged(self) -> Iterator[tuple[str, Tensor]]:
        with torch.no_grad():
            for name, tensor, layer in self._entries():
                value = _full(tensor)
                if layer is not None and not layer.merged:
                    for adapter in _active(layer):
                        _check(name, layer, adapter)
                        value = torch.add(value, _delta(layer, adapter)).to(tensor.dtype)
                yield name, value


class LoraAdapter(WeightSource):
    """One adapter of a PEFT model, by the names that its checkpoint has.

    Tensors are sent from where they lie, sharded or not.

    Args:
        model: with layers that PEFT's ``LoraConfig`` has wrapped.
        adapter: its name.

    Raises:
        ConfigError: no layer has it.
    """

    def __init__(self, model: nn.Module, adapter: str = "default") -> None:
        self._model = model
        self._adapter = adapter
        self.tensors()

    def tensors(self) -> Mapping[str, Tensor]:
        found: dict[str, Tensor] = {}
        for path, layer in _layers(self._model):
            if self._adapter not in layer.lora_A:
                continue
            _check(path, layer, self._adapter)
            for matrix in _MATRICES:
                name = f"{_PREFIX}{strip_wrappers(path).removeprefix(_PREFIX)}.{matrix}.weight"
                found[name] = getattr(layer, matrix)[self._adapter].weight
        if not found:
            raise ConfigError(
                f"no layer has an adapter {self._adapter!r}: name one that PEFT added"
            )
        return found

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors().values())).device


def _layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """PEFT's LoRA layers by path."""
    found = False
    for path, module in model.named_modules():
        if all(isinstance(getattr(module, name, None), nn.ModuleDict) for name in _MATRICES):
            found = True
            yield path, module
    if not found:
        raise ConfigError(
            f"{type(model).__name__} has no LoRA layers: wrap it by peft.get_peft_model first, or "
            "send it as it is"
        )


def _active(layer: Any) -> list[str]:
    return [name for name in layer.active_adapters if _has(layer, name)]


def _has(layer: Any, adapter: str) -> bool:
    return any(adapter in getattr(layer, name, ()) for name in (*_MATRICES, *_OTHERS))


def _check(name: str, layer: Any, adapter: str) -> None:
    """Raises unless the adapter is two matrices beside a linear layer's weight."""
    base = layer.get_base_layer().weight
    reason = ""
    if adapter not in layer.lora_A or layer.lora_A[adapter].weight.dim() != 2:
        reason = "isn't of a linear layer"
    elif adapter in getattr(layer, "lora_variant", {}) or getattr(layer, "use_dora", {}).get(
        adapter
    ):
        reason = "is of a variant (DoRA and the like)"
    elif getattr(layer, "lora_bias", {}).get(adapter):
        reason = "has a bias"
    elif base.dim() != 2 or not base.is_floating_point() or base.dtype.itemsize == 1:
        reason = f"lies beside a weight of {base.dtype}, shape {tuple(base.shape)}"
    elif layer.merged and set(layer.merged_adapters) != set(_active(layer)):
        reason = "is merged without others, or others without it: unmerge them"
    if reason:
        raise UnsupportedOperation(
            f"adapter {adapter!r} of {name!r} {reason}: only plain LoRA of linear layers is sent; "
            "merge it yourself, and send the model"
        )


def _delta(layer: Any, adapter: str) -> Tensor:
    """What PEFT's ``get_delta_weight`` says, of whole matrices."""
    a, b = (_full(getattr(layer, name)[adapter].weight) for name in _MATRICES)
    dtype = b.dtype
    # As PEFT: half precision is multiplied in float32 on CPUs.
    widens = b.device.type == "cpu" and dtype in (torch.float16, torch.bfloat16)
    product = b.float() @ a.float() if widens else b @ a
    if layer.fan_in_fan_out:
        product = product.T
    scaled: Tensor = product * layer.scaling[adapter]
    return scaled.to(dtype) if widens else scaled


def _full(tensor: Tensor) -> Tensor:
    """A whole tensor; a collective of all ranks where it is sharded."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    return tensor.detach()


def _base_name(name: str) -> str | None:
    """What a tensor of a PEFT model is called without PEFT, or None if it has no place there."""
    parts = strip_wrappers(name).removeprefix(_PREFIX).split(".")
    if any(part in (*_MATRICES, *_OTHERS, "original_module") for part in parts):
        return None
    if "modules_to_save" in parts:  # followed by its adapter's name
        at = parts.index("modules_to_save")
        del parts[at : at + 2]
    return ".".join(part for part in parts if part != "base_layer")
