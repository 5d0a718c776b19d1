"""In which order test files are given to the processes that run them beside each other.

A file runs in one process, since its tests share what is slow to make.  Those that take
longest begin, so that none of them runs alone at the end; engines, which take all cores,
alternate with others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
TOGETHER = tuple(f"vllm/test_{name}.py" for name in ("server", "in_flight", "sleep", "watch"))
"""These share servers: one process runs them all."""
FIRST = (
    *TOGETHER,
    "cli/test_docs.py",
    "sharding/test_sharded_trainers.py",
    "conformance/test_command.py",
    "conformance/test_culprits.py",
    "vllm/test_plan.py",
    "doctor/test_doctor.py",
    "vllm/test_engine.py",
    "sessions/test_stores.py",
    "cli/test_demo.py",
    "chaos/test_chaos.py",
    "vllm/test_tensor_parallel.py",
    "thirdparty/test_conformance.py",
    "conformance/test_builtin.py",
    "vllm/test_packed.py",
    "cli/test_commands.py",
    "vllm/test_families.py",
    "nixl/test_faults.py",
    "vllm/test_in_process.py",
    "examples/test_examples.py",
    "vllm/test_adapter.py",
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
            return TOGETHER[0] if scope.endswith(TOGETHER) else scope

    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None
