"""Numbers and others' texts as people read them."""

from __future__ import annotations

__all__ = ["human_bytes", "human_seconds", "printable", "rate"]

_MOST_RATE = 1e9


def human_bytes(nbytes: float) -> str:
    """In powers of ten: ``1.50 GB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}" if unit != "B" else f"{int(nbytes)} B"
        nbytes /= 1000
    return f"{nbytes:,.3g} TB"


def human_seconds(seconds: float) -> str:
    """``1.50 s``, ``3.2 ms``, ``12 us``."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def rate(nbytes: float, seconds: float) -> float:
    """In GB/s, and finite whatever a record says: JSON has no infinity."""
    return min(_MOST_RATE, nbytes / seconds / 1e9) if seconds > 0 else 0.0


def printable(text: str) -> str:
    """Text of others without what a terminal would obey."""
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )
