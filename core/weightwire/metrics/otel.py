"""Syncs as OpenTelemetry metrics and spans."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from weightwire._version import __version__
from weightwire.errors import BackendUnavailable
from weightwire.observers import Observer
from weightwire.report import VersionRecord

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider

__all__ = ["OpenTelemetryObserver"]

_SCOPE = "weightwire"
_SPANS = {"sender": "weightwire.send", "receiver": "weightwire.receive"}


class OpenTelemetryObserver(Observer):
    """Reports syncs through the OpenTelemetry API.

    A span for each version, as long as it took, with its phases as attributes; and the
    instruments that docs/operations.md lists.

    Args:
        meter_provider, tracer_provider: by default those that the process has set.

    Raises:
        BackendUnavailable: opentelemetry-api isn't installed.
    """

    def __init__(
        self,
        meter_provider: MeterProvider | None = None,
        tracer_provider: TracerProvider | None = None,
    ) -> None:
        try:
            from opentelemetry import metrics, trace
        except ImportError as error:
            raise BackendUnavailable(
                "OpenTelemetryObserver needs opentelemetry-api: install it with "
                "`pip install 'weightwire[metrics]'`"
            ) from error
        meter = metrics.get_meter(_SCOPE, __version__, meter_provider)
        self._tracer = trace.get_tracer(_SCOPE, __version__, tracer_provider)
        self._failed = trace.StatusCode.ERROR
        self._versions = meter.create_counter(
            "weightwire.versions", "{version}", "Attempts at versions, by how they ended."
        )
        self._bytes = meter.create_counter(
            "weightwire.payload", "By", "Payload that rank 0 sent or read."
        )
        self._seconds = meter.create_histogram(
            "weightwire.sync.duration", "s", "Wall time of versions that succeeded, on rank 0."
        )
        self._phases = meter.create_histogram(
            "weightwire.phase.duration", "s", "Time by phase, aborted versions included."
        )
        self._version = meter.create_gauge(
            "weightwire.version", "{version}", "The last version published or applied."
        )

    def published(self, record: VersionRecord) -> None:
        self._succeeded(record, "published")

    def applied(self, record: VersionRecord) -> None:
        self._succeeded(record, "applied")

    def aborted(self, record: VersionRecord) -> None:
        error = type(record.error).__name__
        attributes = {**_side(record), "weightwire.outcome": "aborted", "error.type": error}
        self._versions.add(1, attributes)
        self._note_phases(record)
        self._span(record, attributes, sum(record.phases.values()))

    def _succeeded(self, record: VersionRecord, outcome: str) -> None:
        side, report = _side(record), record.report
        attributes = {**side, "weightwire.outcome": outcome}
        self._versions.add(1, attributes)
        self._version.set(record.version, side)
        self._note_phases(record)
        if report is not None:
            self._bytes.add(report.nbytes, side)
            self._seconds.record(report.seconds, side)
            self._span(record, attributes, report.seconds)

    def _note_phases(self, record: VersionRecord) -> None:
        for phase, seconds in record.phases.items():
            self._phases.record(seconds, {**_side(record), "weightwire.phase": phase})

    def _span(self, record: VersionRecord, attributes: dict[str, str], seconds: float) -> None:
        end = time.time_ns()
        found: dict[str, str | int | float] = {
            **attributes,
            "weightwire.session": record.session_url,
            "weightwire.version": record.version,
            **{f"weightwire.phase.{name}": taken for name, taken in record.phases.items()},
        }
        if record.report is not None:
            found["weightwire.nbytes"] = record.report.nbytes
            found["weightwire.attempt"] = record.report.attempt
            found["weightwire.path"] = record.report.path
            found["weightwire.digest"] = record.report.digest
        span = self._tracer.start_span(
            _SPANS[record.role], attributes=found, start_time=end - int(seconds * 1e9)
        )
        if record.error is not None:
            span.record_exception(record.error)
            span.set_status(self._failed, str(record.error).partition("\n")[0])
        span.end(end)


def _side(record: VersionRecord) -> dict[str, str]:
    return {
        "weightwire.role": record.role,
        "weightwire.member": record.member_id,
        "weightwire.backend": record.backend,
    }
