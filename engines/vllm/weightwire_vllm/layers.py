"""Layers between load-time layout and the memory in which their kernels run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from weightwire.copying import copy_all
from weightwire.errors import TraceError
from weightwire_vllm import compat
from weightwire_vllm.kernels import derived_copies

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from weightwire_vllm.dryrun import LoadTrace

__all__ = [
    "Unit",
    "attention_layers",
    "finish_attention",
    "initial",
    "live_tensor",
    "make_units",
    "process",
]

# Parameter classes of vLLM see every attribute of theirs that is read, for nothing: that
# alone was a tenth of a version's time.
_plainly = torch._C.DisableTorchFunctionSubclass


@dataclass(frozen=True)
class _Recipe:
    """How one layer is put into load-time layout: looked up once for a layout.

    Attributes:
        like: load-time parameters and buffers by name, without data.
        keys: by whether they are buffers, destinations of the load by name.
        processed: whether a cold load post-processes the layer.
    """

    path: str
    layer: nn.Module
    like: tuple[Mapping[str, Tensor], Mapping[str, Tensor]]
    keys: tuple[Mapping[str, str], Mapping[str, str]]
    processed: bool


@dataclass
class Unit:
    """Layers that are finished together, because they share what is written.

    Attributes:
        layers: with their paths, in the model's order.
        keys: the destinations in them that the load writes.
        staged: whether they are built anew in load-time layout and post-processed;
            if False, their memory is written as it is.
        recipes: of its layers, if they are staged.
    """

    layers: list[tuple[str, nn.Module]]
    keys: list[str]
    staged: bool
    recipes: list[_Recipe] = field(default_factory=list)

    @property
    def name(self) -> str:
        return " and ".join(path or "the model" for path, _ in self.layers)


def make_units(model: nn.Module, trace: LoadTrace) -> list[Unit]:
    """The units that a load writes.

    Raises:
        TraceError: a layer's state can't be rebuilt; named.
    """
    paths = {layer: path for path, layer in model.named_modules()}
    for layer, path in paths.items():
        _check_views(path, layer)
    order = {layer: i for i, layer in enumerate(paths)}
    groups: dict[nn.Module, set[nn.Module]] = {}
    for key in trace.tape.written:
        together = {slot.layer for slot in trace.slots[key]}
        together |= {other for layer in together for other in groups.get(layer, ())}
        for layer in together:
            groups[layer] = together
    units: dict[int, Unit] = {}
    for key in trace.tape.written:
        owner = trace.slots[key][0].layer
        together = groups[owner]
        unit = units.get(id(together))
        if unit is None:
            layers = [(paths[layer], layer) for layer in sorted(together, key=order.__getitem__)]
            unit = units[id(together)] = Unit(layers, [], False)
        unit.keys.append(key)
    for unit in units.values():
        _check(unit, trace)
        unit.staged = any(compat.is_processed(layer) for _, layer in unit.layers) or not all(
            _fits(live_tensor(trace, key), trace.stand_ins[key]) for key in unit.keys
        )
        if unit.staged:
            unit.recipes = [_recipe(path, layer, unit, trace) for path, layer in unit.layers]
    return sorted(units.values(), key=lambda unit: order[unit.layers[0][1]])


def live_tensor(trace: LoadTrace, key: str) -> Tensor | None:
    """What the engine holds at a destination now."""
    slot = trace.slots[key][0]
    registry: Mapping[str, Tensor | None] = (
        slot.layer._buffers if slot.is_buffer else slot.layer._parameters
    )
    return registry.get(slot.name)


def process(filled: Sequence[tuple[Unit, Mapping[str, Tensor]]], device: torch.device) -> None:
    """Post-process units once, and copy the results over their kernel tensors.

    Args:
        filled: with each, its written destinations, filled, in load-time layout.

    Whatever happens, the layers hold the tensors that they held before.
    """
    held: list[_Held] = []
    copies: list[tuple[Tensor, Tensor]] = []
    try:
        for unit, staged in filled:
            loaded = {key.rpartition(".")[2] for key in unit.keys}
            for recipe in unit.recipes:
                layer = _Held(recipe.layer)
                held.append(layer)
                with _plainly():
                    _install(recipe, layer.kernel, staged, device)
                if recipe.processed:
                    compat.drop_moe_kernels(layer.experts)
                    compat.post_process(recipe.layer)
                with _plainly():
                    copies.extend(_copies(recipe, layer.kernel, loaded))
                    own = {**layer.kernel.parameters, **layer.kernel.buffers}.values()
                    copies.extend(derived_copies(recipe.path, layer.experts, own))
                    if len(unit.recipes) > 1:  # the next may process the same tensors
                        _copy(copies)
        with _plainly():
            _copy(copies)
            for layer in held:
                layer.pins.restore()
    finally:
        for layer in held:
            layer.put_back()


def attention_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that ``finish_attention`` is for."""
    return [layer for layer in model.modules() if compat.is_attention(layer)]


def finish_attention(layers: Iterable[nn.Module], config: Any, *, is_first: bool) -> None:
    """What a cold load does to attention layers after all others.

    Args:
        config: the engine's.
        is_first: nothing has replaced yet what the engine was started with.
    """
    for layer in layers:
        pins = _Pins([layer, getattr(layer, "impl", None)])
        compat.finish_attention(layer, config)
        if is_first:
            compat.forget_dummy_scales(layer, config)
        pins.restore()


