"""How tests are spread over the processes that run them beside each other."""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SPREAD = {"faults/test_interrupts.py", "faults/test_loss.py"}
"""Files whose tests share nothing that is slow to make; each may run anywhere."""
HEAVY = ("vllm/", "cli/test_demo.py")
"""Engines take all cores and gigabytes: one at a time."""


def pytest_itemcollected(item: pytest.Item) -> None:
    path = item.path.relative_to(TESTS).as_posix()
    if path.startswith(HEAVY):
        item.add_marker(pytest.mark.xdist_group("engines"))
    elif path not in SPREAD:
        item.add_marker(pytest.mark.xdist_group(path))
