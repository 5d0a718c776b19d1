"""Run a model's real ``load_weights`` on tensors without data.

The model's load-time parameters are swapped for meta tensors, so that nothing
of the engine changes, and core's recorder writes down what the loader does.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from weightwire.errors import TableMismatch, TraceError
from weightwire.trace import LazyWeight, Recorder, Tape
from weightwire_vllm import compat

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["LoadTrace", "Slot", "trace_load"]


@dataclass(frozen=True)
class Slot:
    """Where a module holds a tensor: module, local name, and whether as a buffer."""

    layer: nn.Module
    name: str
    is_buffer: bool


@dataclass
class LoadTrace:
    """What a load did.

    Attributes:
        tape: operations on destinations (``module.tensor``).
        slots: by destination, who holds it; more than one where layers are tied.
        stand_ins: by destination, its load-time tensor without data.
    """

    tape: Tape = field(default_factory=Tape)
    slots: dict[str, list[Slot]] = field(default_factory=dict)
    stand_ins: dict[str, Tensor] = field(default_factory=dict)

    @property
    def buffers(self) -> set[str]:
        """Destinations that are buffers."""
        return {key for key, slots in self.slots.items() if slots[0].is_buffer}


def trace_load(model: nn.Module, vllm_config: Any, weights: Sequence[LazyWeight]) -> LoadTrace:
    """Trace one ``load_weights`` call.

    Raises:
        TableMismatch: the loader refused a tensor (unknown name, wrong shape).
        TraceError: the loader did what can't be followed or replayed.
    """
    with compat.config_context(vllm_config), _swapped(model) as trace:
        recorder = Recorder(trace.stand_ins)
        handed = recorder.hand_out(weights)
        try:
            with recorder:
                model.load_weights(handed)  # type: ignore[operator]  # vLLM's protocol
        except (TraceError, TableMismatch):
            raise
        except NotImplementedError as error:
            raise TraceError(_said(recorder.last, "its loader reads values", error)) from error
        except Exception as error:
            raise TableMismatch(_said(recorder.last, "the engine refuses it", error)) from error
        trace.tape = recorder.tape
        for key, slots in trace.slots.items():
            for slot in slots:
                recorder.check_binding(key, getattr(slot.layer, slot.name, None))
    return trace


def _said(last: LazyWeight | None, what: str, error: Exception) -> str:
    text = " ".join((str(error) or type(error).__name__).split())
    if len(text) > 400:
        text = text[:400] + " ..."
    if last is None:
        return f"load_weights failed before it took a tensor: {text}"
    return f"tensor {last.name!r} of shape {last.shape}, {last.dtype}: {what}: {text}"


@contextmanager
def _swapped(model: nn.Module) -> Iterator[LoadTrace]:
    """The model with load-time tensors on meta; everything is put back at the end."""
    trace = LoadTrace()
    saved: list[compat.Registries] = []
    keys: dict[int, str] = {}
    try:
        for path, layer in model.named_modules():
            found = compat.load_time_tensors(layer)
            saved.append(compat.Registries(layer))
            for is_buffer, registry in ((False, layer._parameters), (True, layer._buffers)):
                live: dict[str, Any] = dict(registry)
                for name, current in live.items():
                    if current is not None:
                        del registry[name]
                for name, tensor in found[is_buffer].items():
                    current = live.get(name)
                    # Tied layers share one parameter, and a cold load sees that.
                    key = None if current is None else keys.get(id(current))
                    if key is None or trace.stand_ins[key].shape != tensor.shape:
                        key = f"{path}.{name}" if path else name
                        trace.stand_ins[key] = compat.unwrapped(tensor)
                        if current is not None:
                            keys[id(current)] = key
                    trace.slots.setdefault(key, []).append(Slot(layer, name, is_buffer))
                    registry[name] = trace.stand_ins[key]
        yield trace
    finally:
        for registries in saved:
            registries.put_back()
