"""A tape, split into reads and a replay, scheduled by transfer group.

Each instruction runs in the group in which the last of what it needs arrives.
Order between instructions that touch the same elements is kept, so a transform
of a destination runs after the copy that it transforms, whatever groups they
are in.  What a later group still needs of an earlier one is copied out of the
receive slot; nothing else outlives its group.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from weightwire.copying import copy_all
from weightwire.cuts import Cuts
from weightwire.errors import TraceError
from weightwire.table import Region, TensorTable
from weightwire.trace.cells import Cells, cut_copies
from weightwire.trace.compose import through_views
from weightwire.trace.cover import Extent
from weightwire.trace.planner import Joined, Piece, Read, plan_reads
from weightwire.trace.tape import Instruction, Kind, Ref, Tape

__all__ = ["Program", "Run", "compile_tape"]

_META = torch.device("meta")
_CPU = torch.device("cpu")


Step = Instruction | list[Instruction]
"""One operation, or copies whose order doesn't matter."""


@dataclass
class Program:
    """The static plan of one rank.

    Attributes:
        regions: what is read, in the table's order.
        batches: by group, instructions in order; the last batch has no group and
            runs at the end.
        steps: the batches as they are run.
        first: by destination, the group whose batch touches it first.
        last: by destination, the group whose batch touches it last.
        kept: by region, the later group until which it is kept.
        reads: where each source lies.
        pieces: by region, the joined boxes that are put together from it.
        joined: by joined box, the group after which it is done with.
    """

    regions: tuple[Region, ...] = ()
    batches: dict[int, list[Instruction]] = field(default_factory=dict)
    steps: dict[int, list[Step]] = field(default_factory=dict)
    first: dict[str, int] = field(default_factory=dict)
    last: dict[str, int] = field(default_factory=dict)
    kept: dict[Region, int] = field(default_factory=dict)
    reads: dict[Ref, Read] = field(default_factory=dict)
    pieces: dict[Region, list[Piece]] = field(default_factory=dict)
    joined: dict[Joined, int] = field(default_factory=dict)
    dies: dict[int, list[str | int]] = field(default_factory=dict)

    @property
    def replayed(self) -> int:
        """Instructions a version."""
        return sum(map(len, self.batches.values()))


def compile_tape(tape: Tape, table: TensorTable) -> Program:
    """Plan the reads and the replay of one tape.

    Args:
        tape: its sources have the table's names, aliases and views included.
        table: what the trainer sends.
    """
    index = table.index()
    carriers = {**index, **{alias: index[name] for alias, name in table.ties.items()}}
    cells = Cells(table)
    live = through_views(_live(tape.instructions), table)
    live = cut_copies(live, carriers, table, cells)
    reads = plan_reads(live, table, carriers, cells)
    program = Program(reads.regions, reads=reads.by_ref, pieces=reads.pieces)
    cuts = Cuts(table)
    groups = sorted({cuts.group_of(region) for region in program.regions})
    # A view may have the name of a tensor that it is made of.
    views = {view.name: view for view in table.views}

    def during(source: int) -> int:
        """The group in which the last of a tensor that the loader was given arrives."""
        if source < 0:
            return 0
        name = tape.sources[source].name
        inner = views[name].sources() if name in views else (name,)
        return max(cells.last_group(carriers[name]) for name in inner)

    end = len(table.groups)
    last_use: dict[str | int, int] = {}
    for group, instruction in _schedule(live, reads.by_ref, during):
        at = bisect.bisect_left(groups, group)
        group = groups[at] if at < len(groups) else end
        program.batches.setdefault(group, []).append(instruction)
        for ref in instruction.operands():
            if ref.kind is Kind.SOURCE and ref in program.reads:
                read = program.reads[ref]
                if isinstance(read.base, Joined):
                    program.joined[read.base] = max(program.joined.get(read.base, 0), group)
                elif group > read.group:
                    program.kept[read.base] = max(program.kept.get(read.base, 0), group)
            elif ref.kind is Kind.DESTINATION:
                key = str(ref.name)
                program.first[key] = min(program.first.get(key, group), group)
                program.last[key] = max(program.last.get(key, group), group)
        for touched in (*instruction.operands(), *instruction.outputs):
            if touched is not None and touched.kind is Kind.VALUE:
                last_use[touched.name] = max(last_use.get(touched.name, 0), group)
    for value, group in last_use.items():
        program.dies.setdefault(group, []).append(value)
    program.steps = {group: _steps(batch) for group, batch in program.batches.items()}
    return program


