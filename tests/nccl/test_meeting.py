"""Where members meet: addresses, the port, and connections that can be hung up on."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from weightwire.errors import ConfigError, PeerLost
from weightwire_nccl.meeting import Client, Server, own_address

SERVE = """
import sys, threading
from weightwire_nccl.meeting import Server
server = Server("127.0.0.1")
print(server.port, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("host", "url", "address"),
    [
        (None, "file:///shared/run", "127.0.0.1"),
        (None, "tcp://127.0.0.1:29400/run", "127.0.0.1"),
        (None, "tcp://localhost:29400/run", "127.0.0.1"),
        ("127.0.0.1", "tcp://trainer0:29400/run", "127.0.0.1"),
    ],
)
def test_the_address_is_loopback_unless_the_session_leaves_the_host(host, url, address):
    assert own_address(host, url) == address


def test_a_host_that_cant_be_resolved_is_an_error():
    with pytest.raises(ConfigError, match="'host'"):
        own_address("no-such-host.invalid", "file:///x")


def test_the_port_is_on_one_interface_and_held():
    server = Server("127.0.0.1")
    try:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", server.port))
        with socket.socket() as other:
            other.bind(("127.0.0.2", server.port))  # another interface is free
        client = Client("127.0.0.1", server.port, "sender rank 0")
        client.connect(5)
        assert client.peek("key") is None
        client.put("key", b"\xff\x00")
        assert client.peek("key") == b"\xff\x00"
        assert client.first("once", "mine") == "mine"
        assert client.first("once", "theirs") == "mine"
        client.put("epoch/1/a", b"x")
        client.forget_all("epoch/1/")
        assert client.peek("epoch/1/a") is None
        assert client.peek("key") == b"\xff\x00"
        client.close()
    finally:
        server.close()


def test_a_broken_connection_is_an_error_of_ours_whatever_is_asked():
    server = Server("127.0.0.1")
    try:
        for ask in (
            lambda client: client.peek("key"),
            lambda client: client.put("key", b"x"),
            lambda client: client.forget("key"),
            lambda client: client.forget_all("epoch/"),
            lambda client: client.first("key", "x"),
        ):
            client = Client("127.0.0.1", server.port, "sender rank 0")
            client.connect(5)
            client.hang_up()
            with pytest.raises(PeerLost, match="sender rank 0 is gone"):
                ask(client)
    finally:
        server.close()


def test_nobody_there_is_an_error_at_once():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(PeerLost, match="sender rank 0"):
        Client("127.0.0.1", port, "sender rank 0").connect(30)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="finds its sockets in /proc")
def test_who_waits_for_a_stopped_server_can_be_freed():
    server = subprocess.Popen(
        [sys.executable, "-c", SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        client = Client("127.0.0.1", int(server.stdout.readline()), "sender rank 0")
        client.connect(5)
        other = Client("127.0.0.1", client._port, "sender rank 0")
        other.connect(5)
        os.kill(server.pid, signal.SIGSTOP)
        os.waitpid(server.pid, os.WUNTRACED)  # until then it may still answer
        errors: list[BaseException] = []

        def wait() -> None:
            try:
                client.peek("key")
            except PeerLost as error:
                errors.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        other.hang_up()
        thread.join(0.2)
        assert thread.is_alive(), "another's connection was ended"
        client.hang_up()
        thread.join(10)
        assert not thread.is_alive()
        assert len(errors) == 1
    finally:
        server.kill()
        server.communicate()
