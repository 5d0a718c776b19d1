"""A session under random faults, judged by an outside observer; see ``World``."""

from weightwire_conformance.chaos.faults import FAULTS, Fault
from weightwire_conformance.chaos.report import ChaosReport
from weightwire_conformance.chaos.world import ChaosOptions, World, run

__all__ = ["FAULTS", "ChaosOptions", "ChaosReport", "Fault", "World", "run"]
