"""Discovery by ModelExpress: the real client, against the server that is shipped for tests."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import pytest
import torch

import weightwire
from weightwire.config import select
from weightwire.contract import Context
from weightwire.deadline import Deadline, Watch
from weightwire.errors import (
    BackendUnavailable,
    ConfigError,
    PeerLost,
    TransferError,
    TransferTimeout,
)
from weightwire_nixl.discovery import ModelExpressDiscovery, SessionDiscovery, modelexpress
from weightwire_nixl.discovery.modelexpress import modelexpress as client_module
from weightwire_nixl.discovery.modelexpress_server import serving

PAYLOAD = b"metadata" * 100


@pytest.fixture(scope="module")
def port():
    with serving() as found:
        yield found


def context(session="s1", seconds=20.0):
    watch = Watch()
    watch.start(Deadline(seconds))
    return Context(
        config=select("nixl")[1], session_url="file:///nowhere", session_id=session,
        session_dir=None, rank=0, world_size=1, member_id="sender", incarnation=1,
        overlap=False, watch=watch,
    )  # fmt: skip


@pytest.fixture
def opened(port):
    """Opens a rank's discovery; all are closed."""
    found = []

    def open_one(session="s1", at=None, seconds=20.0):
        url = f"modelexpress://127.0.0.1:{at or port}"
        found.append(ModelExpressDiscovery(context(session, seconds), url))
        return found[-1]

    yield open_one
    for each in found:
        each.close()


def stored(port, carried):
    """A client, the worker as the server has it, and its identity."""
    client = client_module("client").MxClient(f"127.0.0.1:{port}")
    listed = client.list_sources()
    for instance in listed.instances:
        if instance.worker_id.encode() in carried:
            return client, client.get_metadata(instance.mx_source_id, instance.worker_id)
    raise AssertionError("the server doesn't list it")


def test_metadata_comes_back_as_it_was_put(opened):
    sender, receiver = opened(), opened()
    carried = sender.put("sender", "sender", 3, PAYLOAD)
    assert len(carried) < len(PAYLOAD)
    assert receiver.get("sender", "sender", 3, carried) == PAYLOAD
    assert sender.put("sender", "sender", 3, PAYLOAD) == carried  # published once


def test_only_ready_sources_are_listed_when_asked_for(opened, port):
    sender = opened("listed")
    first = sender.put("sender", "sender", 0, PAYLOAD)
    second = sender.put("sender", "sender", 0, PAYLOAD + b"more")
    messages = client_module("p2p_pb2")
    client, _ = stored(port, second)
    ready = client.list_sources(status_filter=messages.SOURCE_STATUS_READY)
    ready = [i.worker_id for i in ready.instances if i.model_name == "weightwire/listed"]
    client.close()
    assert len(ready) == 1
    assert ready[0].encode() in second
    # What was replaced is no longer served as if its owner were there.
    with pytest.raises(PeerLost, match="sender rank 0 is gone"):
        opened("listed").get("sender", "sender", 0, first)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-1], "truncated metadata"),
        (lambda data: bytes([data[0] ^ 1]) + data[1:], "corrupt metadata"),
        (lambda data: b"", "truncated metadata"),
    ],
)
def test_damaged_metadata_is_refused(opened, port, damage, message):
    carried = opened().put("receiver", "replica-0", 1, PAYLOAD)
    client, found = stored(port, carried)
    found.worker.nixl_metadata = damage(found.worker.nixl_metadata)
    client.publish_metadata(found.identity, found.worker, found.worker_id)
    client.close()
    with pytest.raises(TransferError, match=f"receiver 'replica-0' rank 1 has {message}"):
        opened().get("receiver", "replica-0", 1, carried)


def test_metadata_of_another_session_is_refused(opened):
    carried = opened("s1").put("sender", "sender", 0, PAYLOAD)
    with pytest.raises(PeerLost, match=r"metadata of session 's1' .* this is 's2'"):
        opened("s2").get("sender", "sender", 0, carried)


def test_metadata_of_another_rank_is_refused(opened):
    carried = opened().put("sender", "sender", 0, PAYLOAD)
    with pytest.raises(PeerLost, match=r"metadata of rank '0' .* this is '1'"):
        opened().get("sender", "sender", 1, carried)


def test_a_peer_that_closed_is_gone(opened):
    sender = opened()
    carried = sender.put("sender", "sender", 0, PAYLOAD)
    sender.close()
    with pytest.raises(PeerLost, match="sender rank 0 is gone"):
        opened().get("sender", "sender", 0, carried)


