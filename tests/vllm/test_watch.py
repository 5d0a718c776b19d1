"""``weightwire watch`` beside a real server, through restarts and endings."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest
from server_rig import Server, checkpoint, model

import weightwire

COMMAND = [str(Path(sys.executable).with_name("weightwire")), "watch"]


class Watch:
    """A watcher in a process, and the JSON lines that it has said."""

    def __init__(self, *options: str) -> None:
        self.lines: list[dict] = []
        self._process = subprocess.Popen(
            [*COMMAND, "--json", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ},
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        for line in self._process.stdout:
            self.lines.append(json.loads(line))

    def await_(self, event: str, seconds: float = 90, **fields) -> dict:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for line in list(self.lines):
                if line["event"] == event and fields.items() <= line.items():
                    return line
            assert self._process.poll() is None, self._process.stderr.read()
            time.sleep(0.05)
        raise AssertionError(f"no {event} {fields} in {self.lines}")

    def end(self, number: int | None = signal.SIGTERM) -> int:
        if number is not None:
            self._process.send_signal(number)
        code = self._process.wait(timeout=60)
        self._reader.join(timeout=10)
        return code

    @property
    def error(self) -> str:
        return self._process.stderr.read()

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()
        self._reader.join(timeout=10)
        self._process.stdout.close()
        self._process.stderr.close()


def test_a_watcher_follows_through_restarts_and_ends_in_good_order(tmp_path):
    server = Server(checkpoint("A", tmp_path), tmp_path / "log")
    session = f"file://{tmp_path / 'run'}"
    options = ("--session", session, "--engine", f"r={server.url}", "--timeout", "40")
    with contextlib.ExitStack() as stack:
        stack.callback(server.client.close)
        stack.callback(server.stop)
        server.start()
        watch = Watch(*options, "--metrics-port", "0")
        stack.callback(watch.close)
        watch.await_("waiting")  # the server isn't up yet
        server.ready()
        watch.await_("attached")
        cold = server.generate([5, 6, 7])
        sender = weightwire.open_sender("filesystem", session=session, source=model("B"))
        stack.callback(sender.close)
        sender.send(1)
        line = watch.await_("version", version=1)
        assert line["failed"] == {}
        assert set(line["engines"]) == {server.url}
        warm = server.generate([5, 6, 7])
        assert server.version == "1"
        assert warm["token_ids"] != cold["token_ids"]
        metrics = watch.await_("metrics")["message"]
        with urllib.request.urlopen(metrics) as answer:
            page = answer.read().decode()
        assert f'weightwire_watch_version{{engine="{server.url}"}} 1.0' in page
        assert f'weightwire_watch_in_service{{engine="{server.url}"}} 1.0' in page

        second = Watch(*options)
        stack.callback(second.close)
        assert second.end(None) == 1
        assert "is watched already" in second.error

        # The trainer restarts, and the server: it comes back with the checkpoint's weights.
        sender.close()
        server.stop()
        watch.lines.clear()
        server.start()
        server.ready()
        watch.await_("attached")
        sender = weightwire.open_sender(
            "filesystem", session=session, source=model("B"), resume_from=1
        )
        stack.callback(sender.close)
        watch.await_("version", version=1)
        assert server.generate([5, 6, 7])["token_ids"] == warm["token_ids"]
        assert not server.paused
        # The watcher restarts: nothing is done twice.
        assert watch.end() == 0
        watch.lines.clear()
        third = Watch(*options)
        stack.callback(third.close)
        sender.send(2)
        third.await_("version", version=2)
        assert server.version == "2"
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
    ],
)
def test_a_wrong_command_line_says_what_is_wrong(tmp_path, options, word):
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
def test_a_server_without_its_routes_is_refused_with_the_remedy(tmp_path):
    server = Server(checkpoint("A", tmp_path), tmp_path / "log", dev=False)
    try:
        server.start()
        server.ready()
        watch = Watch("--session", f"file://{tmp_path / 'run'}", "--engine", server.url)
        assert watch.end(None) == 1
        assert "VLLM_SERVER_DEV_MODE=1" in watch.error
        watch.close()
    finally:
        server.client.close()
        server.stop()


@pytest.mark.soak
def test_the_example_runs(tmp_path):
    example = Path(__file__).parents[2] / "examples" / "rl_loop_http.py"
    done = subprocess.run(
        [sys.executable, str(example), "2"], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the server serves version 2" in done.stdout
