"""The acme transports by themselves: shards, strangers, slow readers, and what they leave."""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import torch
from thirdparty_rig import HERE, load
from torch import Tensor

from weightwire import ConfigError, PeerLost, TransferError, TransferTimeout
from weightwire.contract import Context, Offer, Policy, Seal
from weightwire.deadline import Deadline, Watch
from weightwire.layout import slot_layout
from weightwire.table import Group, Region, Shard, TensorEntry, TensorTable


@pytest.fixture(scope="module")
def acme() -> ModuleType:
    return load(HERE / "weightwire-acme" / "weightwire_acme.py")


@pytest.fixture
def background() -> Iterator[Callable[..., Future[Any]]]:
    with ThreadPoolExecutor(8) as pool:
        yield pool.submit


class Bench:
    """Transports and what a test must close."""

    def __init__(self, acme: ModuleType) -> None:
        self.acme = acme
        self.backend = acme.weightwire_describe_backend()
        self.opened: list[Any] = []

    def context(self, watch: Watch | None = None, **values: Any) -> Context:
        if watch is None:
            watch = Watch()
        watch.start(Deadline(values.pop("seconds", 20)))
        fixed = {
            "config": self.acme.AcmeConfig(),
            "session_url": "file:///run",
            "session_id": "0",
            "session_dir": None,
            "rank": 0,
            "world_size": 1,
            "member_id": "sender",
            "incarnation": 1,
            "overlap": False,
            "watch": watch,
        }
        return Context(**{**fixed, **values})

    def sender(self, table: TensorTable, **values: Any) -> Any:
        transport = self.backend.open_sender(self.context(**values))
        self.opened.append(transport)
        transport.set_table(table)
        return transport

    def receiver(self, table: TensorTable, regions: Sequence[Region], **values: Any) -> Any:
        values = {"member_id": "replica-0", **values}
        transport = self.backend.open_receiver(self.context(**values))
        self.opened.append(transport)
        transport.set_plan(table, regions)
        return transport


@pytest.fixture
def bench(acme: ModuleType) -> Iterator[Bench]:
    bench = Bench(acme)
    yield bench
    for transport in bench.opened:
        transport.close()
        transport.close()


def offer(*senders: Any, version: int = 1, roster: tuple[str, ...] = ("replica-0",)) -> Offer:
    described = tuple(sender.describe() for sender in senders)
    return Offer(Policy(1, version), "0", roster, described, "off")


def serve(
    sender: Any, table: TensorTable, rank: int, offered: Offer, readers: Any, values: Any
) -> None:
    """What core does on a trainer rank."""
    sender.begin(offered, readers)
    for group in range(len(table.groups)):
        layout = slot_layout(table, group, rank)
        slot = sender.slot(group, layout.nbytes)
        staged = {i: place.view(slot) for i, place in layout.places.items()}
        for i, tensor in staged.items():
            tensor.copy_(values(i, layout.shards[i]))
        sender.put(group, staged, Seal({i: 7 * i for i in staged}))
    sender.finish()


def one_tensor(groups: int, nbytes: int) -> TensorTable:
    entries = tuple(
        TensorEntry(f"w{i}", (nbytes,), "uint8", (Shard(0, (0,), (nbytes,)),))
        for i in range(groups)
    )
    return TensorTable(1, entries, tuple(Group((i,)) for i in range(groups)))


def whole(table: TensorTable) -> list[Region]:
    return [Region.whole(i, entry) for i, entry in enumerate(table.tensors)]


