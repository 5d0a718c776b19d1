"""The plug-in that the entry point ``weightwire`` names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightwire.doctor.check import Check
from weightwire.hookspecs import hookimpl
from weightwire_nccl.backend import NcclBackend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightwire.contract import Backend

__all__ = ["weightwire_describe_backend", "weightwire_describe_checks"]


@hookimpl
def weightwire_describe_backend() -> Backend:
    return NcclBackend()


@hookimpl
def weightwire_describe_checks() -> Sequence[Check]:
    return [
        Check(
            "nccl.broadcast",
            "an NCCL broadcast between GPUs, one process each",
            "weightwire_nccl.checks:broadcast",
            180.0,
            "run with NCCL_DEBUG=INFO; see NCCL_SOCKET_IFNAME, and /dev/shm in containers",
        )
    ]
