"""Trainer ranks and inference ranks as real processes.

A ``Pool`` forks warm workers from one process that has imported everything; a
``Fleet`` belongs to one scenario, opens senders and receivers in workers, and
fails when anything is left behind.  ``process`` is the worker's side.
"""

from weightwire_conformance.rig.fleet import Fleet, LeftBehind, Side
from weightwire_conformance.rig.pool import Pool
from weightwire_conformance.rig.worker import (
    Call,
    Calls,
    NoAnswer,
    RemoteError,
    Worker,
    WorkerDied,
)

__all__ = [
    "Call",
    "Calls",
    "Fleet",
    "LeftBehind",
    "NoAnswer",
    "Pool",
    "RemoteError",
    "Side",
    "Worker",
    "WorkerDied",
]
