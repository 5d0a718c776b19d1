"""A vLLM model as a weight target: full checkpoint tensors through layerwise reload."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from weightwire.errors import HandleError
from weightwire.table import Region, TensorTable
from weightwire.targets import WeightTarget
from weightwire_vllm import compat
from weightwire_vllm.verdict import ColdLoad, check_table, cold_load

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from weightwire_vllm.dryrun import LoadTrace

__all__ = ["VllmTarget"]

_log = logging.getLogger("weightwire.vllm")


@dataclass(frozen=True)
class _Plan:
    trace: LoadTrace
    names: Sequence[Sequence[str]]
    carrier: Mapping[str, str]
    tensor_names: Sequence[str]


@dataclass
class _Session:
    layers: Sequence[tuple[str, nn.Module]]
    live: Sequence[tuple[nn.Module, Tensor, Tensor]]
    kernels: Sequence[tuple[nn.Module, tuple[Any, Any, Any]]]


class VllmTarget(WeightTarget):
    """The weights of one vLLM worker.

    Each group goes to the model's own ``load_weights``.  A layer is built anew
    from its load-time layout when its last tensor has arrived, post-processed
    once, and copied into the storage that it has always had; padded layers,
    attention and MLA follow in ``commit``.

    Until ``commit`` returns (or ``rollback``) the engine must not generate: its
    parameters are on the meta device.

    Args:
        model: the worker's model.
        vllm_config: the worker's config.
    """

    def __init__(self, model: nn.Module, vllm_config: Any) -> None:
        self._model = model
        self._config = vllm_config
        self._cold: ColdLoad | None = None
        self._cold_known = False
        self._plan: _Plan | None = None
        self._session: _Session | None = None
        self._begun = False

    @property
    def keeps_buffers(self) -> bool:
        """Always True: loaders keep what they are given until their layer is complete."""
        return True

    def plan(self, table: TensorTable) -> Sequence[Region]:
        """Whole tensors, for every tensor that this rank's load uses.

        Nothing of the engine changes, whatever the outcome.

        Raises:
            TableMismatch: names or shapes differ from what the model loads, a
                parameter would keep old values, or ties differ.
            TraceError: the model's loader does what layerwise reload would lose.
        """
        if self._begun:
            raise HandleError("plan() during an update: commit it or roll it back first")
        if not self._cold_known:
            self._cold = cold_load(self._model, self._config)
            self._cold_known = True
        ranks = int(self._config.parallel_config.world_size)
        trace, names = check_table(self._model, self._config, table, self._cold, ranks=ranks)
        index = table.index()
        carrier = {name: table.ties.get(name, name) for group in names for name in group}
        self._plan = _Plan(trace, names, carrier, [entry.name for entry in table.tensors])
        wanted = sorted({index[name] for name in carrier.values()})
        return [Region.whole(i, table.tensors[i]) for i in wanted]

    def begin(self, version: int) -> None:
        """Start a layerwise reload."""
        if self._plan is None:
            raise HandleError("begin() before plan(): plan the sender's table first")
        if self._begun:
            raise HandleError("begin() during an update: commit it or roll it back first")
        with compat.config_context(self._config):
            self._begun = True
            taken = [
                (layer, entry)
                for layer in self._model.modules()
                for entry in compat.take_moe_kernels(layer)
            ]
            compat.begin_reload(self._model)
            layers = list(self._model.named_modules())
            live = [
                (layer, tensor, tensor.detach().clone())
                for _, layer in layers
                for tensor in _own_tensors(layer)
                if not tensor.is_meta
            ]
            self._session = _Session(layers, live, taken)
            compat.drop_moe_kernels([entry for _, entry in taken])
            for path, layer in layers:
                self._keep_untouched(path, layer, self._plan.trace)
        _log.debug("layerwise reload for version %d has begun", version)

    def write(self, group: int, tensors: Mapping[Region, Tensor]) -> None:
        """Hand one group to the model's ``load_weights``."""
        plan = self._plan
        if plan is None or self._session is None:
            raise HandleError("write() before begin()")

        arrived = {plan.tensor_names[region.tensor]: tensor for region, tensor in tensors.items()}

        def weights() -> Iterator[tuple[str, Tensor]]:
            for name in plan.names[group]:
                # Loaders may set attributes on what they get; an alias needs its own.
                yield name, arrived[plan.carrier[name]].detach()

        with compat.config_context(self._config):
            self._model.load_weights(weights())  # type: ignore[operator]  # vLLM's protocol

    def commit(self) -> None:
        """Process what is left, attention and MLA layers last."""
        session = self._session
        if session is None:
            raise HandleError("commit() before begin()")
        with compat.config_context(self._config):
            for layers in self._tied_layers(session):
                pending = [layer for layer in layers if compat.layer_info(layer).can_load()]
                # The owner first (a padded one is still waiting), then those that
                # were given nothing and derive their own state from its values.
                for layer in pending:
                    if compat.layer_info(layer).load_numel > 0:
                        compat.process_layer(layer)
                for layer in pending:
                    if compat.layer_info(layer).can_load():
                        self._process_tied(layer)
            for layer in self._untouched(session):
                compat.place_back(layer)  # or vLLM warns that it "failed to load" them
            compat.finish_reload(self._model, self._config.model_config)
            compat.give_moe_kernels(
                [entry for _, entry in session.kernels if entry[0].moe_kernel is None]
            )
        self._synchronize()
        self._begun = False
        self._session = None

    def rollback(self, error: BaseException) -> bool:
        """Put the kernel tensors back, so that the engine can run again.

        Returns:
            True when no layer had been processed: the engine holds exactly what
            it held before.  False when layers of two versions are mixed; it
            still runs, but has to stay out of service until a full sync.
        """
        if not self._begun:
            return True
        session, self._session = self._session, None
        whole = True
        with compat.config_context(self._config):
            pending: set[nn.Module] = set()
            for layer in self._model.modules():
                info = compat.layer_info(layer)
                if info.can_load():
                    pending.add(layer)
                    # A layer that failed while it was processed may be half copied.
                    if 0 < info.load_numel_total <= info.load_numel:
                        whole = whole and compat.is_attention(layer)
                    compat.place_back(layer)
                elif session is not None:
                    whole = False
            compat.restore_torchao_flag(self._model)
            if session is not None:
                for layer, tensor, before in session.live:
                    if layer in pending:
                        tensor.data.copy_(before)
                compat.give_moe_kernels(
                    [entry for layer, entry in session.kernels if layer in pending]
                )
        self._synchronize()
        self._begun = False
        _log.warning(
            "update rolled back (%s): the engine is %s",
            type(error).__name__,
            "as before" if whole else "mixed and needs a full sync",
        )
        return whole

    def _keep_untouched(self, path: str, layer: nn.Module, trace: LoadTrace) -> None:
        """Keep elements that no loader writes (buffers, padding) as they are.

        Layerwise reload builds a layer's tensors from uninitialised memory and
        copies all of it over the kernel tensors.
        """
        if compat.is_attention(layer):
            return  # vLLM puts their kernel tensors back itself
        own = [(name, t) for name, t in _named_tensors(layer) if t.is_meta]
        if not any(_key(path, name) in trace.written for name, _ in own):
            return
        params, buffers = compat.layer_info(layer).kernel_tensors
        kernel: dict[str, Tensor] = {**params, **buffers}
        for name, tensor in own:
            cover = trace.written.get(_key(path, name))
            old = kernel.get(name)
            if (cover is not None and cover.complete) or old is None:
                continue
            if old.shape != tensor.shape or old.dtype != tensor.dtype:
                continue  # the kernel's layout differs: there is nothing to start from
            setattr(layer, name, compat.dressed(old.detach().clone(), tensor))

    def _tied_layers(self, session: _Session) -> list[list[nn.Module]]:
        """Layers that share one written parameter, by parameter."""
        shared: dict[int, list[nn.Module]] = {}
        written: set[int] = set()
        for path, layer in session.layers:
            info = compat.layer_info(layer)
            live = info.kernel_tensors[0] if info.can_load() else layer._parameters
            for name, parameter in live.items():
                if parameter is None:
                    continue
                shared.setdefault(id(parameter), []).append(layer)
                if self._plan is not None and _key(path, name) in self._plan.trace.written:
                    written.add(id(parameter))
        return [shared[ident] for ident in written if len(shared[ident]) > 1]

    def _untouched(self, session: _Session) -> list[nn.Module]:
        """Layers that the plan doesn't write, attention aside: that has work to do anyway."""
        written = set() if self._plan is None else self._plan.trace.written.keys()
        return [
            layer
            for path, layer in session.layers
            if compat.layer_info(layer).can_load()
            and not compat.is_attention(layer)
            and not any(_key(path, name) in written for name, _ in _named_tensors(layer))
        ]

    def _process_tied(self, layer: nn.Module) -> None:
        info = compat.layer_info(layer)
        for name, parameter in info.kernel_tensors[0].items():
            slot = getattr(layer, name)
            if slot.shape != parameter.shape or slot.dtype != parameter.dtype:
                raise HandleError(
                    f"tied parameter {name!r} of {type(layer).__name__} is packed: "
                    "start the engine with tie_word_embeddings=False"
                )
            setattr(layer, name, compat.dressed(parameter.detach().clone(), slot))
        compat.process_layer(layer)

    def _synchronize(self) -> None:
        first = next(self._model.parameters(), None)
        # torch.accelerator.synchronize raises where there is no accelerator.
        if first is not None and first.device.type != "cpu":
            torch.accelerator.synchronize(first.device)


def _key(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _named_tensors(layer: nn.Module) -> list[tuple[str, Tensor]]:
    found: list[tuple[str, Tensor]] = [
        (name, p) for name, p in layer._parameters.items() if p is not None
    ]
    found.extend((name, b) for name, b in layer._buffers.items() if b is not None)
    return found


def _own_tensors(layer: nn.Module) -> list[Tensor]:
    return [tensor for _, tensor in _named_tensors(layer)]