def _steps(batch: Sequence[Instruction]) -> list[Step]:
    """A batch with its copies put together where none of them touches what another writes."""
    steps: list[Step] = []
    copies: list[Instruction] = []
    written: dict[str | int, _Spans] = {}
    for instruction in batch:
        joins = instruction.is_copy and instruction.args[0].kind is Kind.DESTINATION
        if not joins or instruction.args[1].kind is Kind.DESTINATION:
            steps.append(instruction)
            copies, written = [], {}
            continue
        to: Ref = instruction.args[0]
        if not copies or (to.name in written and written[to.name].latest(*to.span) >= 0):
            copies, written = [], {}
            steps.append(copies)
        copies.append(instruction)
        written.setdefault(to.name, _Spans()).add(*to.span, 0)
    return steps


def _live(instructions: Sequence[Instruction]) -> list[Instruction]:
    """Instructions that a destination depends on."""
    wanted: set[tuple[Kind, str | int]] = set()
    kept: list[Instruction] = []
    for instruction in reversed(instructions):
        changes = [ref.storage for ref in instruction.writes]
        changes.extend(ref.storage for ref in instruction.outputs if ref is not None)
        if any(kind is Kind.DESTINATION or (kind, name) in wanted for kind, name in changes):
            kept.append(instruction)
            wanted.update(ref.storage for ref in instruction.operands() if ref.kind is Kind.VALUE)
    return kept[::-1]


# ---------------------------------------------------------------------- order


