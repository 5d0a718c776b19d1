"""Leases that a busy machine can't miss, in sessions whose failures are told at once all the same.

All members of a scenario are processes of one host: one that dies is seen to be gone.  So
nothing depends on a lease's end, and a short one would only take a process that had to wait
for a processor for dead.
"""

from __future__ import annotations

from weightwire.session import lease

__all__ = ["LEASE_SECONDS", "look_often"]

LEASE_SECONDS = 60.0
_LOOK_SECONDS = 0.25


def look_often() -> None:
    """In this process, members look for each other's failures far more often than leases ask."""
    lease.RENEWALS_PER_TTL = round(LEASE_SECONDS / _LOOK_SECONDS)
