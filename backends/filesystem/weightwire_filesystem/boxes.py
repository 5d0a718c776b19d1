"""A box of a tensor as runs of bytes in that tensor's row-major storage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Rows", "box_rows"]


@dataclass(frozen=True)
class Rows:
    """The runs of a box, in the order of its own row-major bytes.

    Attributes:
        starts: first byte of each row, int64.
        count: runs of a row.
        stride: bytes from one run of a row to the next.
        run: bytes of a run.
    """

    starts: npt.NDArray[np.int64]
    count: int
    stride: int
    run: int

    @property
    def row(self) -> int:
        """Bytes of a row that belong to the box."""
        return self.count * self.run

    @property
    def span(self) -> int:
        """Bytes from a row's first to its last, gaps included."""
        return (self.count - 1) * self.stride + self.run


def box_rows(
    shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int], itemsize: int
) -> Rows:
    """Describe the box ``offsets``, ``sizes`` of a tensor of ``shape``, in bytes.

    Dimensions that the box covers wholly are merged, so that as few and as long
    runs remain as there can be.
    """
    if 0 in sizes:
        return Rows(np.zeros(0, np.int64), 1, 0, 0)
    base = 0
    run = itemsize
    steps: list[tuple[int, int]] = []  # (size, stride) of what isn't contiguous, inner first
    unit = itemsize
    for extent, offset, size in zip(
        reversed(shape), reversed(offsets), reversed(sizes), strict=True
    ):
        base += offset * unit
        if not steps and run == unit:
            run = size * unit
        elif size > 1:
            if steps and steps[-1][0] * steps[-1][1] == unit:
                steps[-1] = (steps[-1][0] * size, steps[-1][1])
            else:
                steps.append((size, unit))
        unit *= extent
    count, stride = steps[0] if steps else (1, run)
    starts = np.array([base], np.int64)
    for size, step in steps[1:]:
        starts = (np.arange(size, dtype=np.int64)[:, None] * step + starts).reshape(-1)
    return Rows(starts, count, stride, run)
