"""Every error that weightwire raises on purpose.

::

    WeightWireError
    ├── ConfigError               an option, URL, name or argument is wrong
    │   └── BackendNotFound       no installed plug-in has this name
    ├── BackendUnavailable        the plug-in exists, but can't run here
    ├── PluginError               a plug-in breaks the contract
    ├── SessionError              the control plane refuses or can't be reached
    │   └── AuthenticationError   a record's HMAC is missing or wrong
    ├── TableMismatch             the two sides don't describe the same tensors
    ├── TraceError                a loader does what a plan can't express
    ├── TransferError             a version didn't arrive
    │   ├── TransferTimeout       a deadline passed; names who is missing
    │   ├── PeerLost              a member died or gave up; names it
    │   ├── VerificationError     bytes arrived that aren't the bytes sent
    │   └── Cancelled             this side gave up: its task was cancelled, or it was closed
    ├── UnsupportedOperation      the backend doesn't declare this capability
    └── HandleError               a closed, forked or busy handle was called

Backends translate their library's errors into this tree.  The first line of a
message names the thing and the remedy; everything after it is detail.
"""

from __future__ import annotations

__all__ = [
    "AuthenticationError",
    "BackendNotFound",
    "BackendUnavailable",
    "Cancelled",
    "ConfigError",
    "HandleError",
    "PeerLost",
    "PluginError",
    "SessionError",
    "TableMismatch",
    "TraceError",
    "TransferError",
    "TransferTimeout",
    "UnsupportedOperation",
    "VerificationError",
    "WeightWireError",
]


class WeightWireError(Exception):
    """Root of the tree: catch it to catch all that weightwire raises on purpose."""


class ConfigError(WeightWireError, ValueError):
    """An option, URL, name or argument is wrong; nothing was opened."""


class BackendNotFound(ConfigError):
    """No installed plug-in has this name; the message lists those installed."""


class BackendUnavailable(WeightWireError):
    """The plug-in is installed but can't run here; the message says what to install."""


class PluginError(WeightWireError):
    """A plug-in breaks the contract; the message names its distribution."""


class SessionError(WeightWireError):
    """The session can't be reached, or refuses this member."""


class AuthenticationError(SessionError):
    """A record's HMAC is missing or wrong for this side's token."""


class TableMismatch(WeightWireError):
    """Names, shapes, dtypes or layouts of the two sides differ; no byte has moved."""


class TraceError(WeightWireError):
    """A loader did something that a static plan can't express."""


class TransferError(WeightWireError):
    """A version didn't arrive whole; the previous one is untouched or the target tainted."""


class TransferTimeout(TransferError, TimeoutError):
    """A deadline passed; the message names who is missing."""


class PeerLost(TransferError):
    """A member of the version died, left or reported failure; the message names it."""


class VerificationError(TransferError):
    """What arrived isn't what was sent."""


class Cancelled(TransferError):
    """The caller gave up: its task was cancelled, or another thread closed the handle."""


class UnsupportedOperation(WeightWireError):
    """The backend doesn't declare the capability that this call needs."""


class HandleError(WeightWireError, RuntimeError):
    """A handle was used after close, in a forked child, or while another call runs."""