class _Spans:
    """For ranges of one storage, the latest group that touched them."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []
        self._groups: list[int] = []

    def touching(self, begin: int, end: int) -> slice:
        return slice(bisect.bisect_right(self._ends, begin), bisect.bisect_left(self._begins, end))

    def latest(self, begin: int, end: int) -> int:
        return max(self._groups[self.touching(begin, end)], default=-1)

    def add(self, begin: int, end: int, group: int) -> None:
        if begin >= end:
            return
        at = self.touching(begin, end)
        if at.start < at.stop:
            begin = min(begin, self._begins[at.start])
            end = max(end, self._ends[at.stop - 1])
            group = max(group, *self._groups[at])
        self._begins[at] = [begin]
        self._ends[at] = [end]
        self._groups[at] = [group]


def _schedule(
    instructions: Sequence[Instruction], reads: Mapping[Ref, Read], during: Callable[[int], int]
) -> list[tuple[int, Instruction]]:
    """Instructions with their groups, in recorded order."""
    spans: dict[tuple[Kind, str | int], _Spans] = {}
    result: list[tuple[int, Instruction]] = []
    for instruction in instructions:
        group = -1
        touched: list[Ref] = []
        for ref in instruction.operands():
            if ref.kind is Kind.SOURCE:
                if ref in reads:
                    group = max(group, reads[ref].group)
                continue
            touched.append(ref)
            known = spans.get(ref.storage)
            if known is not None:
                group = max(group, known.latest(*ref.span))
        if group < 0:
            group = during(instruction.during)
        # Readers hold back writers too: what they read must not be changed before.
        for ref in (*touched, *(output for output in instruction.outputs if output is not None)):
            spans.setdefault(ref.storage, _Spans()).add(*ref.span, group)
        result.append((group, instruction))
    return result


# ---------------------------------------------------------------------- replay


class Run:
    """One version on its way through a program.

    Args:
        destination: by key, the memory to fill: of the traced shape and strides.
        device: where fresh values are made.
    """

    def __init__(
        self,
        program: Program,
        destination: Callable[[str], Tensor],
        device: torch.device = _CPU,
    ) -> None:
        self._program = program
        self._destination = destination
        self._device = device
        self._values: dict[str | int, Tensor] = {}
        self._arrived: dict[Region, Tensor] = {}
        self._joined: dict[Joined, Tensor] = {}
        self._pending = sorted(program.batches)

    def feed(self, group: int, tensors: Mapping[Region, Tensor]) -> None:
        """Run what can run once a group is here; its tensors are free afterwards."""
        program = self._program
        self._arrived.update(tensors)
        self._join(tensors)
        while self._pending and self._pending[0] <= group:
            self._run(self._pending.pop(0))
        for region in tensors:
            if program.kept.get(region, -1) > group:
                self._arrived[region] = tensors[region].clone()
            else:
                del self._arrived[region]

    def _join(self, tensors: Mapping[Region, Tensor]) -> None:
        """Copy what belongs to boxes that lie in several regions to where they come together."""
        for region, tensor in tensors.items():
            for key, source, destination in self._program.pieces.get(region, ()):
                if key not in self._joined:
                    sizes = [b - a for a, b in zip(key.box.start, key.box.stop, strict=True)]
                    self._joined[key] = tensor.new_empty(sizes)
                self._joined[key][destination].copy_(tensor[source])

    @property
    def held(self) -> int:
        """Tensors that are kept for a later group."""
        return len(self._values) + len(self._arrived) + len(self._joined)

    def finish(self) -> None:
        """Run what waits for no group."""
        while self._pending:
            self._run(self._pending.pop(0))

    def _run(self, group: int) -> None:
        program = self._program
        # Destinations may be of classes that see every operation on them: these are
        # what their loader did with them already.
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for step in program.steps[group]:
                self._execute(step)
        for value in program.dies.get(group, ()):
            self._values.pop(value, None)
        for region in [r for r in self._arrived if program.kept.get(r, group + 1) <= group]:
            del self._arrived[region]
        for key in [k for k in self._joined if program.joined[k] <= group]:
            del self._joined[key]

    def _execute(self, step: Step) -> None:
        if isinstance(step, list):
            # In one call: threads that rest between copies take longer to wake than to copy.
            pairs = [instruction.args for instruction in step]
            into, of = ([self._tensor(pair[side]) for pair in pairs] for side in (0, 1))
            copy_all(into, of, in_chunks=False)
            return
        instruction = step
        args, kwargs = tree_map(
            self._argument,
            (instruction.args, instruction.kwargs),
            is_leaf=lambda leaf: isinstance(leaf, Ref),
        )
        results = tree_leaves(instruction.func(*args, **kwargs))
        for output, result in zip(instruction.outputs, results, strict=True):
            if output is not None:
                self._values[output.name] = _as_recorded(result, output.extent)

    def _argument(self, leaf: Any) -> Any:
        if isinstance(leaf, Ref):
            # Slots may be in host memory; values are made where the destinations are.
            return self._tensor(leaf).to(self._device)
        if isinstance(leaf, torch.device) and leaf == _META:
            return self._device
        return leaf

    def _tensor(self, ref: Ref) -> Tensor:
        extent = ref.extent
        if ref.kind is Kind.DESTINATION:
            base = self._destination(str(ref.name))
        elif ref.kind is Kind.VALUE:
            base = self._values[ref.name]
        elif 0 in extent.sizes:
            return torch.empty(extent.sizes, dtype=ref.dtype, device=self._device)
        else:
            read = self._program.reads[ref]
            extent = read.extent
            try:
                if isinstance(read.base, Joined):
                    base = self._joined[read.base]
                else:
                    base = self._arrived[read.base]
            except KeyError:
                raise TraceError(
                    f"tensor {ref.name!r} was not handed over before its replay"
                ) from None
        return _strided(base, extent, ref.dtype)


def _strided(base: Tensor, extent: Extent, dtype: torch.dtype) -> Tensor:
    """A view of what ``base`` views, counted from its first element."""
    if base.dtype == dtype:
        return base.as_strided(
            extent.sizes, extent.strides, int(base.storage_offset()) + extent.offset
        )
    begin = int(base.storage_offset()) * base.dtype.itemsize // dtype.itemsize
    return torch.empty(0, dtype=dtype, device=base.device).set_(
        base.untyped_storage(), begin + extent.offset, extent.sizes, extent.strides
    )


def _as_recorded(result: Tensor, extent: Extent) -> Tensor:
    """A fresh value in the layout that later extents count in."""
    if result.stride() == extent.strides and result.storage_offset() == 0 and extent.offset == 0:
        return result
    reach = sum((n - 1) * s for n, s in zip(extent.sizes, extent.strides, strict=True))
    size = 0 if 0 in extent.sizes else extent.offset + reach + 1
    base = torch.empty(size, dtype=result.dtype, device=result.device)
    base.as_strided(extent.sizes, extent.strides, extent.offset).copy_(result)
    return base
