"""``weightwire inspect``: phases, rates, lags and mismatches, as text, JSON and a page."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import weightwire
from weightwire.cli.page_file import write_page
from weightwire.contract import Offer, Policy
from weightwire.deadline import Deadline
from weightwire.fingerprint import Fingerprint
from weightwire.inspection import SessionView, inspect_session
from weightwire.report import PHASES
from weightwire.session import keys
from weightwire.session.lease import LeaseObserver
from weightwire.session.records import (
    Applied,
    ErrorInfo,
    MemberRecord,
    OfferRecord,
    Outcome,
    Ready,
    Record,
    Started,
)
from weightwire.session.session import Session
from weightwire.session_page import session_page
from weightwire.units import printable

EVIL = "<script>alert(1)</script>\x1b[2J"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "weightwire"), "inspect", *arguments]
    environment = {**os.environ, "COLUMNS": "240"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env=environment
    )


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    opened = Session.open(f"file://{tmp_path / 'made'}", deadline=Deadline(10))
    yield opened
    opened.close()


def look(session: Session) -> SessionView:
    return inspect_session(session, LeaseObserver(session))


def offer(session: Session, version: int, *roster: str) -> Policy:
    policy = Policy(1, version, 1)
    offered = Offer(policy, "d" * 32, roster, (b"x",), "sample")
    session.write(
        keys.version(policy, "offer"), OfferRecord(offered, "memory", 10**9, "applied", 1.0)
    )
    return policy


def test_a_real_sync_is_shown_with_its_phases_and_drawn(tmp_path: Path) -> None:
    url, page = f"file://{tmp_path / 'run'}", tmp_path / "page.html"
    source, target = {"w": torch.arange(5000.0)}, {"w": torch.zeros(5000)}
    with (
        weightwire.open_sender("memory", session=url, source=source) as sender,
        weightwire.open_receiver(
            "memory", session=url, target=target, receiver_id="replica-0"
        ) as receiver,
        ThreadPoolExecutor(1) as background,
    ):
        reports = []
        for version in (1, 2):
            receiving = background.submit(receiver.receive, timeout=60)
            sender.send(version, wait="applied")
            reports.append(receiving.result())
        seen = json.loads(run(url, "--json", "--html", str(page)).stdout)
    newest, oldest = seen["versions"]
    for version, report in ((newest, reports[1]), (oldest, reports[0])):
        (answer,) = version["answers"]
        assert answer["receiver_id"] == "replica-0"
        assert answer["digest"] == report.digest
        assert answer["nbytes"] == report.nbytes
        assert answer["gbps"] > 0
        assert not answer["mismatch"]
        assert set(answer["phases"]) <= set(PHASES)
        assert answer["phases"]["fetch"] == report.phases["fetch"]
        assert {"offer", "ready", "stage", "announce", "commit"} <= set(version["phases"])
        assert sum(version["phases"].values()) <= version["seconds"] * 1.5 + 0.5
    (member,) = seen["receivers"]
    assert (member["serving"], member["behind"]) == (2, 0)
    assert_self_contained(page.read_text())
    assert page.read_text().count("<svg") == 2
    human = run(url)
    assert "version 2, by receiver" in human.stdout
    assert [path.name for path in tmp_path.iterdir() if "tmp" in path.name] == []


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.tags.add(tag)
        self.links += [value for name, value in attributes if name in ("src", "href")]


def assert_self_contained(text: str) -> None:
    tags = Tags()
    tags.feed(text)
    assert "svg" in tags.tags
    assert "script" not in tags.tags
    assert tags.links == []
    assert "default-src 'none'" in text


def test_what_others_write_is_data_on_the_page_and_on_the_terminal(session: Session) -> None:
    policy = offer(session, 1, EVIL)
    session.write(
        keys.version(policy, "outcome"), Outcome(ErrorInfo("PeerLost", EVIL), 1e300, 1e300)
    )
    record = MemberRecord("a", 1, 1, EVIL, 9.0, EVIL, 1, "p", -1e300, "n")
    session.write("receivers/a/000001/record", record)
    session.write(
        keys.answer(policy, "applied", "a", 1),
        Applied(1, 1e-300, EVIL, Fingerprint("a", "\x1b[31m<b>"), None, False, {"fetch": 1e9}),
    )
    view = look(session)
    text = session_page(view)
    assert_self_contained(text)
    assert "<script" not in text
    assert "\x1b" not in text
    shown = run(session.url)
    assert shown.returncode == 0
    assert "\x1b[2J" not in shown.stdout
    assert "\x1b" not in json.loads(run(session.url, "--json").stdout)["versions"][0]["error"]


def test_numbers_without_bounds_are_still_json(session: Session) -> None:
    policy = offer(session, 1, "a")
    huge = Applied((1 << 63) - 1, 1e-307, phases={"fetch": 1e9})
    session.write(keys.answer(policy, "applied", "a", 1), huge)
    session.write(keys.version(policy, "outcome"), Outcome(None, 1e-307, 0.0))

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    seen = json.loads(run(session.url, "--json").stdout, parse_constant=refuse)
    assert seen["versions"][0]["answers"][0]["gbps"] == 1e9
    assert "inf" not in session_page(look(session))


def test_an_error_made_of_what_others_wrote_is_data_on_the_terminal(session: Session) -> None:
    evil = type("\x1b[2J[bold]", (Record,), {}, frozen=True)
    session.write("receivers/a/000001/record", evil())
    result = run(session.url)
    assert result.returncode == 1
    assert "\x1b" not in result.stdout + result.stderr
    last = result.stdout.splitlines()[-1]
    assert last.startswith("left out: record 'receivers/a/000001/record' is a '\\x1b[2J[bold]'")
    assert last.endswith("is something else writing to this session?")


def test_a_page_goes_to_what_a_link_or_a_pipe_leads_to(session: Session, tmp_path: Path) -> None:
    page, link, pipe = (tmp_path / name for name in ("page.html", "link.html", "pipe"))
    page.write_text("old")
    link.symlink_to(page)
    os.mkfifo(pipe)
    run(session.url, "--html", str(link))
    assert link.is_symlink()
    assert "<svg" not in page.read_text()
    assert "weightwire session" in page.read_text()
    with ThreadPoolExecutor(1) as background:
        reading = background.submit(pipe.read_text)
        write_page(pipe, "through it")
        assert reading.result(20) == "through it"
    assert pipe.is_fifo()


def test_following_waits_for_a_session_that_went_and_takes_the_new_one(
    session: Session, tmp_path: Path
) -> None:
    command = [str(Path(sys.executable).parent / "weightwire"), "inspect", session.url, "--follow",
               "--json", "--interval", "0.1"]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        old = json.loads(process.stdout.readline())["session_id"]
        (tmp_path / "made").rename(tmp_path / "old")
        assert "doesn't exist" in process.stderr.readline()
        made = Session.open(session.url, deadline=Deadline(10))
        while (now := json.loads(process.stdout.readline())["session_id"]) == old:
            pass
        assert now == made.id
        made.close()
    finally:
        process.kill()
        process.communicate()


def test_an_interrupt_leaves_no_part_of_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    page = tmp_path / "page.html"
    page.write_text("old")
    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_page(page, "new")
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    assert page.read_text() == "old"


def test_printable_keeps_what_is_readable() -> None:
    assert printable("größe\n2 GB") == "größe\n2 GB"
    assert printable("\x1b[2J\x07\u202e") == "\\x1b[2J\\x07\\u202e"


def test_receivers_of_one_layout_that_hold_other_bits_are_named(session: Session) -> None:
    policy = offer(session, 1, "a", "b", "c", "d")
    for name, bits in {"a": "11", "b": "11", "c": "22", "d": "33"}.items():
        layout = "other" if name == "d" else "same"
        answer = Applied(8, 1.0, "ff", Fingerprint(layout, bits), phases={"fetch": 0.5})
        session.write(keys.answer(policy, "applied", name, 1), answer)
    session.write(keys.version(policy, "outcome"), Outcome(None, 2.0, 1.0))
    (version,) = look(session).versions
    assert [a.receiver_id for a in version.answers if a.mismatch] == ["c"]
    assert "holds other bits than its peers: 22" in session_page(look(session))
    human = run(session.url).stdout
    assert "c (22)" in re.sub(r"\s+", " ", human.replace("│", " "))


def test_bad_records_hide_nothing_but_what_they_are_of(tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'run'}"
    source, target = {"a": torch.ones(4)}, {"a": torch.zeros(4)}
    with (
        weightwire.open_sender("filesystem", session=url, source=source) as sender,
        weightwire.open_receiver("filesystem", session=url, target=target, receiver_id="r") as r,
        contextlib.closing(Session.open(url, deadline=Deadline(10))) as session,
    ):
        for version in (1, 2):
            sender.send(version)
        r.receive()
        policy = Policy(1, 1, 1)
        session.store.put(keys.version(policy, "offer"), b"{not a record")
        session.store.put("receivers/broken/000001/record", b"\xff\x00")
        view = look(session)
        assert [version.version for version in view.versions] == [2]
        assert [receiver.member_id for receiver in view.receivers] == ["r"]
        assert len(view.unreadable) == 2
        shown = run(url)
        assert shown.returncode == 1
        assert shown.stdout.count("left out: ") == 2
        assert "Traceback" not in shown.stderr
        assert json.loads(run(url, "--json").stdout)["unreadable"] == list(view.unreadable)


def test_the_phase_of_each_receiver_while_a_version_runs(session: Session) -> None:
    policy = offer(session, 1, "planning", "waiting", "declined")

    def phases() -> dict[str, str]:
        (version,) = look(session).versions
        return {answer.receiver_id: answer.phase for answer in version.answers}

    declined = Ready(declined=ErrorInfo("TableMismatch", "w is missing"))
    session.write(keys.answer(policy, "ready", "waiting", 1), Ready())
    session.write(keys.answer(policy, "ready", "declined", 1), declined)
    assert phases() == {"planning": "ready", "waiting": "wait", "declined": ""}
    session.write(keys.version(policy, "started"), Started({"waiting": 1}))
    assert phases()["waiting"] == "fetch"
    session.write(keys.answer(policy, "applied", "waiting", 1), Applied(8, 1.0))
    assert phases()["waiting"] == "commit"
    session.write(keys.version(policy, "outcome"), Outcome(None, 2.0, 1.0))
    assert set(phases().values()) == {""}


def test_a_receiver_that_lags_is_told_by_how_much(tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'run'}"
    target = {"w": torch.zeros(4)}
    with (
        weightwire.open_sender("filesystem", session=url, source={"w": torch.ones(4)}) as sender,
        weightwire.open_receiver(
            "filesystem", session=url, target=target, receiver_id="late"
        ) as receiver,
    ):
        sender.send(1)
        receiver.receive(timeout=60)
        sender.send(2)
        sender.send(3)
        (member,) = json.loads(run(url, "--json").stdout)["receivers"]
    assert (member["serving"], member["behind"]) == (1, 2)
    assert 0 <= member["lag_s"] < 600


def test_a_page_that_cannot_be_written_is_named(session: Session, tmp_path: Path) -> None:
    result = run(session.url, "--html", str(tmp_path / "none" / "page.html"))
    assert result.returncode == 1
    assert "there is no directory" in result.stderr
    result = run(session.url, "--html", str(tmp_path))
    assert result.returncode == 1
    assert "can't be written" in result.stderr


def test_following_writes_the_page_again(session: Session, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    command = [str(Path(sys.executable).parent / "weightwire"), "inspect", session.url, "--follow",
               "--json", "--interval", "0.1", "--html", str(page)]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert json.loads(process.stdout.readline())["versions"] == []
        offer(session, 7, "a")
        while not json.loads(process.stdout.readline())["versions"]:
            pass
        assert "version 7" in page.read_text()
    finally:
        process.kill()
        process.communicate()