def test_shards_of_several_owners_are_cut_into_the_regions_of_several_readers(
    bench: Bench, background: Callable[..., Future[Any]]
) -> None:
    """Columns on two owners, one tensor on one of them, rows and a scalar to two readers."""
    table = TensorTable(
        2,
        (
            TensorEntry(
                "w", (8, 6), "bfloat16", (Shard(0, (0, 0), (8, 2)), Shard(1, (0, 2), (8, 4)))
            ),
            TensorEntry("scale", (), "float64", (Shard(1, (), ()),)),
            TensorEntry("bias", (6,), "int16", (Shard(0, (0,), (6,)),)),
        ),
        (Group((0, 1)), Group((2,))),
    )
    values = [
        torch.arange(48).reshape(8, 6).to(torch.bfloat16),
        torch.tensor(-0.0, dtype=torch.float64),
        torch.arange(6, dtype=torch.int16),
    ]
    plans = [
        [Region(0, (0, 1), (5, 4)), Region(2, (1,), (3,))],
        [Region(0, (5, 0), (3, 6)), Region(1, (), ())],
    ]
    senders = [bench.sender(table, rank=rank, world_size=2) for rank in range(2)]
    receivers = [
        bench.receiver(table, plan, rank=rank, world_size=2) for rank, plan in enumerate(plans)
    ]
    offered = offer(*senders)
    readers = {"replica-0": [receiver.describe() for receiver in receivers]}

    def value(i: int, shard: Shard) -> Tensor:
        return values[i][
            tuple(slice(o, o + n) for o, n in zip(shard.offsets, shard.sizes, strict=True))
        ]

    serving = [
        background(serve, sender, table, rank, offered, readers, value)
        for rank, sender in enumerate(senders)
    ]

    def read(receiver: Any, plan: list[Region]) -> list[Tensor]:
        memory = [torch.full(r.sizes, 9, dtype=values[r.tensor].dtype) for r in plan]
        receiver.begin(offered)
        for group, members in enumerate(table.groups):
            mine = {p: memory[p] for p, r in enumerate(plan) if r.tensor in members.tensors}
            if mine:
                seals = receiver.fetch(group, mine)
                sealed = {i for seal in seals for i in seal.digests}
                assert {plan[p].tensor for p in mine} <= sealed
        receiver.finish()
        return memory

    reading = [background(read, *pair) for pair in zip(receivers, plans, strict=True)]
    for plan, arrived in zip(plans, reading, strict=True):
        for region, tensor in zip(plan, arrived.result(20), strict=True):
            expected = value(region.tensor, Shard(0, region.offsets, region.sizes)).contiguous()
            assert tensor.reshape(-1).view(torch.uint8).tolist() == (
                expected.reshape(-1).view(torch.uint8).tolist()
            )
    for served in serving:
        served.result(20)


