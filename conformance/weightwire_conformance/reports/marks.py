"""How the five outcomes look, everywhere."""

from __future__ import annotations

from collections.abc import Mapping

from weightwire_conformance.outcomes import Outcome

__all__ = ["MARKS", "STYLES", "tally"]

MARKS = {
    Outcome.PASSED: "✓",
    Outcome.FAILED: "✗ FAILED",
    Outcome.UNSUPPORTED: "unsupported",
    Outcome.XFAIL: "xfail",
    Outcome.UNAVAILABLE: "unavailable",
}

STYLES = {
    Outcome.PASSED: "green",
    Outcome.FAILED: "bold red",
    Outcome.UNSUPPORTED: "cyan",
    Outcome.XFAIL: "yellow",
    Outcome.UNAVAILABLE: "magenta",
}


def tally(counts: Mapping[Outcome, int]) -> str:
    """``12 passed, 1 unsupported``."""
    return ", ".join(f"{number} {outcome.value}" for outcome, number in counts.items())
