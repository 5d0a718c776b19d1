"""Metadata of those who aren't who they should be, or are no more: refused at set-up."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable, Iterator

import msgspec
import pytest
import torch
from process_rig import until

from weightwire.config import select
from weightwire.contract import Context, Offer, Policy, Seal
from weightwire.deadline import Deadline, Watch
from weightwire.errors import ConfigError, PeerLost, TransferError
from weightwire.grouping import make_groups
from weightwire.session import process
from weightwire.table import Region, Shard, TensorEntry, TensorTable
from weightwire_nixl.agent import Agent
from weightwire_nixl.discovery import frame, unframe
from weightwire_nixl.receiver import NixlReceiver
from weightwire_nixl.sender import NixlSender
from weightwire_nixl.wire import ReaderInfo, SenderInfo, decode, encode

ENTRY = TensorEntry("w", (64,), "float32", (Shard(0, (0,), (64,)),))
TABLE = TensorTable(1, (ENTRY,), make_groups([ENTRY], 1 << 20))
POLICY = Policy(1, 1, 1)

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

Open = Callable[..., tuple[NixlSender, NixlReceiver]]


def context(member: str, session: str, **options: object) -> Context:
    watch = Watch()
    watch.start(Deadline(20.0))
    return Context(
        config=select({"backend": "nixl", **options})[1], session_url="file:///nowhere",
        session_id=session, session_dir=None, rank=0, world_size=1, member_id=member,
        incarnation=1, overlap=False, watch=watch,
    )  # fmt: skip


@pytest.fixture
def opened() -> Iterator[Open]:
    """A sender and a receiver that have a table, each of its session."""
    found: list[NixlSender | NixlReceiver] = []

    def open_both(
        session: str = "s1", other: str = "s1", **options: object
    ) -> tuple[NixlSender, NixlReceiver]:
        sender_context = context("sender", session, **options)
        receiver_context = context("r0", other)
        sender = NixlSender(sender_context, sender_context.config)  # type: ignore[arg-type]
        found.append(sender)
        receiver = NixlReceiver(receiver_context, receiver_context.config)  # type: ignore[arg-type]
        found.append(receiver)
        sender.set_table(TABLE)
        receiver.set_plan(TABLE, [Region.whole(0, ENTRY)])
        return sender, receiver

    yield open_both
    for each in found:
        each.close()


def offer(*senders: bytes, policy: Policy = POLICY) -> Offer:
    return Offer(policy, TABLE.digest(), ("r0",), senders, "off")


def of_reader(carried: bytes, **changed: object) -> bytes:
    info = decode(unframe(carried, "r0"), ReaderInfo, "r0")
    return frame(encode(msgspec.structs.replace(info, **changed)))


def of_sender(carried: bytes, **changed: object) -> bytes:
    info = decode(unframe(carried, "sender"), SenderInfo, "sender")
    return frame(encode(msgspec.structs.replace(info, **changed)))


@pytest.fixture(scope="module")
def dead() -> dict[str, object]:
    """What a process with an agent said of itself before it ended."""
    done = subprocess.run(
        [sys.executable, "-c", DEAD], capture_output=True, text=True, timeout=60, check=True
    )
    name, metadata, identity = done.stdout.split()
    assert process.is_gone(identity)
    return {"agent": name, "metadata": bytes.fromhex(metadata), "process": identity}


def test_metadata_of_another_session_is_refused(opened: Open) -> None:
    sender, receiver = opened("s1", "s2")
    with pytest.raises(PeerLost, match=r"^sender rank 0 .* session 's1', this is 's2': restart it"):
        receiver.begin(offer(sender.describe()))
    with pytest.raises(PeerLost, match=r"^receiver 'r0' rank 0 .* 's2', this is 's1': restart it"):
        sender.begin(offer(sender.describe()), {"r0": [receiver.describe()]})


def test_metadata_of_a_dead_peer_is_refused(opened: Open, dead: dict[str, object]) -> None:
    sender, receiver = opened()
    with pytest.raises(PeerLost, match=r"^sender rank 0 is gone: restart it"):
        receiver.begin(offer(of_sender(sender.describe(), **dead)))
    with pytest.raises(PeerLost, match=r"^receiver 'r0' rank 0 is gone: restart it"):
        sender.begin(offer(sender.describe()), {"r0": [of_reader(receiver.describe(), **dead)]})


def test_metadata_of_a_peer_that_died_on_another_host_is_refused(
    opened: Open, dead: dict[str, object]
) -> None:
    """Nothing here knows of its process: NIXL finds nobody."""
    sender, receiver = opened()
    elsewhere = {**dead, "process": ""}
    remedy = r"can't be reached .*: it is gone, or no transport connects the two; restart it"
    with pytest.raises(PeerLost, match=rf"^sender rank 0 {remedy}"):
        receiver.begin(offer(of_sender(sender.describe(), **elsewhere)))
    with pytest.raises(PeerLost, match=rf"^receiver 'r0' rank 0 {remedy}"):
        sender.begin(
            offer(sender.describe()), {"r0": [of_reader(receiver.describe(), **elsewhere)]}
        )


def test_an_agent_under_anothers_name_is_refused(opened: Open) -> None:
    sender, receiver = opened()
    with pytest.raises(PeerLost, match=r"^sender rank 0 describes another NIXL agent"):
        receiver.begin(offer(of_sender(sender.describe(), agent="sender-0#0")))


def test_sides_that_were_refused_go_on(opened: Open, dead: dict[str, object]) -> None:
    sender, receiver = opened()
    with pytest.raises(PeerLost):
        receiver.begin(offer(of_sender(sender.describe(), **dead)))
    receiver.abort(PeerLost("refused"))
    with pytest.raises(ConfigError, match="'direction'"):
        sender.begin(
            offer(sender.describe()), {"r0": [of_reader(receiver.describe(), direction="push")]}
        )
    sender.abort(PeerLost("refused"))
    described = receiver.describe()
    sender.begin(offer(sender.describe()), {"r0": [described]})
    receiver.begin(offer(sender.describe()))
    assert sender.path.startswith("pull over CMA")
    assert receiver.path == sender.path


def test_an_agent_that_is_closed_says_so() -> None:
    agent = Agent("test")
    agent.close()
    agent.close()
    with pytest.raises(TransferError, match="this agent is closed"):
        agent.add("other", b"", "receiver 'r0' rank 0")


def read(receiver: NixlReceiver, landing: torch.Tensor) -> None:
    receiver.post(0, {0: landing})
    until(lambda: receiver._advance() or receiver._flights[0].parts[0].landed, "it is read", 20)


def test_a_group_whose_memory_changed_while_it_was_read_is_discarded(opened: Open) -> None:
    """The trainer gave the version up, and may change its tensors, before a late reader comes."""
    sender, receiver = opened(zero_copy=True)
    weights = torch.ones(64)
    for version, gives_up in ((1, False), (2, True), (3, False)):
        policy = Policy(1, version, 1)
        sender.begin(offer(sender.describe(), policy=policy), {"r0": [receiver.describe()]})
        assert sender.slot(0, weights.nbytes) is None
        sender.put(0, {0: weights}, Seal({}, 0))
        receiver.begin(offer(sender.describe(), policy=policy))
        landing = receiver.slot(0, weights.nbytes).view(torch.float32)
        if gives_up:
            until(lambda: receiver._poll() or len(receiver._backlog) > 0, "it is announced", 20)
            sender.abort(PeerLost("another one"))
            with pytest.raises(PeerLost, match=r"^sender rank 0 filled the slot of group 0 again"):
                read(receiver, landing)
            receiver.abort(PeerLost("discarded"))
            continue
        assert [seal.owner for seal in receiver.fetch(0, {0: landing})] == [0]
        assert torch.equal(landing, weights)
        sender.finish()
        receiver.finish()


def test_each_receiver_starts_at_another_owner() -> None:
    """Whichever replica it belongs to."""
    halves = tuple(Shard(rank, (32 * rank,), (32,)) for rank in (0, 1))
    entry = TensorEntry("w", (64,), "float32", halves)
    table = TensorTable(2, (entry,), make_groups([entry], 1 << 20))
    roster = ("r0", "r1")
    opened: list[NixlSender | NixlReceiver] = []
    try:
        senders, firsts = [], []
        for rank in (0, 1):
            where = dataclasses.replace(context("sender", "s1"), rank=rank, world_size=2)
            opened.append(NixlSender(where, where.config))  # type: ignore[arg-type]
            opened[-1].set_table(table)
            senders.append(opened[-1].describe())
        for name in roster:
            where = context(name, "s1")
            receiver = NixlReceiver(where, where.config)  # type: ignore[arg-type]
            opened.append(receiver)
            receiver.set_plan(table, [Region.whole(0, entry)])
            receiver.begin(Offer(POLICY, table.digest(), roster, tuple(senders), "off"))
            receiver.post(0, {0: receiver.slot(0, 256).view(torch.float32)})
            firsts.append([part.owner.rank for part in receiver._flights[0].parts])
        assert firsts == [[0, 1], [1, 0]]
    finally:
        for each in reversed(opened):
            each.close()
