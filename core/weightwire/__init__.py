"""weightwire: move a policy's weights from trainers to running inference engines.

Open a sender on every trainer rank and a receiver on every inference rank, with
one config string for the wire between them::

    with weightwire.open_sender("filesystem", session="file:///shared/run42", source=model) as s:
        s.send(version=step)

    with weightwire.open_receiver("filesystem", session="file:///shared/run42", target=model,
                                  receiver_id="replica-0") as r:
        r.receive()
"""

import logging

from weightwire._version import __version__
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
    "MappingTarget",
    "ModuleTarget",
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
    "open_receiver",
    "open_sender",
]
