"""Decide, before anything is changed, whether a table fits the model that an engine runs.

The standard is the engine's own cold load: every destination element that it
writes must be written, and every tensor offered must be used.  It is known from
the headers of the checkpoint that the engine was started from; where there is
none (dummy weights), every element of every parameter is required instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weightwire.errors import TableMismatch, TraceError
from weightwire.trace import Cover, LazyWeight
from weightwire_vllm import compat
from weightwire_vllm.dryrun import LoadTrace, trace_load

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from weightwire.table import CheckpointTensor, TensorTable

__all__ = ["ColdLoad", "check_table", "cold_load"]

_SHOWN = 8


class ColdLoad:
    """What the engine's own load reads and writes.

    Attributes:
        offered: by name, the tensors of its checkpoint.
        trace: what became of them.
    """

    def __init__(self, offered: Sequence[LazyWeight], trace: LoadTrace) -> None:
        self.offered = {entry.name: entry for entry in offered}
        self.trace = trace


def cold_load(model: nn.Module, vllm_config: Any) -> ColdLoad | None:
    """Trace the engine's own load from its checkpoint's headers; None if it has none."""
    entries = compat.checkpoint_entries(model, vllm_config.model_config)
    if entries is None:
        return None
    offered = [LazyWeight(entry.name, entry.shape, entry.dtype) for entry in entries]
    try:
        return ColdLoad(offered, trace_load(model, vllm_config, offered))
    except TableMismatch as error:
        # It did load, so what can't be followed is in the way of any update.
        raise TraceError(f"the engine's own checkpoint can't be traced: {error}") from error


def check_table(
    model: nn.Module,
    vllm_config: Any,
    table: TensorTable,
    cold: ColdLoad | None,
    *,
    ranks: int,
) -> LoadTrace:
    """Trace a table and check it against the cold load.

    Args:
        ranks: inference ranks that share the model; with one, every element
            offered has to be used.

    Raises:
        TableMismatch: the table doesn't fit; the message lists the names.
        TraceError: the model's loader can't be followed.
    """
    tied: dict[str, list[CheckpointTensor]] = {}
    for tensor in table.checkpoint():
        tied.setdefault(table.ties.get(tensor.name, tensor.name), []).append(tensor)
    offered = [
        LazyWeight(tensor.name, tensor.shape, tensor.dtype)
        for tensors in tied.values()
        for tensor in _loaded(tensors, cold)
    ]
    _check_shapes(offered, cold)
    try:
        trace = trace_load(model, vllm_config, offered)
    except TableMismatch as error:
        carried = [weight for weight in offered if weight.name not in table.ties]
        if cold is not None or len(carried) == len(offered):
            raise TableMismatch(f"{error}{_difference(table, cold)}") from error
        # Whether this engine's loader knows the aliases can only be found out by asking.
        trace = trace_load(model, vllm_config, carried)
    _check_uses(table, list(tied.values()), trace, cold, ranks)
    _check_writes(table, trace, cold)
    _check_claims(table, trace)
    return trace


def _loaded(
    tensors: Sequence[CheckpointTensor], cold: ColdLoad | None
) -> Sequence[CheckpointTensor]:
    """Of a tensor and its aliases, those that the engine loads.

    Some loaders refuse an alias that no checkpoint of theirs has.
    """
    if cold is None:
        return tensors
    return [tensor for tensor in tensors if tensor.name in cold.offered] or tensors


def _check_shapes(weights: Sequence[LazyWeight], cold: ColdLoad | None) -> None:
    if cold is None:
        return
    wrong = [
        f"{offered.name!r} is {offered.shape}, the engine loads {cold.offered[offered.name].shape}"
        for offered in weights
        if offered.name in cold.offered and cold.offered[offered.name].shape != offered.shape
    ]
    if wrong:
        raise TableMismatch(f"{len(wrong)} tensors have the wrong shape: {_listed(wrong)}")


def _check_uses(
    table: TensorTable,
    tied: Sequence[Sequence[CheckpointTensor]],
    trace: LoadTrace,
    cold: ColdLoad | None,
    ranks: int,
) -> None:
    unused: list[str] = []
    partly: list[str] = []
    for tensors in tied:
        names = [tensor.name for tensor in tensors]
        used = [name for name in names if trace.tape.used.get(name)]
        if not used:
            # Another rank's share, or dropped by the cold load too.
            dropped = cold is not None and any(
                name in cold.offered and not cold.trace.tape.used[name] for name in names
            )
            is_empty = 0 in tensors[0].shape
            if not is_empty and not dropped and (cold is not None or ranks == 1):
                unused.append(names[0])
        elif ranks == 1 and not any(
            trace.tape.used[name].complete or _same_use(trace, cold, name) for name in used
        ):
            partly.append(names[0])
    if unused:
        raise TableMismatch(
            f"{len(unused)} tensors would not be used: {_listed(unused)}"
            f"{_tie_hint(unused)}{_difference(table, cold)}"
        )
    if partly:
        raise TableMismatch(
            f"only parts of {len(partly)} tensors would be used: {_listed(partly)}; "
            "their shapes don't fit the engine's model"
        )


def _same_use(trace: LoadTrace, cold: ColdLoad | None, name: str) -> bool:
    return (
        cold is not None
        and name in cold.offered
        and not trace.tape.used[name].lacks(cold.trace.tape.used[name])
    )


def _check_writes(table: TensorTable, trace: LoadTrace, cold: ColdLoad | None) -> None:
    required: dict[str, Cover]
    if cold is not None:
        required = cold.trace.tape.written
    else:
        # Nothing says which buffers a cold load fills; parameters have to be.
        required = {
            key: Cover.full(extent)
            for key, extent in trace.tape.loadable.items()
            if key not in trace.buffers and 0 not in extent.sizes
        }
    missing = [
        key
        for key, cover in required.items()
        if key not in trace.tape.written or trace.tape.written[key].lacks(cover)
    ]
    if not missing:
        return
    names = {tensor.name for tensor in table.checkpoint()}
    lost = sorted(
        {
            name
            for key in missing
            if cold is not None
            for name in cold.trace.tape.writers.get(key, ())
            if name not in names
        }
    )
    arrived = sorted({name for key in missing for name in trace.tape.writers.get(key, ())})
    if lost:
        what = f"missing {_listed(lost)}"
    elif arrived:
        what = f"only {_listed(arrived)} would reach them"
    else:
        what = "send the tensors that fill them"
    raise TableMismatch(
        f"{len(missing)} parameters of the engine would keep old or undefined values: "
        f"{_listed(missing)}; {what}"
    )


def _check_claims(table: TensorTable, trace: LoadTrace) -> None:
    for (key, _), claims in trace.tape.claims.items():
        carriers = {frozenset(table.ties.get(name, name) for name in names) for names in claims}
        if len(carriers) > 1:
            names = sorted({name for names in claims for name in names})
            raise TableMismatch(
                f"one region of parameter {key!r} would be filled from {_listed(names)} in turn: "
                "the engine ties what the trainer doesn't"
            )


def _tie_hint(unused: Sequence[str]) -> str:
    if any(name.endswith(("lm_head.weight", "embed_tokens.weight")) for name in unused):
        return (
            "; the engine's embeddings are tied: tie the trainer's, or start the engine with "
            "tie_word_embeddings=False"
        )
    return ""


def _difference(table: TensorTable, cold: ColdLoad | None) -> str:
    if cold is None:
        return ""
    names = {tensor.name for tensor in table.checkpoint()}
    unknown = sorted(names - set(cold.offered))
    missing = sorted(set(cold.offered) - names)
    text = ""
    if unknown:
        text += f"\nnot in the engine's checkpoint: {_listed(unknown)}"
    if missing:
        text += f"\nin the engine's checkpoint only: {_listed(missing)}"
    return text


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
