"""Metrics of syncs: ``pip install 'weightwire[metrics]'``; names and units in docs/operations.md.

Importing this imports neither library: an observer does when it is made.
"""

from weightwire.metrics.otel import OpenTelemetryObserver
from weightwire.metrics.prometheus import PrometheusObserver

__all__ = ["OpenTelemetryObserver", "PrometheusObserver"]