class Stoppable(Watch):
    """Stops its thread after ``left`` looks, as SIGSTOP would, until it may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.left = -1
        self.stopped, self.go_on = threading.Event(), threading.Event()

    def check(self, *arguments: Any) -> None:
        self.left -= 1
        if self.left == 0:
            self.stopped.set()
            assert self.go_on.wait(20)
        super().check(*arguments)


def test_a_reader_that_was_stopped_notices_that_its_slot_was_filled_again(
    bench: Bench, background: Callable[..., Future[Any]]
) -> None:
    nbytes = 64 << 20  # more than sockets buffer: the stopped reader holds a part of it
    table = one_tensor(2, nbytes)
    sender = bench.sender(table)
    watch = Stoppable()
    slow = bench.receiver(table, whole(table), member_id="slow", watch=watch)
    quick = bench.receiver(table, whole(table), member_id="quick")
    offered = offer(sender, roster=("slow", "quick"))
    readers = {"slow": [slow.describe()], "quick": [quick.describe()]}

    def value(i: int, shard: Shard) -> Tensor:
        return torch.full(shard.sizes, i + 1, dtype=torch.uint8)

    def read(receiver: Any, memory: Tensor, groups: Sequence[int]) -> None:
        for group in groups:
            receiver.fetch(group, {group: memory})

    serving = background(serve, sender, table, 0, offered, readers, value)
    slow_memory, quick_memory = (torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2))
    slow_begins = background(slow.begin, offered)
    quick.begin(offered)
    slow_begins.result(20)
    watch.left = 12  # in the midst of the bytes: sockets buffer at most 6 MiB at a time
    slow_reads = background(read, slow, slow_memory, [0])
    assert watch.stopped.wait(20)
    read(quick, quick_memory, [0])
    assert not serving.done()
    sender.lose("slow")
    # Its slot holds the next group by the time it goes on.
    while sender._group != 1:
        assert not serving.done()
    watch.go_on.set()
    with pytest.raises(PeerLost, match=r"trainer rank 0 refilled a slot"):
        slow_reads.result(20)
    assert int(slow_memory.max()) == 0
    read(quick, quick_memory, [1])
    assert bool((quick_memory == 2).all())
    serving.result(20)


def talk_to(sender: Any) -> tuple[socket.socket, bytes]:
    host, port, _ = msgspec.msgpack.decode(sender.describe())
    connection = socket.create_connection((host, port), timeout=10)
    return connection, connection.recv(32, socket.MSG_WAITALL)


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def framed(message: object) -> bytes:
    payload = message if isinstance(message, bytes) else msgspec.msgpack.encode(message)
    return len(payload).to_bytes(8, "big") + payload


ME, POLICY = ("replica-0", 0), Policy(1, 1)
STRANGERS: dict[str, Callable[[bytes], bytes]] = {
    "wrong key": lambda c: framed((ME, POLICY, hmac.digest(b"?" * 32, c, "sha256"))),
    "no proof": lambda c: framed((ME, POLICY, b"")),
    "another shape": lambda c: framed({"name": "replica-0"}),
    "no msgpack": lambda c: framed(b"\xc1" * 100),
    "too long": lambda c: (1 << 60).to_bytes(8, "big"),
    "http": lambda c: b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


def test_strangers_get_nothing_and_disturb_nobody(
    bench: Bench, background: Callable[..., Future[Any]]
) -> None:
    table = one_tensor(1, 1000)
    sender = bench.sender(table)
    receiver = bench.receiver(table, whole(table))
    offered = offer(sender)
    readers = {"replica-0": [receiver.describe()]}

    def value(i: int, shard: Shard) -> Tensor:
        return torch.full(shard.sizes, 5, dtype=torch.uint8)

    serving = background(serve, sender, table, 0, offered, readers, value)
    for says in STRANGERS.values():
        connection, challenge = talk_to(sender)
        with connection:
            connection.sendall(says(challenge))
            assert is_closed(connection)
    silent, _ = talk_to(sender)
    memory = torch.zeros(1000, dtype=torch.uint8)
    receiver.begin(offered)
    receiver.fetch(0, {0: memory})
    receiver.finish()
    serving.result(20)
    assert bool((memory == 5).all())
    with silent:
        assert is_closed(silent)  # the version is over


def test_a_reader_with_the_key_cannot_ask_for_what_is_not_there(
    bench: Bench, background: Callable[..., Future[Any]]
) -> None:
    table = one_tensor(1, 1000)
    sender = bench.sender(table)
    *_, key = msgspec.msgpack.decode(sender.describe())
    readers = {"replica-0": [msgspec.msgpack.encode({0: [0]})]}
    serving = background(
        serve, sender, table, 0, offer(sender), readers, lambda i, s: torch.zeros(s.sizes)
    )
    for request in ("a", -1, [0]):
        connection, challenge = talk_to(sender)
        with connection:
            proof = hmac.digest(key, challenge, "sha256")
            connection.sendall(framed((ME, POLICY, proof)) + framed(request))
            connection.settimeout(0.3)
            # A group that the table doesn't have may never be answered.
            with contextlib.suppress(TimeoutError):
                assert is_closed(connection)
    sender.lose("replica-0")
    serving.result(20)


def test_a_reader_of_another_version_gets_nothing(
    bench: Bench, background: Callable[..., Future[Any]]
) -> None:
    """One that is late has the key, and asks for a version that is given up."""
    table = one_tensor(1, 8)
    sender = bench.sender(table)
    *_, key = msgspec.msgpack.decode(sender.describe())
    readers = {"replica-0": [msgspec.msgpack.encode({0: [0]})]}
    again = msgspec.structs.replace(offer(sender), policy=Policy(1, 1, 2))
    serving = background(serve, sender, table, 0, again, readers, lambda i, s: torch.zeros(s.sizes))
    connection, challenge = talk_to(sender)
    with connection:
        connection.sendall(framed((ME, POLICY, hmac.digest(key, challenge, "sha256"))))
        assert is_closed(connection)
    sender.lose("replica-0")
    serving.result(20)


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 1), ("127.0.0.1", 1 << 20), ("a b", 1)])
def test_an_owner_that_is_not_there_is_named(bench: Bench, host: str, port: int) -> None:
    table = one_tensor(1, 8)
    receiver = bench.receiver(table, whole(table))
    described = msgspec.msgpack.encode((host, port, b"?" * 32))
    with pytest.raises(PeerLost, match="trainer rank 0 is"):
        receiver.begin(Offer(Policy(1, 1), "0", ("replica-0",), (described,), "off"))


@pytest.mark.parametrize("described", [b"", b"\xc1", b"\x81\x00", msgspec.msgpack.encode([1, 2])])
def test_a_description_that_cannot_be_read_names_its_owner(bench: Bench, described: bytes) -> None:
    table = one_tensor(1, 8)
    receiver = bench.receiver(table, whole(table))
    with pytest.raises(TransferError, match=r"trainer rank 0 .*upgrade it"):
        receiver.begin(Offer(Policy(1, 1), "0", ("replica-0",), (described,), "off"))
    sender = bench.sender(table)
    with pytest.raises(TransferError, match=r"receiver 'replica-0' .*upgrade it"):
        sender.begin(offer(sender), {"replica-0": [described]})


def test_a_version_that_the_sender_gives_up_ends_the_read_at_once(
    bench: Bench, background: Callable[..., Future[Any]]
) -> None:
    table = one_tensor(1, 8)
    sender = bench.sender(table)
    receiver = bench.receiver(table, whole(table))
    offered = offer(sender)
    readers = {"replica-0": [receiver.describe()], "other": [receiver.describe()]}
    serving = background(
        serve, sender, table, 0, offered, readers, lambda i, s: torch.ones(s.sizes)
    )
    receiver.begin(offered)
    receiver.fetch(0, {0: torch.zeros(8, dtype=torch.uint8)})
    sender._context.watch.cancel("given up")
    with pytest.raises(TransferError, match="given up"):
        serving.result(20)
    reading = background(receiver.fetch, 0, {0: torch.zeros(8, dtype=torch.uint8)})
    sender.abort(RuntimeError())
    with pytest.raises(PeerLost, match=r"trainer rank 0 is lost"):
        reading.result(20)
    receiver.abort(RuntimeError())
    # Both are fit for the next attempt.
    sender._context.watch.start(Deadline(20))
    again = offer(sender, version=2)
    serving = background(
        serve,
        sender,
        table,
        0,
        again,
        {"replica-0": [receiver.describe()]},
        lambda i, s: torch.ones(s.sizes),
    )
    memory = torch.zeros(8, dtype=torch.uint8)
    receiver.begin(again)
    receiver.fetch(0, {0: memory})
    receiver.finish()
    serving.result(20)
    assert memory.tolist() == [1] * 8


def test_a_silent_peer_is_named_when_the_deadline_has_passed(bench: Bench) -> None:
    table = one_tensor(1, 8)
    sender = bench.sender(table, seconds=0.4)
    receiver = bench.receiver(table, whole(table), seconds=0.4)
    offered = offer(sender)
    with pytest.raises(TransferTimeout, match="from trainer rank 0 within"):
        receiver.begin(offered)  # nobody serves it yet
    sender.begin(offered, {"replica-0": [receiver.describe()]})
    sender.slot(0, 8)
    sender.put(0, {}, Seal({}))
    with pytest.raises(TransferTimeout, match="group 0 from receiver 'replica-0' rank 0 within"):
        sender.finish()


def test_an_address_that_is_not_ours_is_a_config_error(bench: Bench) -> None:
    for host in ("192.0.2.1", "0.0.0.0", ""):
        with pytest.raises(ConfigError, match=f"host='{host}'"):
            bench.sender(one_tensor(1, 8), config=bench.acme.AcmeConfig(host=host))


def test_it_listens_on_loopback_unless_told_otherwise(bench: Bench) -> None:
    host, *_ = msgspec.msgpack.decode(bench.sender(one_tensor(1, 8)).describe())
    assert host == "127.0.0.1"


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts descriptors in /proc")
def test_versions_leave_no_descriptor_behind(
    bench: Bench, background: Callable[..., Future[Any]]
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    table = one_tensor(3, 100)
    sender = bench.sender(table, overlap=True)
    receiver = bench.receiver(table, whole(table))
    counts = set()
    for version in range(1, 6):
        offered = offer(sender, version=version)
        readers = {"replica-0": [receiver.describe()]}
        serving = background(
            serve, sender, table, 0, offered, readers, lambda i, s: torch.ones(s.sizes)
        )
        receiver.begin(offered)
        for group in range(3):
            receiver.fetch(group, {group: torch.zeros(100, dtype=torch.uint8)})
        receiver.finish()
        serving.result(20)
        counts.add(len(os.listdir("/proc/self/fd")))
    assert len(counts) == 1
    sender.close()
    receiver.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_module_is_short() -> None:
    assert len((HERE / "weightwire-acme" / "weightwire_acme.py").read_text().splitlines()) < 300
