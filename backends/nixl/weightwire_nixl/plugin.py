"""The plug-in that the entry point ``weightwire`` names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightwire.hookspecs import hookimpl
from weightwire_nixl.backend import NixlBackend

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from weightwire.contract import Backend

__all__ = ["weightwire_describe_backend", "weightwire_describe_commands"]


@hookimpl
def weightwire_describe_backend() -> Backend:
    return NixlBackend()


@hookimpl
def weightwire_describe_commands() -> Mapping[str, Callable[..., object]]:
    from weightwire_nixl.discovery.modelexpress_server import serve

    return {"modelexpress-serve": serve}
