"""``weightwire watch``: what it refuses.  It follows a server in ``test_server``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from server_rig import Server, checkpoint
from watch_rig import COMMAND, Watch


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
