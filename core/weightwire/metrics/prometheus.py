"""Syncs as Prometheus metrics."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from weightwire.errors import BackendUnavailable, ConfigError
from weightwire.observers import Observer
from weightwire.report import VersionRecord

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = ["PrometheusObserver"]

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)
_SIDE = ("role", "member", "backend")


class PrometheusObserver(Observer):
    """Counts and times syncs in a registry of ``prometheus_client``.

    Args:
        registry: by default that library's own.  One registry takes one observer.

    Raises:
        BackendUnavailable: prometheus-client isn't installed.
        ConfigError: the registry has these metrics already.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        try:
            import prometheus_client as client
        except ImportError as error:
            raise BackendUnavailable(
                "PrometheusObserver needs prometheus-client: install it with "
                "`pip install 'weightwire[metrics]'`"
            ) from error
        into = client.REGISTRY if registry is None else registry
        try:
            self._register(client, into)
        except ValueError as error:
            raise ConfigError(
                f"PrometheusObserver: the registry has such metrics already ({error}): keep the "
                "observer that it has, or give each observer a CollectorRegistry of its own"
            ) from error

    def _register(self, client: Any, into: CollectorRegistry) -> None:
        self._versions = client.Counter(
            "weightwire_versions",
            "Attempts at versions, by how they ended: published, applied or aborted.",
            (*_SIDE, "outcome"),
            registry=into,
        )
        self._errors = client.Counter(
            "weightwire_errors",
            "Versions that were aborted, by the class of their error.",
            (*_SIDE, "error"),
            registry=into,
        )
        self._bytes = client.Counter(
            "weightwire_payload_bytes",
            "Payload that rank 0 sent or read, in bytes.",
            _SIDE,
            registry=into,
        )
        self._seconds = client.Histogram(
            "weightwire_sync_seconds",
            "Wall time of versions that succeeded, on rank 0, in seconds.",
            _SIDE,
            buckets=_SECONDS,
            registry=into,
        )
        self._phases = client.Histogram(
            "weightwire_phase_seconds",
            "Seconds by phase of versions, aborted ones included, on rank 0.",
            (*_SIDE, "phase"),
            buckets=_SECONDS,
            registry=into,
        )
        self._version = client.Gauge(
            "weightwire_version",
            "The last version that was published or applied.",
            _SIDE,
            registry=into,
        )
        self._when = client.Gauge(
            "weightwire_last_sync_timestamp_seconds",
            "When that was, in seconds since 1970 by this host's clock.",
            _SIDE,
            registry=into,
        )

    def published(self, record: VersionRecord) -> None:
        self._succeeded(record, "published")

    def applied(self, record: VersionRecord) -> None:
        self._succeeded(record, "applied")

    def aborted(self, record: VersionRecord) -> None:
        side = _side(record)
        self._versions.labels(*side, "aborted").inc()
        self._errors.labels(*side, type(record.error).__name__).inc()
        self._note_phases(record)

    def _succeeded(self, record: VersionRecord, outcome: str) -> None:
        side, report = _side(record), record.report
        self._versions.labels(*side, outcome).inc()
        self._version.labels(*side).set(record.version)
        self._when.labels(*side).set(time.time())
        self._note_phases(record)
        if report is not None:
            self._bytes.labels(*side).inc(report.nbytes)
            self._seconds.labels(*side).observe(report.seconds)

    def _note_phases(self, record: VersionRecord) -> None:
        for phase, seconds in record.phases.items():
            self._phases.labels(*_side(record), phase).observe(seconds)


def _side(record: VersionRecord) -> tuple[str, str, str]:
    return (record.role, record.member_id, record.backend)
