"""What the ``memory`` backend is."""

from __future__ import annotations

from weightwire.contract import (
    Backend,
    Capabilities,
    Context,
    ReceiverTransport,
    SenderTransport,
)
from weightwire.memory.config import MemoryConfig

__all__ = ["MemoryBackend"]


class MemoryBackend(Backend):
    """Shared memory between processes of one host."""

    name = "memory"
    summary = "shared memory between processes of one host"
    config = MemoryConfig
    capabilities = Capabilities(
        flow="pull",
        default_wait="applied",
        needs_live_receivers=True,
        serves_finished=False,
        ranged_reads=True,
        lands_in_place=True,
        elastic=True,
    )

    def open_sender(self, context: Context) -> SenderTransport:
        from weightwire.memory.sender import MemorySender

        return MemorySender(context)

    def open_receiver(self, context: Context) -> ReceiverTransport:
        from weightwire.memory.receiver import MemoryReceiver

        return MemoryReceiver(context)
