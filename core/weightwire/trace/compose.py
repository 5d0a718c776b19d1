"""A load of checkpoint tensors as a load of the tensors that a trainer holds.

The loader ran on checkpoint tensors.  Where one is a view, what the loader did to
it is composed with the view's own chain: mostly the two make one extent of the
source, and just that is read.  A view that can't be an extent (tensors joined, a
reshape across dimensions that aren't neighbours) is made first, by instructions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_map

from weightwire.table import TensorTable
from weightwire.trace.cover import Extent
from weightwire.trace.extents import extent_of, within
from weightwire.trace.recorder import Recorder
from weightwire.trace.tape import Instruction, Kind, LazyWeight, Ref
from weightwire.views import View, apply_view, shape_of

__all__ = ["through_views"]


def through_views(instructions: Iterable[Instruction], table: TensorTable) -> list[Instruction]:
    """Instructions whose sources are the table's tensors, in order."""
    if not table.views:
        return list(instructions)
    composer = _Composer(table)
    return [made for instruction in instructions for made in composer.composed(instruction)]


class _Composer:
    def __init__(self, table: TensorTable) -> None:
        self._views = {view.name: view for view in table.views}
        self._entries = table.named()
        self._shapes = {name: entry.shape for name, entry in self._entries.items()}
        self._extents: dict[str, tuple[tuple[int, ...], Extent | None]] = {}
        self._made: dict[str, Ref] = {}

    def composed(self, instruction: Instruction) -> list[Instruction]:
        """The instruction, behind those that make a view that it needs first."""
        before: list[Instruction] = []
        refs: dict[Ref, Ref] = {}
        for ref in instruction.operands():
            if ref.kind is Kind.SOURCE and ref.name in self._views and ref not in refs:
                refs[ref] = self._source(ref, instruction.during, before)
        return [*before, _renamed(instruction, refs)] if refs else [instruction]

    def _source(self, ref: Ref, during: int, before: list[Instruction]) -> Ref:
        view = self._views[str(ref.name)]
        if view.name not in self._extents:
            shape = shape_of(view, self._shapes)
            self._extents[view.name] = (shape, extent_of(view, self._shapes))
        shape, extent = self._extents[view.name]
        source = view.parts[0].source
        if extent is not None and ref.dtype == self._entries[source].torch_dtype:
            seen = within(shape, extent, ref.extent)
            if seen is not None:
                return Ref(Kind.SOURCE, source, seen, ref.dtype)
        if view.name not in self._made:
            self._made[view.name], made = self._make(view, during)
            before.extend(made)
        value = self._made[view.name]
        return Ref(value.kind, value.name, ref.extent, ref.dtype)

    def _make(self, view: View, during: int) -> tuple[Ref, list[Instruction]]:
        """Instructions that make a view, contiguous, and what stands for it."""
        recorder = Recorder({})
        names = sorted(view.sources())
        entries = [self._entries[name] for name in names]
        given = [
            LazyWeight(name, entry.shape, entry.torch_dtype)
            for name, entry in zip(names, entries, strict=True)
        ]
        tensors = dict(recorder.hand_out(given))
        with torch.no_grad(), recorder:
            made = apply_view(view, tensors.__getitem__)
            made = made.clone(memory_format=torch.contiguous_format)
        result = recorder.named(made)
        rename = {
            output: output._replace(name=f"{view.name}#{output.name}")
            for instruction in recorder.tape.instructions
            for output in instruction.outputs
            if output is not None
        }
        names_of = {output.name: new.name for output, new in rename.items()}

        def renamed(instruction: Instruction) -> Instruction:
            refs = {
                ref: ref._replace(name=names_of[ref.name])
                for ref in (*instruction.operands(), *instruction.outputs)
                if ref is not None and ref.kind is Kind.VALUE
            }
            return replace(_renamed(instruction, refs), during=during)

        instructions = [renamed(instruction) for instruction in recorder.tape.instructions]
        return rename[result], instructions


def _renamed(instruction: Instruction, refs: Mapping[Ref, Ref]) -> Instruction:
    def one(leaf: Any) -> Any:
        return refs.get(leaf, leaf) if isinstance(leaf, Ref) else leaf

    args, kwargs = tree_map(
        one, (instruction.args, instruction.kwargs), is_leaf=lambda leaf: isinstance(leaf, Ref)
    )
    return replace(
        instruction,
        args=args,
        kwargs=kwargs,
        reads=tuple(map(one, instruction.reads)),
        writes=tuple(map(one, instruction.writes)),
        outputs=tuple(map(one, instruction.outputs)),
    )
