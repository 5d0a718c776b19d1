"""Metadata of those who aren't who they should be, or are no more: refused at set-up."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest
import torch
from nixl_transports import Transports, landing, offer, stage, table_of
from process_rig import until

from weightwire.contract import Offer, decode_message
from weightwire.errors import ConfigError, PeerLost, TransferError
from weightwire.session import process
from weightwire_nixl import route
from weightwire_nixl.agent import Agent
from weightwire_nixl.discovery import frame, unframe
from weightwire_nixl.receiver import NixlReceiver
from weightwire_nixl.sender import NixlSender
from weightwire_nixl.wire import ReaderInfo, SenderInfo, encode

TABLE = table_of()
DEAD = """
import os, torch
from weightwire.session import process
from weightwire_nixl.agent import Agent
from weightwire_nixl.arena import Slots
agent = Agent("receiver-0")
Slots(agent, 1, 4096, torch.device("cpu"))
print(agent.name, agent.metadata().hex(), process.identity(), sep="\\n", flush=True)
os._exit(0)
"""


def changed(carried: bytes, kind: type[SenderInfo | ReaderInfo], **fields: object) -> bytes:
    """What a rank says of itself, with some of it replaced."""
    info = decode_message(unframe(carried, "a rank"), kind, "a rank")
    return frame(encode(msgspec.structs.replace(info, **fields)))


def push(sender: NixlSender, receiver: NixlReceiver, offered: Offer) -> None:
    """The only group, of a version that nobody gives up."""
    sender.begin(offered, {"r0": (receiver.describe(),)})
    receiver.begin(offered)
    receiver.post(0, {0: landing(receiver)})
    stage(sender, torch.arange(64.0))
    until(lambda: sender._poll() or receiver.landed(0), "it is written", 20)
    receiver.fetch(0, {0: landing(receiver)})
    sender.finish()


@pytest.fixture(scope="module")
def dead() -> dict[str, object]:
    """What a process with an agent said of itself before it ended."""
    done = subprocess.run(
        [sys.executable, "-c", DEAD], capture_output=True, text=True, timeout=60, check=True
    )
    name, metadata, identity = done.stdout.split()
    assert process.is_gone(identity)
    return {"agent": name, "metadata": bytes.fromhex(metadata), "process": identity}


def test_metadata_of_another_session_is_refused(transports: Transports) -> None:
    sender = transports.sender(TABLE, session="s1")
    receiver = transports.receiver(TABLE, session="s2")
    with pytest.raises(PeerLost, match=r"^sender rank 0 .* session 's1', this is 's2': restart it"):
        receiver.begin(offer(TABLE, sender.describe()))
    with pytest.raises(PeerLost, match=r"^receiver 'r0' rank 0 .* 's2', this is 's1': restart it"):
        sender.begin(offer(TABLE, sender.describe()), {"r0": [receiver.describe()]})


def test_metadata_of_a_dead_peer_is_refused(
    transports: Transports, dead: dict[str, object]
) -> None:
    sender, receiver = transports.sender(TABLE), transports.receiver(TABLE)
    with pytest.raises(PeerLost, match=r"^sender rank 0 is gone: restart it"):
        receiver.begin(offer(TABLE, changed(sender.describe(), SenderInfo, **dead)))
    reader = changed(receiver.describe(), ReaderInfo, **dead)
    with pytest.raises(PeerLost, match=r"^receiver 'r0' rank 0 is gone: restart it"):
        sender.begin(offer(TABLE, sender.describe()), {"r0": [reader]})


def test_metadata_of_a_peer_that_died_on_another_host_is_refused(
    transports: Transports, dead: dict[str, object]
) -> None:
    """Nothing here knows of its process: NIXL finds nobody."""
    sender, receiver = transports.sender(TABLE), transports.receiver(TABLE)
    elsewhere = {**dead, "process": ""}
    remedy = r"can't be reached .*: it is gone, or no transport connects the two; restart it"
    with pytest.raises(PeerLost, match=rf"^sender rank 0 {remedy}"):
        receiver.begin(offer(TABLE, changed(sender.describe(), SenderInfo, **elsewhere)))
    reader = changed(receiver.describe(), ReaderInfo, **elsewhere)
    with pytest.raises(PeerLost, match=rf"^receiver 'r0' rank 0 {remedy}"):
        sender.begin(offer(TABLE, sender.describe()), {"r0": [reader]})


def test_an_agent_under_anothers_name_is_refused(transports: Transports) -> None:
    sender, receiver = transports.sender(TABLE), transports.receiver(TABLE)
    described = changed(sender.describe(), SenderInfo, agent="sender-0#0")
    with pytest.raises(PeerLost, match=r"^sender rank 0 describes another NIXL agent"):
        receiver.begin(offer(TABLE, described))


def test_sides_that_refused_a_peer_go_on(transports: Transports, dead: dict[str, object]) -> None:
    sender, receiver = transports.sender(TABLE), transports.receiver(TABLE)
    with pytest.raises(PeerLost):
        receiver.begin(offer(TABLE, changed(sender.describe(), SenderInfo, **dead)))
    receiver.abort(PeerLost("refused"))
    reader = changed(receiver.describe(), ReaderInfo, direction="push")
    with pytest.raises(ConfigError, match="'direction'"):
        sender.begin(offer(TABLE, sender.describe()), {"r0": [reader]})
    sender.abort(PeerLost("refused"))
    sender.begin(offer(TABLE, sender.describe()), {"r0": [receiver.describe()]})
    receiver.begin(offer(TABLE, sender.describe()))
    assert sender.path.startswith("pull over CMA")
    assert receiver.path == f"{sender.path}; 2 threads copy"


def test_each_receiver_starts_at_another_owner(transports: Transports) -> None:
    """Whichever replica it belongs to."""
    table, roster = table_of(2), ("r0", "r1")
    senders = [transports.sender(table, rank).describe() for rank in (0, 1)]
    order = []
    for name in roster:
        receiver = transports.receiver(table, name)
        receiver.begin(offer(table, *senders, roster=roster))
        receiver.post(0, {0: landing(receiver)})
        order.append([part.owner.rank for part in receiver._flights[0].parts])
    assert order == [[0, 1], [1, 0]]


def test_an_agent_that_is_closed_says_so() -> None:
    agent = Agent("test")
    agent.close()
    agent.close()
    with pytest.raises(TransferError, match="this agent is closed"):
        agent.add("other", b"", "receiver 'r0' rank 0")


@pytest.mark.parametrize("path", ["NVLink or PCIe", "CMA", "RDMA", "one GPU"])
def test_only_what_travels_between_gpus_is_slowed_by_copies(
    transports: Transports, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(route, "path_between", lambda sender, reader: path)
    sender, receiver = transports.sender(TABLE), transports.receiver(TABLE)
    described = sender.describe()
    sender.begin(offer(TABLE, described), {"r0": [receiver.describe()]})
    receiver.begin(offer(TABLE, described))
    assert sender.slowed_by_copies is receiver.slowed_by_copies is (path == "NVLink or PCIe")


def test_memory_that_was_granted_to_who_began_another_version_is_free_once_that_closes(
    transports: Transports,
) -> None:
    table = table_of()
    sender = transports.sender(table, direction="push")
    receiver = transports.receiver(table, direction="push")
    first, second = (offer(table, sender.describe(), version=version) for version in (1, 2))
    push(sender, receiver, first)
    receiver.finish()
    receiver.begin(second)
    receiver.post(0, {0: landing(receiver)})
    receiver.abort(PeerLost("the trainer failed before its transport began"))
    assert len(receiver._aside) == 1
    sender.close()
    until(lambda: receiver._aside.sweep() or not len(receiver._aside), "it is free", 20)


@pytest.mark.parametrize("then", ["begins-the-next", "begins-it-late", "closes"])
def test_memory_that_was_granted_to_who_never_began_is_free_once_that_is_known(
    transports: Transports, then: str
) -> None:
    """A trainer that fails between ``started`` and its transport's begin has met nobody."""
    table = table_of()
    sender = transports.sender(table, direction="push")
    receiver = transports.receiver(table, direction="push")
    described = receiver.describe()
    first = offer(table, sender.describe())
    receiver.begin(first)
    receiver.post(0, {0: landing(receiver)})
    until(lambda: sender._poll() or sender._strangers._granted, "the grant has come", 20)
    if then == "closes":
        sender.close()  # and the receiver hears of it later
    receiver.abort(PeerLost("the trainer failed"))
    assert len(receiver._aside) == 1
    if then == "begins-it-late":
        until(lambda: sender._poll() or sender._strangers._answered, "it has heard", 20)
        message = r"^receiver 'r0' rank 0 gave version 1 .* before it began"
        with pytest.raises(PeerLost, match=message):
            sender.begin(first, {"r0": (described,)})
        sender.abort(PeerLost("as it said"))

    def is_free() -> bool:
        if then != "closes":
            sender._poll()
        receiver._aside.sweep()
        return not len(receiver._aside)

    until(is_free, "it is free", 20)
    if then == "closes":
        return
    second = offer(table, sender.describe(), version=2)
    push(sender, receiver, second)
    assert torch.equal(landing(receiver), torch.arange(64.0))
