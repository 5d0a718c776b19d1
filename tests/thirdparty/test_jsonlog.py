"""The observer of a third party: one line for what happened to each version on each side."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest
import torch
from thirdparty_rig import HERE, load

import weightwire
from weightwire import PeerLost, Report, VersionRecord, WeightWireError
from weightwire.plugins import registry

REPORT = Report("sender", "memory", 3, 1, 1, 8, 0.5, {"offer": 0.25}, "0" * 16, "memory (pull)")


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    plugin = load(HERE / "weightwire-jsonlog" / "weightwire_jsonlog.py")
    monkeypatch.setenv(plugin.VARIABLE, str(tmp_path / "log.jsonl"))
    return plugin


def lines(tmp_path: Path) -> list[dict]:
    return [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]


def test_a_line_says_what_happened(plugin: ModuleType, tmp_path: Path) -> None:
    where = ("file:///run", "sender", "sender", 3)
    plugin.weightwire_published(VersionRecord(*where, REPORT))
    plugin.weightwire_aborted(
        VersionRecord(*where, None, PeerLost("replica \u2019a\u2019\nis gone"))
    )
    published, aborted = lines(tmp_path)
    assert published.pop("time") <= aborted.pop("time")
    assert published == {
        "event": "published",
        "session": "file:///run",
        "member": "sender",
        "version": 3,
        "report": json.loads(json.dumps(REPORT.to_dict())),
        "error": None,
    }
    assert (aborted["event"], aborted["report"]) == ("aborted", None)
    assert aborted["error"] == "PeerLost: replica \u2019a\u2019\nis gone"


def test_lines_of_many_writers_stay_whole(plugin: ModuleType, tmp_path: Path) -> None:
    record = VersionRecord("file:///run", "receiver", "x" * 5000, 1, REPORT)
    with ThreadPoolExecutor(8) as writers:
        list(writers.map(lambda _: plugin.weightwire_applied(record), range(200)))
    assert [line["member"] for line in lines(tmp_path)] == ["x" * 5000] * 200


def test_without_its_variable_it_does_nothing(
    plugin: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(plugin.VARIABLE)
    plugin.weightwire_applied(VersionRecord("file:///run", "receiver", "a", 1, REPORT))
    assert not list(tmp_path.iterdir())


def test_it_hears_of_both_sides_and_of_what_failed(plugin: ModuleType, tmp_path: Path) -> None:
    registry().register(plugin, "jsonlog")
    url = f"file://{tmp_path / 'session'}"
    try:
        with (
            weightwire.open_sender("memory", session=url, source={"a": torch.ones(3)}) as sender,
            weightwire.open_receiver(
                "memory", session=url, target={"a": torch.zeros(3)}, receiver_id="replica"
            ) as receiver,
            ThreadPoolExecutor(1) as background,
        ):
            receiving = background.submit(receiver.receive)
            sender.send(1, wait="applied")
            receiving.result()
            with pytest.raises(WeightWireError):
                sender.send(1)
    finally:
        registry().unregister("jsonlog")
    found = [(line["event"], line["member"], line["version"]) for line in lines(tmp_path)]
    assert sorted(found) == [
        ("aborted", "sender", 1),
        ("applied", "replica", 1),
        ("published", "sender", 1),
    ]
