"""Shared memory of the memory backend."""

from __future__ import annotations

from pathlib import Path

from weightwire.memory.segment import PAGE, Segment


def test_an_owner_may_have_nothing_to_give(tmp_path: Path) -> None:
    """Of a group whose shards on it are all empty."""
    segment = Segment(tmp_path / "weightwire-0-s0", 2 * PAGE, create=True)
    for begin in (PAGE, 2 * PAGE):
        assert segment.tensor(begin, 0).numel() == 0
    segment.close()
