"""weightwire: move a policy's weights from trainers to running inference engines.

Open a sender on every trainer rank and a receiver on every inference rank, with
one config string for the wire between them::

    with weightwire.open_sender("filesystem", session="file:///shared/run42", source=model) as s:
        s.send(version=step)

    with weightwire.open_receiver("filesystem", session="file:///shared/run42", target=model,
                                  receiver_id="replica-0") as r:
        r.receive()
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from weightwire._version import __version__

if TYPE_CHECKING:
    from weightwire.errors import (
        AuthenticationError,
        BackendNotFound,
        BackendUnavailable,
        Cancelled,
        ConfigError,
        HandleError,
        PeerLost,
        PluginError,
        SessionError,
        TableMismatch,
        TraceError,
        TransferError,
        TransferTimeout,
        UnsupportedOperation,
        VerificationError,
        WeightWireError,
    )
    from weightwire.hookspecs import hookimpl
    from weightwire.lora import LoraAdapter, MergedLora
    from weightwire.observers import Observer, observe
    from weightwire.opening import open_receiver, open_sender
    from weightwire.placements import LocalShard
    from weightwire.receiver import WeightReceiver
    from weightwire.report import Report, VersionRecord
    from weightwire.sender import WeightSender
    from weightwire.sources import WeightSource
    from weightwire.streaming import StreamingSource
    from weightwire.targets import MappingTarget, ModuleTarget, WeightTarget

logging.getLogger("weightwire").addHandler(logging.NullHandler())

__all__ = [
    "AuthenticationError",
    "BackendNotFound",
    "BackendUnavailable",
    "Cancelled",
    "ConfigError",
    "HandleError",
    "LocalShard",
    "LoraAdapter",
    "MappingTarget",
    "MergedLora",
    "ModuleTarget",
    "Observer",
    "PeerLost",
    "PluginError",
    "Report",
    "SessionError",
    "StreamingSource",
    "TableMismatch",
    "TraceError",
    "TransferError",
    "TransferTimeout",
    "UnsupportedOperation",
    "VerificationError",
    "VersionRecord",
    "WeightReceiver",
    "WeightSender",
    "WeightSource",
    "WeightTarget",
    "WeightWireError",
    "__version__",
    "hookimpl",
    "observe",
    "open_receiver",
    "open_sender",
]

# What is asked for is imported then: torch takes a second, which `weightwire --help` and
# the doctor's children needn't spend.
_HOMES = {
    "AuthenticationError": "weightwire.errors",
    "BackendNotFound": "weightwire.errors",
    "BackendUnavailable": "weightwire.errors",
    "Cancelled": "weightwire.errors",
    "ConfigError": "weightwire.errors",
    "HandleError": "weightwire.errors",
    "LocalShard": "weightwire.placements",
    "LoraAdapter": "weightwire.lora",
    "MappingTarget": "weightwire.targets",
    "MergedLora": "weightwire.lora",
    "ModuleTarget": "weightwire.targets",
    "Observer": "weightwire.observers",
    "PeerLost": "weightwire.errors",
    "PluginError": "weightwire.errors",
    "Report": "weightwire.report",
    "SessionError": "weightwire.errors",
    "StreamingSource": "weightwire.streaming",
    "TableMismatch": "weightwire.errors",
    "TraceError": "weightwire.errors",
    "TransferError": "weightwire.errors",
    "TransferTimeout": "weightwire.errors",
    "UnsupportedOperation": "weightwire.errors",
    "VerificationError": "weightwire.errors",
    "VersionRecord": "weightwire.report",
    "WeightReceiver": "weightwire.receiver",
    "WeightSender": "weightwire.sender",
    "WeightSource": "weightwire.sources",
    "WeightTarget": "weightwire.targets",
    "WeightWireError": "weightwire.errors",
    "hookimpl": "weightwire.hookspecs",
    "observe": "weightwire.observers",
    "open_receiver": "weightwire.opening",
    "open_sender": "weightwire.opening",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    if not name.startswith("_"):
        module = f"{__name__}.{name}"
        try:
            return importlib.import_module(module)  # weightwire.metrics, after `import weightwire`
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
