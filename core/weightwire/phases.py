"""The seconds that a call spends in each phase."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from torch.profiler import record_function

from weightwire.report import PHASES

__all__ = ["Phases"]


class Phases:
    """Seconds by phase; phases that didn't occur are absent.

    In traces of torch's profiler phases show as ``weightwire.NAME``.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            with record_function(f"weightwire.{phase}"):
                yield
        finally:
            self.add(phase, time.perf_counter() - began)

    def add(self, phase: str, seconds: float) -> None:
        if phase not in PHASES:
            raise ValueError(f"{phase!r} isn't in the vocabulary of phases")
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
