"""Prometheus metrics of a watcher, on an endpoint of its own."""

from __future__ import annotations

from typing import Any

from weightwire.errors import BackendUnavailable, ConfigError
from weightwire_vllm.pool import ReplicaReport

__all__ = ["Metrics"]


class Metrics:
    """``weightwire_watch_*``, by engine; nothing without a port.

    Args:
        port: of ``/metrics``; 0 takes a free one.

    Raises:
        BackendUnavailable: prometheus-client isn't installed.
        ConfigError: the port is taken.
    """

    def __init__(self, port: int | None, address: str = "127.0.0.1") -> None:
        self._server: Any = None
        self.port: int | None = None
        if port is None:
            return
        try:
            import prometheus_client as prometheus
        except ImportError as error:
            raise BackendUnavailable(
                "--metrics-port needs prometheus-client: pip install 'weightwire[metrics]'"
            ) from error
        registry = prometheus.CollectorRegistry()

        def name(what: str) -> str:
            return f"weightwire_watch_{what}"

        self._in_service = prometheus.Gauge(
            name("in_service"), "1 while requests may go to it.", ["engine"], registry=registry
        )
        self._version = prometheus.Gauge(
            name("version"), "Version that it serves; -1 for none.", ["engine"], registry=registry
        )
        self._updates = prometheus.Counter(
            name("updates"), "Updates that ended.", ["engine", "outcome"], registry=registry
        )
        self._paused = prometheus.Histogram(
            name("paused_seconds"),
            "From asking it to pause until it generates again.",
            ["engine"],
            buckets=(0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300),
            registry=registry,
        )
        self._steps = prometheus.Gauge(
            name("step_seconds"),
            "The last update's steps: pause, update, verify, caches, resume.",
            ["engine", "step"],
            registry=registry,
        )
        try:
            self._server, self._thread = prometheus.start_http_server(
                port, addr=address, registry=registry
            )
        except OSError as error:
            raise ConfigError(f"--metrics-port {port}: {error}: choose another") from error
        self.port = int(self._server.server_address[1])

    def state(self, engine: str, version: int | None, *, in_service: bool) -> None:
        """What an engine is now."""
        if self._server is not None:
            self._in_service.labels(engine).set(in_service)
            self._version.labels(engine).set(-1 if version is None else version)

    def updated(self, engine: str, report: ReplicaReport) -> None:
        """An update succeeded."""
        if self._server is not None:
            self._updates.labels(engine, "applied").inc()
            self._paused.labels(engine).observe(report.paused_seconds)
            for step, seconds in report.seconds.items():
                self._steps.labels(engine, step).set(seconds)

    def failed(self, engine: str) -> None:
        """An update failed."""
        if self._server is not None:
            self._updates.labels(engine, "failed").inc()

    def close(self) -> None:
        """Free the port.  Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()
            self._thread.join(timeout=10)
