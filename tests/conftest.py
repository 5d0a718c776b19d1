"""How tests are spread over the processes that run them beside each other.

By paths rather than ``xdist_group`` marks: those tell the scheduler nothing from pytest 9.2
on, where xdist 3.8 can't write them into a test's id.
"""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

SPREAD = ("tests/faults/test_interrupts.py", "tests/faults/test_loss.py")
"""Files whose tests share nothing that is slow to make; each may run anywhere."""
HEAVY = (
    "tests/vllm/",
    "tests/cli/test_demo.py",
    "tests/doctor/test_doctor.py::test_vllm_and_its_routes",
)
"""Engines take all cores and gigabytes: one at a time."""


class Groups(LoadScopeScheduling):
    """A group runs in one process, in order; so what its tests share is made once."""

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(HEAVY):
            return "engines"
        return nodeid if nodeid.startswith(SPREAD) else nodeid.partition("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    return Groups(config, log) if config.getoption("dist") == "loadgroup" else None