class _Pins:
    """Tensors in plain attributes: values may change, addresses must not."""

    def __init__(self, holders: Iterable[object]) -> None:
        self._held = [
            (holder, name, value)
            for holder in holders
            if hasattr(holder, "__dict__")
            for name, value in vars(holder).items()
            if isinstance(value, Tensor)
        ]

    def restore(self) -> None:
        with torch.no_grad():
            for holder, name, old in self._held:
                new = vars(holder).get(name)
                if isinstance(new, Tensor) and new is not old and _same_layout(new, old):
                    old.copy_(new)
                    vars(holder)[name] = old


class _Held:
    """What a layer holds, while it is in load-time layout."""

    def __init__(self, layer: nn.Module) -> None:
        self.kernel = compat.Registries(layer)
        self.pins = _Pins([layer])
        self.experts = compat.take_moe_kernels(layer)

    def put_back(self) -> None:
        self.kernel.put_back()
        # The kernel of the first load: it knows the memory that has just been filled.
        compat.give_moe_kernels(self.experts)


def _check_views(path: str, layer: nn.Module) -> None:
    """Refuse a buffer that was a view of a parameter and no longer is one.

    Post-processing moved the parameter and left the buffer behind with the values
    of the first load (Mamba's ``conv_weights`` on CPU): nothing would refresh it.
    """
    if compat.is_processed(layer) or compat.is_attention(layer):
        return
    known = compat.load_time_tensors(layer)[True]
    for name, buffer in layer._buffers.items():
        if buffer is None or name in known or name not in layer._non_persistent_buffers_set:
            continue
        own = list(layer.parameters())
        same = any(p.untyped_storage()._cdata == buffer.untyped_storage()._cdata for p in own)
        if not same and any(p.numel() == buffer.numel() for p in own):
            raise TraceError(
                f"buffer '{path}.{name}' was a view of a parameter and is a copy since the first "
                "load, which nothing refreshes: this model can't be updated in place; restart the "
                "engine to change its weights"
            )


def _check(unit: Unit, trace: LoadTrace) -> None:
    for path, layer in unit.layers:
        if compat.is_attention(layer):
            raise TraceError(
                f"attention layer {path!r} loads weights of its own ({', '.join(unit.keys[:3])}): "
                "these can't be updated in place; restart the engine to change them"
            )
    for key in unit.keys:
        live, like = live_tensor(trace, key), trace.stand_ins[key]
        if trace.tape.written[key].complete or (live is not None and _same_layout(live, like)):
            continue
        raise TraceError(
            f"parameter {key!r} is loaded in part, and its layout is another once it is "
            "processed: what a cold load leaves in the rest can't be known; restart the engine"
        )


def _fits(live: Tensor | None, like: Tensor) -> bool:
    return live is not None and _same_layout(live, like) and live.stride() == like.stride()


def _same_layout(tensor: Tensor, like: Tensor) -> bool:
    return tensor.shape == like.shape and tensor.dtype == like.dtype


def _recipe(path: str, layer: nn.Module, unit: Unit, trace: LoadTrace) -> _Recipe:
    keys: tuple[dict[str, str], dict[str, str]] = ({}, {})
    for key in unit.keys:
        for slot in trace.slots[key]:
            if slot.layer is layer:
                keys[slot.is_buffer][slot.name] = key
    return _Recipe(path, layer, compat.load_time_tensors(layer), keys, compat.is_processed(layer))


def _install(
    recipe: _Recipe, kernel: compat.Registries, staged: Mapping[str, Tensor], device: torch.device
) -> None:
    """Put a layer into load-time layout, filled as a cold load fills it."""
    for is_buffer, registry, before in (
        (False, recipe.layer._parameters, kernel.parameters),
        (True, recipe.layer._buffers, kernel.buffers),
    ):
        live: Mapping[str, Tensor | None] = before
        slots: dict[str, Any] = registry
        for name, tensor in live.items():
            if tensor is not None and not compat.stays_live(name):
                del slots[name]
        for name, like in recipe.like[is_buffer].items():
            key = recipe.keys[is_buffer].get(name)
            old = live.get(name)
            if compat.stays_live(name):
                if key is not None and old is not None:
                    old.data.copy_(staged[key])
            elif key is not None:
                slots[name] = staged[key]
            else:
                slots[name] = initial(f"{recipe.path}.{name}", like, old, device)


def initial(key: str, like: Tensor, live: Tensor | None, device: torch.device) -> Tensor:
    """A load-time tensor with what no loader writes as it is: padding, untouched buffers."""
    tensor = compat.materialised(like, device)
    if live is None or not _same_layout(live, like):
        raise TraceError(
            f"tensor {key!r} isn't loaded, and its layout is another once it is processed: what a "
            "cold load starts from can't be known; restart the engine to change this layer"
        )
    tensor.data.copy_(live)
    return tensor


def _copies(
    recipe: _Recipe, kernel: compat.Registries, loaded: set[str]
) -> Iterator[tuple[Tensor, Tensor]]:
    """The memory that kernels and CUDA graphs know, with the processed values for it."""
    held: dict[str, Tensor | None] = {**kernel.parameters, **kernel.buffers}
    processed: dict[str, Tensor | None] = {**recipe.layer._buffers, **recipe.layer._parameters}
    for name, old in held.items():
        new = processed.get(name)
        if old is None or new is None or new is old:
            continue
        if name in kernel.non_persistent and name not in loaded:
            continue
        if not _same_layout(new, old):
            raise TraceError(
                f"{recipe.path}.{name} is {tuple(new.shape)}, {new.dtype} after processing and was "
                f"{tuple(old.shape)}, {old.dtype}: it can't be updated in place; restart the engine"
            )
        yield old.data, new.data


def _copy(copies: list[tuple[Tensor, Tensor]]) -> None:
    copy_all([old for old, _ in copies], [new for _, new in copies], in_chunks=False)
    copies.clear()
