"""The plug-in that the entry point ``weightwire`` names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightwire.hookspecs import hookimpl
from weightwire_nccl.backend import NcclBackend

if TYPE_CHECKING:
    from weightwire.contract import Backend

__all__ = ["weightwire_describe_backend"]


@hookimpl
def weightwire_describe_backend() -> Backend:
    return NcclBackend()
