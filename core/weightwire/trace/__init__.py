"""Tracing loaders on tensors without data, and replaying what they did.

``Recorder`` runs a loader on ``LazyWeight`` stand-ins and writes a ``Tape``.
``compile_tape`` splits it into reads (regions of the table's tensors) and a
replay (instructions by transfer group), a ``Program``, which is static: one
plan for every version.
"""

from __future__ import annotations

from weightwire.trace.cover import Box, Cover, Extent
from weightwire.trace.program import Program, Run, compile_tape
from weightwire.trace.recorder import Recorder
from weightwire.trace.tape import Instruction, Kind, LazyWeight, Ref, Tape

__all__ = [
    "Box",
    "Cover",
    "Extent",
    "Instruction",
    "Kind",
    "LazyWeight",
    "Program",
    "Recorder",
    "Ref",
    "Run",
    "Tape",
    "compile_tape",
]
