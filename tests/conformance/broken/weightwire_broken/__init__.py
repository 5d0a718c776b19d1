"""Backends with one thing wrong each; none knows what looks for it."""

from __future__ import annotations

from typing import TypeVar

import weightwire
from weightwire.contract import Backend, Context, ReceiverTransport, SenderTransport
from weightwire.memory.backend import MemoryBackend
from weightwire.memory.receiver import MemoryReceiver
from weightwire.memory.sender import MemorySender
from weightwire_filesystem.backend import FilesystemBackend
from weightwire_filesystem.config import FilesystemConfig
from weightwire_filesystem.receiver import FilesystemReceiver
from weightwire_filesystem.sender import FilesystemSender

B = TypeVar("B", bound=type[Backend])


class Plugin:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @weightwire.hookimpl
    def weightwire_describe_backend(self) -> Backend:
        return self._backend


class BrokenMemory(MemoryBackend):
    """The reference backend; subclasses say which end is another."""

    sender_class: type[SenderTransport] = MemorySender
    receiver_class: type[ReceiverTransport] = MemoryReceiver

    def open_sender(self, context: Context):
        return self.sender_class(context)

    def open_receiver(self, context: Context):
        return self.receiver_class(context)


class BrokenFilesystem(FilesystemBackend):
    sender_class: type[FilesystemSender] = FilesystemSender
    receiver_class: type[FilesystemReceiver] = FilesystemReceiver

    def open_sender(self, context: Context):
        assert isinstance(context.config, FilesystemConfig)
        return self.sender_class(context, context.config)

    def open_receiver(self, context: Context):
        assert isinstance(context.config, FilesystemConfig)
        return self.receiver_class(context, context.config)


def broken(backend: B) -> B:
    """Name the backend after its class, and give it the plug-in that an entry point names."""
    words = "".join(f"-{c.lower()}" if c.isupper() else c for c in backend.__name__)
    backend.name = words.removeprefix("-")
    backend.summary = (backend.__doc__ or "").strip()
    backend.plugin = Plugin(backend())
    return backend
