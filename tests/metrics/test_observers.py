"""Metrics of real syncs, as scrapers and exporters see them; observers that fail harm nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import weightwire
from weightwire import Observer, VersionRecord
from weightwire.metrics import OpenTelemetryObserver, PrometheusObserver
from weightwire.plugins import registry
from weightwire.report import PHASES

NBYTES = 4 * 1000


@pytest.fixture
def observe() -> Iterator[Callable[[Observer], None]]:
    stops: list[Callable[[], None]] = []
    yield lambda observer: stops.append(weightwire.observe(observer))
    for stop in stops:
        stop()
        stop()  # a second call does nothing


def sync(
    directory: Path, *versions: int, backend: str = "memory", refused: bool = False
) -> tuple[list[Any], list[Any]]:
    """Versions from a sender to a receiver; and then one more that the sender refuses."""
    url = f"file://{directory / 'session'}"
    source, target = {"a": torch.ones(1000)}, {"a": torch.zeros(1000)}
    sent, received = [], []
    with (
        weightwire.open_sender(backend, session=url, source=source) as sender,
        weightwire.open_receiver(
            backend, session=url, target=target, receiver_id="replica-0"
        ) as receiver,
        ThreadPoolExecutor(1) as background,
    ):
        for version in versions:
            receiving = background.submit(receiver.receive, timeout=60)
            sent.append(sender.send(version, wait="applied"))
            received.append(receiving.result())
        if refused:
            with pytest.raises(weightwire.ConfigError):
                sender.send(versions[-1])
    assert torch.equal(target["a"], source["a"])
    return sent, received


def scraped(metrics: CollectorRegistry) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """What a scraper reads from the text that is served."""
    text = generate_latest(metrics).decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.mark.parametrize("backend", ["memory", "filesystem"])
def test_what_prometheus_scrapes_is_what_the_reports_say(
    tmp_path: Path, observe: Callable[[Observer], None], backend: str
) -> None:
    metrics = CollectorRegistry()
    observe(PrometheusObserver(metrics))
    sent, received = sync(tmp_path, 1, 2, backend=backend, refused=True)
    found = scraped(metrics)

    def value(name: str, role: str, **labels: str) -> float | None:
        member = "sender" if role == "sender" else "replica-0"
        side = {"role": role, "member": member, "backend": backend, **labels}
        return found.get((f"weightwire_{name}", frozenset(side.items())))

    assert value("versions_total", "sender", outcome="published") == 2
    assert value("versions_total", "receiver", outcome="applied") == 2
    assert value("versions_total", "sender", outcome="aborted") == 1
    assert value("errors_total", "sender", error="ConfigError") == 1
    for role, reports in (("sender", sent), ("receiver", received)):
        assert value("payload_bytes_total", role) == sum(report.nbytes for report in reports)
        assert value("version", role) == 2
        assert value("sync_seconds_count", role) == 2
        total = sum(report.seconds for report in reports)
        assert value("sync_seconds_sum", role) == pytest.approx(total)
        for phase in PHASES:
            seconds = [r.phases[phase] for r in reports if phase in r.phases]
            count = value("phase_seconds_count", role, phase=phase) or 0
            # The version that was refused has come as far as its offer.
            assert count == len(seconds) + (role == "sender" and phase == "offer"), phase
            if seconds and phase != "offer":
                assert value("phase_seconds_sum", role, phase=phase) == pytest.approx(sum(seconds))
        assert value("last_sync_timestamp_seconds", role) > 1.6e9


def test_what_opentelemetry_exports_is_what_the_reports_say(
    tmp_path: Path, observe: Callable[[Observer], None]
) -> None:
    reader, exporter = InMemoryMetricReader(), InMemorySpanExporter()
    tracing = TracerProvider()
    tracing.add_span_processor(SimpleSpanProcessor(exporter))
    metering = MeterProvider([reader])
    observe(OpenTelemetryObserver(metering, tracing))
    (sent,), (received,) = sync(tmp_path, 7, refused=True)
    points = {
        (metric.name, point.attributes["weightwire.role"], point.attributes.get(key)): point
        for resource in reader.get_metrics_data().resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.data.data_points
        for key in ("weightwire.phase", "weightwire.outcome")
        if key in point.attributes or metric.name not in (
            "weightwire.phase.duration", "weightwire.versions"
        )
    }  # fmt: skip
    assert points["weightwire.versions", "sender", "published"].value == 1
    assert points["weightwire.versions", "sender", "aborted"].value == 1
    assert points["weightwire.versions", "receiver", "applied"].value == 1
    assert points["weightwire.version", "receiver", None].value == 7
    assert points["weightwire.payload", "sender", None].value == sent.nbytes == NBYTES
    fetched = points["weightwire.phase.duration", "receiver", "fetch"]
    assert fetched.sum == pytest.approx(received.phases["fetch"])
    assert points["weightwire.sync.duration", "sender", None].sum == pytest.approx(sent.seconds)

    spans = {(span.name, span.status.is_ok): span for span in exporter.get_finished_spans()}
    assert set(spans) == {
        ("weightwire.send", True), ("weightwire.receive", True), ("weightwire.send", False),
    }  # fmt: skip
    span = spans["weightwire.send", True]
    assert (span.end_time - span.start_time) / 1e9 == pytest.approx(sent.seconds, abs=1e-6)
    assert span.attributes["weightwire.version"] == 7
    assert span.attributes["weightwire.phase.announce"] == sent.phases["announce"]
    refused = spans["weightwire.send", False]
    assert refused.attributes["error.type"] == "ConfigError"
    assert [event.name for event in refused.events] == ["exception"]
    tracing.shutdown()
    metering.shutdown()


class Failing(Observer):
    def __init__(self) -> None:
        self.heard: list[int] = []

    def published(self, record: VersionRecord) -> None:
        self.heard.append(record.version)
        raise RuntimeError("disk full")

    applied = published


def test_an_observer_that_fails_is_logged_once_and_harms_nothing(
    tmp_path: Path, observe: Callable[[Observer], None], caplog: pytest.LogCaptureFixture
) -> None:
    failing, metrics = Failing(), CollectorRegistry()
    observe(failing)
    observe(PrometheusObserver(metrics))
    with caplog.at_level(logging.ERROR, "weightwire"):
        sync(tmp_path, 1, 2, 3)
    assert sorted(failing.heard) == [1, 1, 2, 2, 3, 3]
    said = [record for record in caplog.records if "disk full" in str(record.exc_info)]
    assert len(said) == 2  # once for each of the two hooks
    assert "Failing" in said[0].getMessage()
    labels = {"role": "receiver", "member": "replica-0", "backend": "memory", "outcome": "applied"}
    assert scraped(metrics)["weightwire_versions_total", frozenset(labels.items())] == 3


def test_without_observers_no_record_is_made(
    tmp_path: Path, observe: Callable[[Observer], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks = ("weightwire_published", "weightwire_applied", "weightwire_aborted")
    assert not any(registry().is_observed(hook) for hook in hooks)

    def never(*_: object, **__: object) -> None:
        raise AssertionError("a record was made for nobody")

    monkeypatch.setattr("weightwire.sender.VersionRecord", never)
    monkeypatch.setattr("weightwire.receiver.VersionRecord", never)
    sync(tmp_path, 1)


def test_a_registry_takes_one_observer() -> None:
    metrics = CollectorRegistry()
    PrometheusObserver(metrics)
    with pytest.raises(weightwire.ConfigError, match=r"has such metrics already .* of its own"):
        PrometheusObserver(metrics)


def test_what_is_no_observer_is_refused() -> None:
    with pytest.raises(weightwire.ConfigError, match=r"no weightwire\.Observer"):
        weightwire.observe(print)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("observer", "module"),
    [(PrometheusObserver, "prometheus_client"), (OpenTelemetryObserver, "opentelemetry")],
)
def test_a_library_that_is_missing_is_named(
    observer: Callable[[], Observer], module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(weightwire.BackendUnavailable, match=r"weightwire\[metrics\]"):
        observer()
