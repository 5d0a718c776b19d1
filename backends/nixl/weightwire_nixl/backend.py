"""What the NIXL backend is."""

from __future__ import annotations

import sys

from weightwire.contract import (
    Backend,
    Capabilities,
    Context,
    ReceiverTransport,
    SenderTransport,
)
from weightwire.errors import BackendUnavailable, ConfigError
from weightwire_nixl.config import NixlConfig

__all__ = ["NixlBackend"]


class NixlBackend(Backend):
    """One-sided transfers over shared memory, TCP, NVLink or RDMA."""

    name = "nixl"
    summary = "one-sided transfers by NIXL and UCX: shared memory, TCP, NVLink, RDMA"
    config = NixlConfig
    capabilities = Capabilities(
        flow="pull",
        default_wait="applied",
        needs_live_receivers=True,
        serves_finished=False,
        ranged_reads=True,
        # A read that timed out may still write into its memory: never the engine's own.
        lands_in_place=False,
        elastic=True,
        devices=frozenset({"cpu", "cuda"}),
    )

    def probe(self) -> None:
        platform: str = sys.platform
        if platform != "linux":
            raise BackendUnavailable(
                f"the nixl backend needs NIXL, which has no build for {platform}: run it on Linux"
            )
        from weightwire_nixl.agent import Agent

        Agent("probe").close()

    def open_sender(self, context: Context) -> SenderTransport:
        from weightwire_nixl.sender import NixlSender

        return NixlSender(context, _config_of(context))

    def open_receiver(self, context: Context) -> ReceiverTransport:
        from weightwire_nixl.receiver import NixlReceiver

        return NixlReceiver(context, _config_of(context))


def _config_of(context: Context) -> NixlConfig:
    if not isinstance(context.config, NixlConfig):
        raise ConfigError(
            f"the nixl backend got a {type(context.config).__name__}: give it a NixlConfig"
        )
    return context.config
