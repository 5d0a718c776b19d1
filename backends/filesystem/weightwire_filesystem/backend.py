"""The filesystem backend: every version a directory that Hugging Face loaders read."""

from __future__ import annotations

import os
import sys

from weightwire.contract import (
    Backend,
    Capabilities,
    Context,
    ReceiverTransport,
    SenderTransport,
)
from weightwire.errors import BackendUnavailable, ConfigError
from weightwire_filesystem.config import FilesystemConfig

__all__ = ["FilesystemBackend"]


class FilesystemBackend(Backend):
    """Store and forward: versions outlive the trainer, and receivers come when they like."""

    name = "filesystem"
    summary = "versions as directories that Hugging Face loaders read; local or shared disks"
    config = FilesystemConfig
    capabilities = Capabilities(
        flow="store",
        default_wait="published",
        needs_live_receivers=False,
        serves_finished=True,
        ranged_reads=True,
        lands_in_place=True,
        elastic=True,
        whole_tensors=True,
    )

    def probe(self) -> None:
        if sys.platform == "win32" or not (hasattr(os, "preadv") and hasattr(os, "pwrite")):
            raise BackendUnavailable(
                f"the filesystem backend needs pread and pwrite, which {sys.platform} lacks: "
                "run it on Linux or macOS"
            )

    def open_sender(self, context: Context) -> SenderTransport:
        from weightwire_filesystem.sender import FilesystemSender

        return FilesystemSender(context, _config_of(context))

    def open_receiver(self, context: Context) -> ReceiverTransport:
        from weightwire_filesystem.receiver import FilesystemReceiver

        return FilesystemReceiver(context, _config_of(context))


def _config_of(context: Context) -> FilesystemConfig:
    if not isinstance(context.config, FilesystemConfig):
        raise ConfigError(
            f"the filesystem backend got a {type(context.config).__name__}: give it a "
            "FilesystemConfig"
        )
    return context.config
