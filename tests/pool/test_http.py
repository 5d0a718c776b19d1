"""An engine's HTTP routes, over connections as servers treat them."""

from __future__ import annotations

import asyncio
import socketserver
import threading

import pytest

from weightwire.errors import TransferError
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

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), OneAnswer) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.02,))
        serving.start()
        try:
            asyncio.run(calls(server.server_address[1]))
        finally:
            server.shutdown()
            serving.join()
