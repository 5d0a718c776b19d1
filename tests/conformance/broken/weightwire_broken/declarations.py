"""What is declared isn't what is done."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict

from weightwire.contract import BackendConfig
from weightwire.errors import BackendUnavailable, UnsupportedOperation
from weightwire.memory.backend import MemoryBackend
from weightwire.memory.config import MemoryConfig
from weightwire.memory.sender import MemorySender
from weightwire_broken import BrokenFilesystem, BrokenMemory, broken
from weightwire_filesystem.backend import FilesystemBackend


@broken
class OverDeclares(BrokenMemory):
    """Says that it stores versions."""

    capabilities = replace(
        MemoryBackend.capabilities, needs_live_receivers=False, serves_finished=True
    )


@broken
class UnderDeclares(BrokenFilesystem):
    """Says that it needs live receivers, and stores versions."""

    capabilities = replace(
        FilesystemBackend.capabilities, needs_live_receivers=True, serves_finished=False
    )


@broken
class DeclaresEqualityAway(BrokenMemory):
    """Calls dtypes that it can't send unsupported."""

    class sender_class(MemorySender):  # noqa: N801
        def set_table(self, table):
            for entry in table.tensors:
                if entry.torch_dtype in (torch.bool, torch.float8_e5m2):
                    raise UnsupportedOperation(f"{entry.name} can't travel")
            super().set_table(table)


class Lenient(MemoryConfig):
    model_config = ConfigDict(extra="ignore", frozen=True)


@broken
class TakesAnyOption(BrokenMemory):
    """Misspelt options are swallowed."""

    config = Lenient


@broken
class HidesItsWay(BrokenMemory):
    """Reports don't say how bytes travelled."""

    class sender_class(MemorySender):  # noqa: N801
        path = " "


@broken
class CantRun(BrokenMemory):
    """Not wrong: its library isn't there."""

    def probe(self):
        raise BackendUnavailable("cant-run needs libfaraway: install it with `pip install faraway`")


@broken
class ProbesForEver(BrokenMemory):
    """Its library hangs."""

    def probe(self):
        import threading

        threading.Event().wait()


@broken
class HoldsTheInterpreter(BrokenMemory):
    """Its library hangs in native code that doesn't let go of the interpreter's lock."""

    def probe(self):
        ctypes.PyDLL(None).sleep(60)


class NotOurs(BaseModel):
    directory: Path | None = None


@broken
class OlderContract(BrokenMemory):
    """Written for another contract."""

    api = -1


@broken
class PlainModel(BrokenMemory):
    """Its options aren't a BackendConfig."""

    config = NotOurs


assert issubclass(Lenient, BackendConfig)
