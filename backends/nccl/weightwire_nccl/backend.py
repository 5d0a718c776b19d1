"""The nccl backend: collectives that know where each shard lies, and don't hang."""

from __future__ import annotations

from weightwire.contract import (
    Backend,
    Capabilities,
    Context,
    ReceiverTransport,
    SenderTransport,
)
from weightwire.errors import BackendUnavailable, ConfigError
from weightwire_nccl.config import NcclConfig

__all__ = ["NcclBackend"]


class NcclBackend(Backend):
    """A process group of its own: NCCL where every member has a GPU, else Gloo."""

    name = "nccl"
    summary = "torch.distributed between live processes: NCCL on GPUs, Gloo on CPUs"
    config = NcclConfig
    capabilities = Capabilities(
        flow="collective",
        default_wait="applied",
        needs_live_receivers=True,
        serves_finished=False,
        ranged_reads=True,
        lands_in_place=True,
        elastic=False,
        devices=frozenset({"cpu", "cuda"}),
    )

    def probe(self) -> None:
        import torch.distributed

        if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
            raise BackendUnavailable(
                "the nccl backend needs a torch built with torch.distributed and Gloo: "
                "install torch from pytorch.org"
            )

    def open_sender(self, context: Context) -> SenderTransport:
        from weightwire_nccl.sender import NcclSender

        return NcclSender(context, _config_of(context))

    def open_receiver(self, context: Context) -> ReceiverTransport:
        from weightwire_nccl.receiver import NcclReceiver

        return NcclReceiver(context, _config_of(context))


def _config_of(context: Context) -> NcclConfig:
    if not isinstance(context.config, NcclConfig):
        raise ConfigError(
            f"the nccl backend got a {type(context.config).__name__}: give it an NcclConfig"
        )
    return context.config
