"""A fetch plan without a receiver around it."""

from __future__ import annotations

from weightwire.contract import ReceiverTransport
from weightwire.deadline import Deadline, Watch
from weightwire.memory import MemoryBackend
from weightwire.phases import Phases
from weightwire.targets import WeightTarget

__all__ = ["BareTarget", "BareTransport", "fetch"]


class BareTransport(ReceiverTransport):
    """All but ``fetch``."""

    def set_plan(self, table, regions):
        self.regions = regions

    def begin(self, offer):
        pass

    def finish(self):
        pass

    def abort(self, error):
        pass

    def close(self):
        pass


class BareTarget(WeightTarget):
    """All but ``write``; holds what that keeps."""

    def __init__(self):
        self.held = {}

    def plan(self, table):
        raise NotImplementedError


def fetch(plan, transport, target, *, version, verify, of=0):
    """Every group of a version."""
    watch = Watch()
    watch.start(Deadline(10))
    return plan.fetch(
        transport,
        target,
        MemoryBackend.capabilities,
        version=version,
        of=of,
        verify=verify,
        watch=watch,
        phases=Phases(),
    )