def test_a_peer_that_falls_silent_is_gone(opened, monkeypatch):
    monkeypatch.setattr(modelexpress, "HEARTBEAT_SECONDS", 3600.0)
    with serving(ttl=0.3) as port:
        sender, receiver = opened(at=port), opened(at=port)
        carried = sender.put("sender", "sender", 0, PAYLOAD)
        assert receiver.get("sender", "sender", 0, carried) == PAYLOAD

        def gone():
            try:
                receiver.get("sender", "sender", 0, carried)
            except PeerLost:
                return True
            return False

        context().watch.until(gone, "verdict")


def test_the_heartbeat_keeps_a_peer_alive(opened, monkeypatch):
    monkeypatch.setattr(modelexpress, "HEARTBEAT_SECONDS", 0.05)
    with serving(ttl=1000.0) as port:
        sender = opened(at=port)
        carried = sender.put("sender", "sender", 0, PAYLOAD)
        client, before = stored(port, carried)

        def heard():
            found = client.get_metadata(before.mx_source_id, before.worker_id)
            return found.worker.updated_at > before.worker.updated_at

        context().watch.until(heard, "heartbeat")
        client.close()
        threads = [t for t in threading.enumerate() if "heartbeat" in t.name]
        sender.close()
        assert threads
        assert not any(thread.is_alive() for thread in threads)


def test_a_server_that_forgot_everything_is_named(opened):
    with serving() as port:
        carried = opened(at=port).put("sender", "sender", 0, PAYLOAD)
    with serving() as port, pytest.raises(PeerLost, match=f"isn't known to .*:{port}: it was"):
        opened(at=port).get("sender", "sender", 0, carried)


def test_no_server_is_an_error_with_its_address(opened):
    with serving() as port:
        pass
    with pytest.raises(TransferError, match=f":{port} doesn't answer as it should .UNAVAILABLE"):
        opened(at=port).put("sender", "sender", 0, PAYLOAD)


def test_a_server_that_hangs_is_named_within_the_deadline(opened):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        with pytest.raises(TransferTimeout, match=f"no answer from the server at .*:{port}"):
            opened(at=port, seconds=0.5).put("sender", "sender", 0, PAYLOAD)


def test_sides_that_look_in_different_places_are_told(opened):
    by_server = opened().put("sender", "sender", 0, PAYLOAD)
    with pytest.raises(ConfigError, match=r"sender rank 0 .* same nixl option 'discovery'"):
        SessionDiscovery().get("sender", "sender", 0, by_server)
    by_session = SessionDiscovery().put("sender", "sender", 0, PAYLOAD)
    with pytest.raises(ConfigError, match=r"sender rank 0 .* same nixl option 'discovery'"):
        opened().get("sender", "sender", 0, by_session)


@pytest.mark.parametrize(
    "option", ["", "redis://x:1", "modelexpress://", "modelexpress://x", "modelexpress://x:y"]
)
def test_an_address_that_is_none_is_refused(option):
    with pytest.raises(ConfigError, match="discovery"):
        select({"backend": "nixl", "discovery": option})


def test_without_the_client_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "modelexpress.client", None)
    with pytest.raises(BackendUnavailable, match=r"pip install 'weightwire\[modelexpress\]'"):
        ModelExpressDiscovery(context(), "modelexpress://127.0.0.1:1")


def test_versions_travel_with_metadata_at_the_server(tmp_path):
    """A real server process, and a real transfer whose addresses came from there."""
    command = [str(Path(sys.executable).parent / "weightwire"), "modelexpress-serve"]
    with subprocess.Popen([*command, "--port", "0", "--json"], stdout=subprocess.PIPE) as server:
        try:
            url = json.loads(server.stdout.readline())["url"]
            choice = {"backend": "nixl", "discovery": url}
            session = (tmp_path / uuid.uuid4().hex).as_uri()
            source = {"weight": torch.arange(1000, dtype=torch.float32)}
            target = {"weight": torch.zeros(1000)}
            with (
                weightwire.open_sender(choice, session=session, source=source) as sender,
                weightwire.open_receiver(
                    choice, session=session, target=target, receiver_id="replica-0"
                ) as receiver,
            ):
                for version in (1, 2):
                    source["weight"] += 1
                    thread = threading.Thread(target=receiver.receive, args=(60,))
                    thread.start()
                    sender.send(version, timeout=60)
                    thread.join()
                    assert torch.equal(target["weight"], source["weight"])
                assert receiver.version == 2
        finally:
            server.terminate()


def test_serving_to_others_must_be_asked_for():
    command = [str(Path(sys.executable).parent / "weightwire"), "modelexpress-serve"]
    refused = subprocess.run(
        [*command, "--host", "0.0.0.0", "--port", "0"], capture_output=True, text=True, timeout=60
    )
    assert refused.returncode == 1
    assert "--unsafe-public" in refused.stderr
