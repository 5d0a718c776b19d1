"""An engine's HTTP routes, over connections as servers treat them."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import socketserver
import threading
import time
from collections.abc import Iterator

import pytest

from weightwire.errors import (
    AuthenticationError,
    ConfigError,
    PeerLost,
    TransferError,
    TransferTimeout,
    UnsupportedOperation,
    WeightWireError,
)
from weightwire_vllm.outcome import MIXED, WHOLE, is_whole
from weightwire_vllm.pool.http import HttpEngine


class OneAnswer(socketserver.StreamRequestHandler):
    """Answers a request, and closes as the connection is used again: as after a failed call."""

    timeout = 20

    def handle(self):
        asked = b"".join(iter(self.rfile.readline, b"\r\n"))
        status = b"200 OK" if b"/start_weight_update" in asked else b"500 Internal Server Error"
        self.wfile.write(b"HTTP/1.1 " + status + b"\r\nContent-Length: 2\r\n\r\n{}")
        self.rfile.read(1)


def test_a_call_after_one_that_failed_has_a_connection_of_its_own():
    async def calls(port):
        engine = HttpEngine(f"http://127.0.0.1:{port}")
        try:
            with pytest.raises(TransferError, match="resume failed"):
                await engine.resume(10)
            await engine.start(10)
        finally:
            await engine.close()

    with serving(OneAnswer) as port:
        asyncio.run(calls(port))


@contextlib.contextmanager
def serving(handler: type[socketserver.BaseRequestHandler]) -> Iterator[int]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def answering(answer: bytes, then: bytes = b"") -> type[socketserver.BaseRequestHandler]:
    """Answers each request with these bytes, and then with others as long as somebody listens."""

    class Answering(socketserver.BaseRequestHandler):
        def handle(self):
            with contextlib.suppress(OSError):
                self.request.recv(1 << 16)
                self.request.sendall(answer)
                while then:
                    self.request.sendall(then)
                    time.sleep(0.01)

    return Answering


def reply(status: str, body: bytes, *head: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *head, "", ""]
    return "\r\n".join(lines).encode() + body


def paused(answer: bytes, then: bytes = b"", *, check: bool = False) -> None:
    async def call(port: int) -> None:
        engine = HttpEngine(f"http://127.0.0.1:{port}")
        try:
            await (engine.check(1.5) if check else engine.pause("keep", 1.5))
        finally:
            await engine.close()

    with serving(answering(answer, then)) as port:
        asyncio.run(call(port))


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (reply("307 Moved", b"", "Location: http://\x1b[2Jb/"), PeerLost, "can't be reached"),
        (reply("307 Moved", b"", "Location: /login"), TransferError, "redirects /pause to /login:"),
        (reply("302 Found", b"<html>"), TransferError, "redirects /pause to elsewhere:"),
        (reply("200 OK", b"<html>log in</html>"), TransferError, "with no JSON object: give the"),
        (reply("200 OK", b"[1]"), TransferError, "with no JSON object"),
        (reply("200 OK", b"[" * 100_000), TransferError, "with no JSON object"),
        (reply("200 OK", b"x", "Content-Encoding: gzip"), TransferError, "with no JSON object"),
        (
            reply("200 OK", gzip.compress(b" " * (64 << 20)), "Content-Encoding: gzip"),
            TransferError,
            "with no JSON object",
        ),
        (reply("200 OK", b" " * (1 << 20) + b"{}"), TransferError, "too many bytes"),
        (reply("401 No", b"{}"), AuthenticationError, "give its key"),
        (reply("404 Not Found", b"{}"), UnsupportedOperation, "VLLM_SERVER_DEV_MODE=1"),
        (reply("503 Busy", b"<html>"), PeerLost, r"isn't up \(503 to /pause\)"),
        (b"SSH-2.0-OpenSSH\r\n", PeerLost, "can't be reached"),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
            PeerLost,
            "can't be reached",
        ),
        (b"HTTP/1.1 200 OK\r\nX: " + b"a" * (1 << 20), PeerLost, "can't be reached"),
    ],
)
def test_whatever_answers_is_an_error_of_ours_and_never_a_pause(answer, kind, message):
    with pytest.raises(WeightWireError, match=message) as found:
        paused(answer)
    assert type(found.value) is kind
    assert str(found.value).startswith("http://127.0.0.1:")


@pytest.mark.parametrize(
    ("head", "then"),
    [
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
        (b"HTTP/1.1 200 OK\r\n", b"X: y\r\n"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    ],
)
def test_an_answer_that_never_ends_is_late(head, then):
    began = time.monotonic()
    with pytest.raises(TransferTimeout, match=r"didn't answer /pause within 1\.5 s"):
        paused(head, then)
    assert time.monotonic() - began < 20


def test_another_server_than_vllm_is_not_driven():
    with pytest.raises(UnsupportedOperation, match="is it a vLLM API server"):
        paused(reply("200 OK", b"{}"), check=True)


def test_a_servers_reason_is_bounded_printable_and_keeps_what_the_engine_holds():
    text = "\\u001b[2J" + "x" * 500_000 + "\\n" + WHOLE
    with pytest.raises(TransferError) as found:
        paused(reply("500 X", b'{"error": {"message": "%s"}}' % text.encode()))
    said = str(found.value)
    assert len(said) < 10_000
    assert "\x1b" not in said
    assert is_whole(said)
    assert not is_whole(f"{said}\n{MIXED}")


@pytest.mark.parametrize("key", ["", "secret\n", "sec\nret", " secret", "s\u00e9cret"])
def test_a_key_that_no_header_holds_is_refused_and_not_shown(key):
    with pytest.raises(ConfigError, match="API key is empty, or has") as found:
        HttpEngine("http://127.0.0.1:1", key)
    assert "cret" not in str(found.value)


@pytest.mark.parametrize(
    "url",
    ["http://", "ftp://a", "http://a:x", "http://[::1", "http://a:0", "http://a:99999",
     "http://xn--/", "http://\x1b[2J", "http://a?b", "http://a#b", "", "http://" + "a" * 70_000],
)  # fmt: skip
def test_what_is_no_url_of_an_engine_is_refused(url):
    with pytest.raises(ConfigError, match=r"^engine .*: write http://host:port$") as found:
        HttpEngine(url)
    assert len(str(found.value)) < 300


@pytest.mark.parametrize("url", ["http://u:secret@a", "http://u:secret@a:x", "ftp://u:secret@a"])
def test_a_password_in_a_url_is_not_shown(url):
    with pytest.raises(ConfigError) as found:
        HttpEngine(url)
    assert "secret" not in str(found.value)
