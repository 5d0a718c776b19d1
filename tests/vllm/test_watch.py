"""``weightwire watch`` follows servers through restarts, ends in good order, refuses by name."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from server_rig import PROMPT, become, damage, holds, model, sender_of
from watch_rig import COMMAND, Watch

import weightwire
from weightwire.vllm import Pool


@pytest.fixture
def watching(session):
    """Starts watchers of this session; they end with the test."""
    with contextlib.ExitStack() as stack:

        def start(*options: str, **environment: str) -> Watch:
            watch = Watch("--session", session, "--timeout", "40", *options, **environment)
            stack.callback(watch.close)
            return watch

        yield start


class Slow:
    """A sender whose iterator stops in the middle until it is let go on."""

    def __init__(self, session, which):
        self.is_amid, self.go_on = threading.Event(), threading.Event()
        tensors = dict(model(which).state_dict())

        def stream():
            for number, item in enumerate(tensors.items()):
                if number == len(tensors) // 2:
                    self.is_amid.set()
                    self.go_on.wait(60)
                yield item

        source = weightwire.StreamingSource(stream, specs=tensors)
        self._sender = weightwire.open_sender(
            "memory", session=session, source=source, timeout=60, group_bytes=1 << 14
        )
        self._beside = ThreadPoolExecutor(1)

    def send(self, version):
        """Returns in the middle of it, with what comes of it."""
        self.is_amid.clear()
        sending = self._beside.submit(self._sender.send, version)
        assert self.is_amid.wait(60)
        return sending

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.go_on.set()
        self._beside.shutdown()
        self._sender.close()


def engine(server):
    return ("--engine", f"r={server.url}")


def serves(server, session, which, *, version=1, leaves=False):
    """Bring a server to A or B by a pool."""
    with Pool({"r": server.url}, session=session, backend="filesystem", timeout=60) as pool:
        pool.attach()
        with sender_of(session, which) as sender:
            sender.send(version)
        pool.update(version)
        if leaves:
            pool.detach()


def test_sigterm_amid_an_update_finishes_it_within_its_grace(servers, cold, session, watching):
    a = servers["A"]
    serves(a, f"{session}-before", "A", leaves=True)
    watch = watching(*engine(a), "--backend", "memory", "--grace", "30")
    watch.await_("attached")
    with Slow(session, "B") as sender:
        sending = sender.send(1)
        watch.stop()
        sender.go_on.set()
        assert sending.result(timeout=60).version == 1
        assert watch.end(None) == 0
    assert watch.await_("version", version=1)["failed"] == {}
    assert not a.paused
    assert a.version == "1"
    holds(a, cold["B"])


def test_sigterm_while_requests_end_lets_the_server_serve_on(servers, cold, session, watching):
    a = servers["A"]
    serves(a, session, "A")
    options = ("--mode", "wait", "--grace", "0.1", "--metrics-port", "0")
    watch = watching(*engine(a), *options)
    watch.await_("metrics")
    with a.asked_for_long(PROMPT):
        with sender_of(session, "B", resume_from=1) as sender:
            sender.send(2)
        a.await_paused()
        assert watch.end() == 0, "\n".join(map(str, watch.lines))
        assert not a.paused
    holds(a, cold["A"])


def test_sigterm_with_too_short_a_grace_leaves_the_server_paused(servers, cold, session, watching):
    a = servers["A"]
    serves(a, f"{session}-before", "A", leaves=True)
    watch = watching(*engine(a), "--backend", "memory", "--grace", "0.5")
    watch.await_("attached")
    with Slow(session, "B") as sender:
        sending = sender.send(1)
        assert watch.end() == 1
        left = watch.await_("left")
        assert (left["engine"], "is left paused" in left["message"]) == (a.url, True)
        sender.go_on.set()
        assert a.paused  # its core answers once the version is there
        assert "an update is open" in a.post("/resume").text
        # Whoever comes next finishes that update.
        again = watching(*engine(a), "--backend", "memory")
        assert sending.result(timeout=60).version == 1
        again.await_("version", version=1)
        assert again.end() == 0
    assert not a.paused
    holds(a, cold["B"])


@pytest.mark.parametrize(
    ("is_whole", "on_failure"), [(True, "restore"), (True, "pause"), (False, "restore")]
)
def test_what_a_failed_update_left_decides_what_becomes_of_the_server(
    servers, cold, session, watching, tmp_path, is_whole, on_failure
):
    a = servers["A"]
    serves(a, session, "A")
    groups = {} if is_whole else {"group_bytes": 1 << 14}
    with sender_of(session, "B", resume_from=1, **groups) as sender:
        sender.send(2)
    damage(tmp_path / "run")
    watch = watching(*engine(a), "--on-failure", on_failure)
    if is_whole and on_failure == "restore":
        watch.await_("restored", engine=a.url)
    else:
        assert watch.await_("out", engine=a.url)["whole"] == is_whole
        assert a.paused
    watch.await_("version", version=2)
    code = watch.end()
    assert any(line["event"] == "version" and line["failed"] for line in watch.lines)
    assert a.client.get("/health").status_code == 200
    assert code == (0 if is_whole else 1)
    assert a.paused != is_whole
    if is_whole:
        holds(a, cold["A"])
    else:
        assert "two versions" in a.post("/resume").text
        serves(a, session, "B", version=3)
        holds(a, cold["B"])


def test_a_server_that_wants_a_key_is_refused_until_it_is_given(servers, session, watching):
    b = servers["B"]
    refused = watching(*engine(b))
    assert refused.end(None) == 1
    error = refused.error
    assert "401" in error
    assert "--api-key-env" in error
    watch = watching(*engine(b), "--api-key-env", "WW_TEST_KEY", WW_TEST_KEY=b.key)
    watch.await_("attached")
    assert watch.end() == 0


@contextlib.contextmanager
def restarted(server, *options):
    """Start a server that was stopped, in another shape; as it was again at the end."""
    before, server.options = server.options, options
    try:
        server.start()
        server.ready()
        yield
    finally:
        server.stop()
        server.options = before


def test_a_watcher_follows_through_restarts_and_ends_in_good_order(
    servers, cold, session, watching
):
    a = servers["A"]
    watch = watching(*engine(a), "--metrics-port", "0")
    watch.await_("attached")
    with sender_of(session, "B") as sender:
        sender.send(1)
        line = watch.await_("version", version=1)
        assert line["failed"] == {}
        assert set(line["engines"]) == {a.url}
        holds(a, cold["B"])
        assert a.version == "1"
        metrics = watch.await_("metrics")["message"]
        with urllib.request.urlopen(metrics) as answer:
            page = answer.read().decode()
        assert f'weightwire_watch_version{{engine="{a.url}"}} 1.0' in page
        assert f'weightwire_watch_in_service{{engine="{a.url}"}} 1.0' in page

        second = watching(*engine(a))
        assert second.end(None) == 1
        assert "is watched already" in second.error

        # An engine that left comes back: it is out until it has the newest version again.
        watch.lines.clear()
        a.call("/shutdown_weight_transfer_engine")
        watch.await_("attached")
        watch.await_("version", version=1)
        assert not a.paused

    # The server restarts, as one of two ranks, and so does the trainer.
    watch.lines.clear()
    a.stop()
    source = model("B")
    with (
        restarted(a, "--tensor-parallel-size", "2"),
        weightwire.open_sender("filesystem", session=session, source=source) as sender,
    ):
        watch.await_("attached")
        fresh = a.checksums(), a.generate(PROMPT)
        sender.send(1)
        watch.await_("version", version=1)
        assert not a.checksums().items() & fresh[0].items()
        assert a.generate(PROMPT)["weight_versions"][0]["version"] == "1"
        # The watcher restarts: nothing is done twice.
        assert watch.end() == 0
        third = watching(*engine(a))
        become(source, "A")
        sender.send(2)
        third.await_("version", version=2)
        assert a.version == "2"
        assert a.checksums() == fresh[0]
        assert a.generate(PROMPT)["token_ids"] == fresh[1]["token_ids"]
        assert third.end() == 0
        assert [line["version"] for line in third.lines if line["event"] == "version"] == [2]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--engine", "ftp://x"), "http://host:port"),
        (("--engine", "http://a", "--engine", "http://a"), "twice"),
        (("--engine", "http://a", "--mode", "stop"), "keep, wait, abort"),
        (("--engine", "http://a", "--backend", "nothing"), "nothing"),
        (("--engine", "http://a", "--api-key-env", "WW_NO_SUCH_KEY"), "not set"),
        (("--engine", "http://a", "--adapter", "mine"), "ID=FILE"),
        (("--engine", "http://a", "--adapter", "1=/no/such/file"), "can't be read"),
        (("--engine", "http://a", "--adapter", "0={empty}"), "init_info.adapter.id"),
    ],
)
def test_a_wrong_command_line_says_what_is_wrong(tmp_path, options, word):
    empty = tmp_path / "adapter_config.json"
    empty.write_text("{}")
    options = [option.replace("{empty}", str(empty)) for option in options]
    done = subprocess.run(
        [*COMMAND, "--session", f"file://{tmp_path / 'run'}", *options],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert word in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.soak
def test_the_example_runs(tmp_path):
    example = Path(__file__).parents[2] / "examples" / "rl_loop_http.py"
    done = subprocess.run(
        [sys.executable, str(example), "2"], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the server serves version 2" in done.stdout
