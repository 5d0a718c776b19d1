"""In which order test files are given to the processes that run them beside each other.

A file runs in one process, since its tests share what is slow to make; so do some files
together.  Those that take longest begin, so that none of them runs alone at the end.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
ENGINES = tuple(
    f"vllm/test_{name}.py"
    for name in (
        *("server", "in_flight", "sleep", "watch"),  # these share servers
        *("engine", "tensor_parallel", "packed", "families", "in_process", "adapter", "plan"),
    )
)
"""Engines take all cores: one process starts them, one after the other, beside what waits."""
FIRST = (
    *ENGINES,
    "sharding/test_sharded_trainers.py",
    "conformance/test_command.py",
    "doctor/test_doctor.py",
    "conformance/test_culprits.py",
    "sessions/test_stores.py",
    "chaos/test_chaos.py",
    "cli/test_docs.py",
    "thirdparty/test_conformance.py",
    "cli/test_demo.py",
    "conformance/test_builtin.py",
    "cli/test_commands.py",
    "nixl/test_faults.py",
    "examples/test_examples.py",
    "faults/test_loss.py",
    "faults/test_interrupts.py",
    "core/test_membership.py",
    "views/test_sharded_views.py",
    "core/test_lifecycle_stateful.py",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {TESTS / name: place for place, name in enumerate(FIRST)}

    def place(item: pytest.Item) -> int:
        return places.get(item.path, len(places))

    items.sort(key=place)  # stable: otherwise as they were collected


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """``--dist loadfile``, with some files as one."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            scope = str(super()._split_scope(nodeid))
            return ENGINES[0] if scope.endswith(ENGINES) else scope

    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None
