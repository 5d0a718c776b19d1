"""What a run under chaos came to."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ChaosReport"]


@dataclass
class ChaosReport:
    """Counts, times and what went wrong.

    Attributes:
        seed: replays the run.
        versions: that reached every live receiver.
        faults: injected, by kind.
        impossible: kinds that can't be had on this machine, and why.
        checks: of a replica's memory against the oracle.
        wrong: replicas that named a version and held something else.
        problems: everything else that mustn't be: hangs, strangers' errors, lost progress.
        detection: seconds from a fault to the sender's error, by kind.
        recovery: seconds from a fault until every live receiver held a newer version.
        longest_wait: the call that came nearest to its deadline, or passed it furthest:
            its seconds, and its deadline.
    """

    backend: str
    seed: int
    versions: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    impossible: dict[str, str] = field(default_factory=dict)
    checks: int = 0
    wrong: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    detection: dict[str, list[float]] = field(default_factory=dict)
    recovery: dict[str, list[float]] = field(default_factory=dict)
    longest_wait: tuple[float, float] = (0.0, 1.0)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.wrong and not self.problems

    def note_wait(self, seconds: float, deadline: float) -> None:
        worst, its = self.longest_wait
        if seconds / deadline > worst / its:
            self.longest_wait = (seconds, deadline)

    def to_dict(self) -> dict[str, Any]:
        """As JSON shows it; times as ``{"median", "max", "count"}``."""
        return {
            "backend": self.backend,
            "seed": self.seed,
            "ok": self.ok,
            "versions": self.versions,
            "faults": dict(sorted(self.faults.items())),
            "impossible": self.impossible,
            "checks": self.checks,
            "wrong": self.wrong,
            "problems": self.problems,
            "detection_seconds": {kind: _summary(v) for kind, v in sorted(self.detection.items())},
            "recovery_seconds": {kind: _summary(v) for kind, v in sorted(self.recovery.items())},
            "longest_wait": {"seconds": self.longest_wait[0], "deadline": self.longest_wait[1]},
            "seconds": round(self.seconds, 1),
        }


def _summary(seconds: Sequence[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(seconds), 3),
        "max": round(max(seconds), 3),
        "count": len(seconds),
    }
