"""A vLLM model as a weight target: its loader traced once, and replayed in place."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from weightwire.errors import HandleError
from weightwire.fingerprint import Fingerprint
from weightwire.fingerprinting import Fingerprinter
from weightwire.targets import WeightTarget
from weightwire.trace import Program, Run, compile_tape
from weightwire_vllm import compat
from weightwire_vllm.layers import (
    Unit,
    attention_layers,
    finish_attention,
    initial,
    live_tensor,
    make_units,
    process,
)
from weightwire_vllm.verdict import ColdLoad, check_table, cold_load

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from weightwire.table import Region, TensorTable
    from weightwire_vllm.dryrun import LoadTrace

__all__ = ["VllmTarget"]

_log = logging.getLogger("weightwire.vllm")

_TOGETHER = 64 << 20
"""Bytes of layers that are processed at one time: what processing makes anew lives so long."""


@dataclass(frozen=True)
class _Plan:
    trace: LoadTrace
    program: Program
    unit_of: Mapping[str, Unit]
    due: Mapping[int, Sequence[Unit]]
    """By group, the units that are complete once it has been replayed."""
    whole: frozenset[str]
    """Destinations of which the load writes every element."""
    attention: Sequence[nn.Module]


@dataclass
class _Update:
    run: Run
    due: deque[tuple[int, Sequence[Unit]]]
    staged: dict[str, Tensor] = field(default_factory=dict)
    changed: bool = False


class VllmTarget(WeightTarget):
    """The weights of one vLLM worker.

    ``plan`` runs the model's own ``load_weights`` once, on tensors without data;
    it never runs again.  Each group is replayed from that trace: a layer is
    built anew in load-time layout when its first tensor arrives, post-processed
    once after its last, and copied into the memory that it has always had.
    Layers without post-processing are written where they are.  Attention and
    MLA layers follow in ``commit``.

    Until ``commit`` returns (or ``rollback``) the engine must not generate: its
    layers hold two versions.

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
        self._update: _Update | None = None
        self._spare: dict[int, list[torch.UntypedStorage]] = {}
        self._fingerprinter = Fingerprinter()
        self._is_first = True  # nothing was committed yet
        first = next(model.parameters(), None)
        self._device = torch.device("cpu") if first is None else first.device

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def column_slices(self) -> int:
        return compat.column_slices(self._config)

    def plan(self, table: TensorTable) -> Sequence[Region]:
        """The parts of the table's tensors that this rank's own load uses.

        Nothing of the engine changes, whatever the outcome.

        Raises:
            TableMismatch: names or shapes differ from what the model loads, a
                parameter would keep old values, or ties differ.
            TraceError: the model's loader does what can't be replayed.
        """
        if self._update is not None:
            raise HandleError("plan() during an update: commit it or roll it back first")
        if not self._cold_known:
            self._cold = cold_load(self._model, self._config)
            self._cold_known = True
        ranks = int(self._config.parallel_config.world_size)
        trace = check_table(self._model, self._config, table, self._cold, ranks=ranks)
        program = compile_tape(trace.tape, table)
        units = make_units(self._model, trace)
        due: dict[int, list[Unit]] = {}
        for unit in units:
            due.setdefault(max(program.last[key] for key in unit.keys), []).append(unit)
        unit_of = {key: unit for unit in units for key in unit.keys}
        whole = frozenset(key for key, cover in trace.tape.written.items() if cover.complete)
        self._plan = _Plan(trace, program, unit_of, due, whole, attention_layers(self._model))
        self._spare.clear()  # of other sizes, perhaps
        return program.regions

    @property
    def path(self) -> str:
        """``traced``, and what is replayed."""
        if self._plan is None:
            return ""
        program = self._plan.program
        return (
            f"traced: {program.replayed} operations on {len(program.regions)} regions, planned "
            "from the model's own loader"
        )

    def begin(self, version: int) -> None:
        """Start an update; nothing of the engine changes yet."""
        if self._plan is None:
            raise HandleError("begin() before plan(): plan the sender's table first")
        if self._update is not None:
            raise HandleError("begin() during an update: commit it or roll it back first")
        run = Run(self._plan.program, self._destination, self._device)
        self._update = _Update(run, deque(sorted(self._plan.due.items())))
        _log.debug("update to version %d has begun", version)

    def write(self, group: int, tensors: Mapping[Region, Tensor]) -> None:
        """Replay one group, and finish the layers that it completes."""
        _, update = self._running("write")
        with compat.config_context(self._config):
            update.run.feed(group, tensors)
            self._synchronize()  # the group's memory may be reused once this returns
            while update.due and update.due[0][0] <= group:
                self._finish(update.due.popleft()[1])

    def commit(self) -> None:
        """Finish what is left, attention and MLA layers last."""
        plan, update = self._running("commit")
        with compat.config_context(self._config):
            update.run.finish()
            while update.due:
                self._finish(update.due.popleft()[1])
            update.changed = True
            finish_attention(plan.attention, self._config, is_first=self._is_first)
        self._synchronize()
        self._update, self._is_first = None, False

    def release_buffers(self) -> None:
        self._spare.clear()

    def prepare_fingerprint(self, version: int) -> None:
        self._fingerprinter.prepare(version)

    def fingerprint(self, version: int) -> Fingerprint:
        """Of all parameters, as the kernels read them, and of what attention derives from them.

        Buffers are left out: some are scratch memory, which differs between engines.
        """
        parameters = {
            name: parameter.data
            for name, parameter in self._model.named_parameters()
            if parameter.numel() and not parameter.is_meta
        }
        held = {**parameters, **compat.absorbed_weights(self._model)}
        reads = self._plan.program.regions if self._plan is not None else ()
        return self._fingerprinter.of(held, version, reads)

    def rollback(self, error: BaseException) -> bool:
        """Forget an update, so that the engine can run again.

        Returns:
            True when no layer had been changed: the engine holds exactly what
            it held before.  False when layers of two versions are mixed; it
            still runs, but has to stay out of service until a full sync.
        """
        update, self._update = self._update, None
        if update is None:
            return True
        self._synchronize()
        _log.warning(
            "update rolled back (%s): the engine is %s",
            type(error).__name__,
            "mixed and needs a full sync" if update.changed else "as before",
        )
        return not update.changed

    def _running(self, call: str) -> tuple[_Plan, _Update]:
        if self._plan is None or self._update is None:
            raise HandleError(f"{call}() before begin()")
        return self._plan, self._update

    def _destination(self, key: str) -> Tensor:
        """The memory that the replay fills: a layer's own, or its load-time stand-in's."""
        plan, update = self._running("write")
        if key in update.staged:
            return update.staged[key]
        live = live_tensor(plan.trace, key)
        if not plan.unit_of[key].staged:
            assert live is not None  # noqa: S101 - make_units has compared it
            update.changed = True
            return live.data
        like = plan.trace.stand_ins[key]
        update.staged[key] = (
            compat.materialised(like, self._device, self._take_spare(like))
            if key in plan.whole
            else initial(key, like, live, self._device)
        )
        return update.staged[key]

    def _finish(self, units: Sequence[Unit]) -> None:
        _, update = self._running("write")
        together: list[tuple[Unit, dict[str, Tensor]]] = []
        nbytes = 0
        for unit in units:
            if unit.staged:
                update.changed = True
                staged = {key: update.staged.pop(key) for key in unit.keys}
                together.append((unit, staged))
                nbytes += sum(tensor.nbytes for tensor in staged.values())
            if nbytes >= _TOGETHER:
                self._process(together)
                nbytes = 0
        self._process(together)

    def _process(self, together: list[tuple[Unit, dict[str, Tensor]]]) -> None:
        process(together, self._device)
        for _, staged in together:
            self._keep_spare(staged)
        together.clear()

    def _take_spare(self, like: Tensor) -> torch.UntypedStorage | None:
        spare = self._spare.get(_extent_nbytes(like))
        return spare.pop() if spare else None

    def _keep_spare(self, staged: dict[str, Tensor]) -> None:
        """Keep the memory of a finished layer for the next one, unless something still uses it.

        Fresh pages cost as much as a copy.  What is kept, from one version to the
        next too, is what was staged at one time: a layer's tensors of each size.
        """
        if self._device.type != "cpu":
            return  # accelerators' allocators do that
        while staged:
            _, tensor = staged.popitem()
            memory = tensor.untyped_storage()
            del tensor
            if torch._C._storage_Use_Count(memory._cdata) == 1:
                self._spare.setdefault(memory.nbytes(), []).append(memory)

    def _synchronize(self) -> None:
        """Wait for what this thread has queued, and not for transfers beside it."""
        if self._device.type != "cpu":
            torch.accelerator.current_stream(self._device).synchronize()


def _extent_nbytes(like: Tensor) -> int:
    """Bytes from a tensor's first element to its last."""
    if not like.numel():
        return 0
    reach = sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True))
    return (reach + 1) * like.element_size()
