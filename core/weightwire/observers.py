"""Observers: told of each version once on each side, at no cost where there is none.

A plug-in observes by the hooks ``weightwire_published``, ``weightwire_applied`` and
``weightwire_aborted``; a process adds an ``Observer`` of its own::

    stop = weightwire.observe(weightwire.metrics.PrometheusObserver())
"""

from __future__ import annotations

from collections.abc import Callable

from weightwire.report import VersionRecord

__all__ = ["Observer", "observe"]


class Observer:
    """Does nothing; override what is of interest.

    Each method is called on rank 0 of its side, on the thread that called ``send`` or
    ``commit``, after the version's outcome is settled: keep it short.  What it raises is
    logged once, and harms neither the version nor other observers.
    """

    def published(self, record: VersionRecord) -> None:
        """A sender finished a version; ``record.report`` says how."""

    def applied(self, record: VersionRecord) -> None:
        """A receiver has wholly applied a version; ``record.report`` says how."""

    def aborted(self, record: VersionRecord) -> None:
        """A version failed on this side; ``record.error`` says why."""


def observe(observer: Observer) -> Callable[[], None]:
    """Tell an observer of all versions that this process sends or receives from now on.

    Returns:
        A function that ends it; a second call does nothing.
    """
    from weightwire.plugins import registry  # which loads the plug-ins, and they load us

    return registry().add_observer(observer)
