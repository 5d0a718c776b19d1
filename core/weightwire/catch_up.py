"""Late receivers of versions that went from hand to hand.

Where a backend serves only those that are there when a version is sent, the trainer
also stores each finished version through a second backend, in a session of its own
inside the session.  A receiver that serves nothing takes the newest one from there, and
goes on with the first backend.
"""

from __future__ import annotations

from weightwire.config import BackendChoice, select
from weightwire.contract import Backend
from weightwire.errors import UnsupportedOperation

__all__ = ["SESSION", "refuse_unfit"]

SESSION = "catch-up"
"""The second session's place in the first."""


def refuse_unfit(main: Backend, choice: BackendChoice) -> None:
    """Raise unless ``choice`` stores versions, and ``main`` needs that.

    Raises:
        UnsupportedOperation: one of both isn't so.
        ConfigError, BackendNotFound, ...: see ``select``.
    """
    if main.capabilities.flow == "store":
        raise UnsupportedOperation(
            f"catch_up={choice!r}: backend {main.name!r} serves late receivers itself: leave it out"
        )
    backend, _ = select(choice)
    if backend.capabilities.flow != "store":
        raise UnsupportedOperation(
            f"catch_up={choice!r}: backend {backend.name!r} stores no versions: choose one that "
            "does, such as 'filesystem'"
        )
