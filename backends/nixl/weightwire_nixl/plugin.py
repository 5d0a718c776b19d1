"""The plug-in that the entry point ``weightwire`` names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightwire.doctor.check import Check
from weightwire.hookspecs import hookimpl
from weightwire_nixl.backend import NixlBackend

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from weightwire.contract import Backend

__all__ = [
    "weightwire_describe_backend",
    "weightwire_describe_checks",
    "weightwire_describe_commands",
]

_CHECKS = "weightwire_nixl.checks"
_REINSTALL = "pip install --force-reinstall 'weightwire[nixl]' (or [nixl-cu13])"


@hookimpl
def weightwire_describe_backend() -> Backend:
    return NixlBackend()


@hookimpl
def weightwire_describe_commands() -> Mapping[str, Callable[..., object]]:
    from weightwire_nixl.discovery.modelexpress_server import serve

    return {"modelexpress-serve": serve}


@hookimpl
def weightwire_describe_checks() -> Sequence[Check]:
    return [
        Check(
            "nixl.transports",
            "UCX started, and asked for the transports that it has here",
            f"{_CHECKS}:transports",
            60.0,
            f"unset UCX_TLS and UCX_NET_DEVICES; {_REINSTALL}",
        ),
        Check(
            "nixl.read",
            "a NIXL READ between two processes",
            f"{_CHECKS}:read",
            120.0,
            f"unset UCX_TLS and UCX_NET_DEVICES; {_REINSTALL}",
        ),
        Check(
            "nixl.ports",
            "InfiniBand and RoCE ports, whether they can be opened, and the nearest to each GPU",
            f"{_CHECKS}:ports",
            60.0,
            "see ibstat; pass /dev/infiniband to the container",
        ),
    ]
