"""The process rig over the nixl backend: which path UCX may take, and who moves the bytes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from process_rig import Fleet, Pool, Worker, exchange

__all__ = ["WAYS", "NixlFleet", "Way", "exchange", "open_pool", "ucx_took"]


@dataclass(frozen=True)
class Way:
    """A path and a direction.

    Attributes:
        tls: what ``UCX_TLS`` allows; None leaves it to UCX.
        direction: the option; ``auto`` decides by the path.
        path: what UCX must take.
        push: who must move the bytes.
    """

    name: str
    tls: str | None
    direction: str
    path: str
    push: bool

    def __str__(self) -> str:
        return self.name

    @property
    def options(self) -> dict[str, Any]:
        unsafe = self.direction == "pull" and self.path == "TCP"
        return {"direction": self.direction, "unsafe_pull": unsafe}


WAYS = [
    Way("cma-auto", None, "auto", "CMA", False),
    Way("tcp-auto", "tcp", "auto", "TCP", True),
    Way("cma-push", None, "push", "CMA", True),
    Way("tcp-pull", "tcp", "pull", "TCP", False),
]


def open_pool(tls: str | None) -> Pool:
    """Workers in whose environment UCX may take this path, and says in their logs which it took."""
    changed = {"UCX_PROTO_INFO": "y", "UCX_LOG_FILE": "stderr"}
    if tls is not None:
        changed["UCX_TLS"] = tls
    before = {key: os.environ.get(key) for key in changed}
    os.environ.update(changed)
    try:
        return Pool()
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


def ucx_took(worker: Worker, push: bool) -> set[str]:
    """The transports of the one-sided operation that UCX reports in a process's log."""
    found: set[str] = set()
    title = "remote memory write by ucp_put" if push else "remote memory read by ucp_get"
    inside, before = False, ""
    for line in worker.log.read_text().splitlines():
        if "ucp_" in line:
            # What an agent would use to reach itself is of no interest.
            inside = title in line and " self " not in before
        elif inside and ("zero-copy" in line or "software emulation" in line or "copy" in line):
            found.add(line.rpartition("|")[0].rpartition("|")[2].strip())
        before = line
    return found


class NixlFleet(Fleet):
    """Processes of one test, over one way."""

    def __init__(self, pool: Pool, way: Way, directory: Path, scheme: str = "file") -> None:
        super().__init__(pool, "stepped-nixl", scheme, directory)
        self.way = way

    def choice(self, **options: Any) -> dict[str, Any]:
        return {"backend": self.backend, **self.way.options, **options}
