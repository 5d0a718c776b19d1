"""Weights over plain TCP sockets: a weightwire backend in one module.

Trainer ranks listen.  Every inference rank connects to the owners that it reads from,
shows that it has their key, and asks for one group after another::

    owner                                          reader
    a challenge                              >
                                             <     Hello: who it is, the challenge signed
                                             <     Request: what it wants of a group
    Part, once the group was put             >
    the bytes, and the generation again      >
    (0 if the slot was refilled meanwhile)   <     the generation: its credit

The key travels through the session: whoever can read that can read the weights.
The bytes themselves aren't encrypted.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import math
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import torch
from torch import Tensor

import weightwire
from weightwire.contract import Backend, BackendConfig, Capabilities, Context, Offer, Policy, Seal
from weightwire.contract import ReceiverTransport, SenderTransport
from weightwire.errors import BackendUnavailable, ConfigError, PeerLost, TransferError
from weightwire.layout import SlotLayout, slot_layout
from weightwire.table import Region, Shard, TensorTable

__all__ = ["AcmeBackend", "AcmeConfig"]

HELLO_SECONDS, POLL_SECONDS = 5.0, 0.1
HELLO_BYTES, MESSAGE_BYTES = 1 << 10, 64 << 20
LENGTH, WORD = struct.Struct("!I"), struct.Struct("!Q")
Secret = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
T = TypeVar("T")


class AcmeConfig(BackendConfig):
    """``host``: the address on which trainer ranks listen, and to which receivers connect."""

    host: str = "127.0.0.1"


class OwnerInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    host: Annotated[str, msgspec.Meta(max_length=64)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    key: Secret


class ReaderInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    token: Secret
    reads: dict[int, frozenset[int]]  # groups by owner


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    token: Secret
    proof: Secret


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    policy: Policy
    group: int
    regions: tuple[Region, ...]


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    generation: int  # 0: it isn't to be had any more
    seal: Seal


def decode(payload: bytes | bytearray, kind: type[T], who: str) -> T:
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise TransferError(
            f"{who} sent what can't be read ({error}): run one weightwire-acme on both sides"
        ) from error


def overlap(region: Region, shard: Shard) -> Region | None:
    """The part of a region that lies in a shard."""
    begin = tuple(map(max, region.offsets, shard.offsets))
    ends = zip(region.offsets, region.sizes, shard.offsets, shard.sizes, strict=True)
    sizes = tuple(min(a + m, b + n) - c for (a, m, b, n), c in zip(ends, begin, strict=True))
    return Region(region.tensor, begin, sizes) if all(size > 0 for size in sizes) else None


def cut(tensor: Tensor, region: Region, origin: Sequence[int]) -> Tensor:
    """A region of a tensor whose first element has the global index ``origin``."""
    for dim, first in enumerate(origin):
        tensor = tensor.narrow(dim, region.offsets[dim] - first, region.sizes[dim])
    return tensor


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


class Link:
    """A connection; ``wait`` calls an operation until it gets through."""

    def __init__(self, connection: socket.socket, wait: Callable[[Callable[[], int]], int]) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket, self.wait = connection, wait

    def send(self, view: bytes | memoryview) -> None:
        while view:
            view = view[self.wait(partial(self.socket.send, view)) :]

    def read(self, view: memoryview) -> None:
        while view:
            view = view[self.wait(partial(self._read_some, view)) :]

    def _read_some(self, view: memoryview) -> int:
        if count := self.socket.recv_into(view):
            return count
        raise ConnectionResetError(errno.ECONNRESET, "it hung up")

    def exactly(self, nbytes: int) -> bytearray:
        self.read(memoryview(buffer := bytearray(nbytes)))
        return buffer

    def send_word(self, word: int) -> None:
        self.send(WORD.pack(word))

    def read_word(self) -> int:
        return int(WORD.unpack(self.exactly(WORD.size))[0])

    def tell(self, message: msgspec.Struct) -> None:
        payload = msgspec.msgpack.encode(message)
        self.send(LENGTH.pack(len(payload)) + payload)

    def hear(self, kind: type[T], who: str, most: int = MESSAGE_BYTES) -> T:
        (length,) = LENGTH.unpack(self.exactly(LENGTH.size))
        if length > most:
            raise TransferError(f"{who} sent a message of {length} bytes, more than {most}")
        return decode(self.exactly(length), kind, who)


class Reader(NamedTuple):
    receiver_id: str
    rank: int
    groups: frozenset[int]


@dataclass(eq=False)
class Held:
    """A group in its slot, until everyone in ``waiting`` has credited it."""

    policy: Policy
    group: int
    generation: int
    layout: SlotLayout
    memory: Tensor
    seal: Seal
    waiting: dict[bytes, Reader]
    moved: bool = False


class AcmeSender(SenderTransport):
    """Stages groups in one slot, two with ``overlap``, and serves them from there."""

    def __init__(self, context: Context) -> None:
        assert isinstance(context.config, AcmeConfig)
        self._context = context
        self._key = secrets.token_bytes(32)
        self._changed = threading.Condition()  # of what follows, which several threads share
        self._readers: dict[bytes, Reader] = {}
        self._held: list[Held | None] = []
        self._policy = self._floor = Policy(0, 0)
        self._closed = False
        self._generation = 0
        host = context.config.host
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, 0), family=family, backlog=1024)
        except OSError as error:
            raise ConfigError(
                f"acme can't listen on host {host!r} ({error}): correct it"
            ) from error
        self._listener.settimeout(POLL_SECONDS)
        self._threads: list[threading.Thread] = []
        self._start(self._listen)

    def set_table(self, table: TensorTable) -> None:
        self._layouts = [
            slot_layout(table, group, self._context.rank) for group in range(len(table.groups))
        ]
        nbytes = max((layout.nbytes for layout in self._layouts), default=0)
        count = 2 if self._context.overlap else 1
        self._memory = [torch.empty(nbytes, dtype=torch.uint8) for _ in range(count)]
        self._held = [None] * count

    def describe(self) -> bytes:
        host, port = self._listener.getsockname()[:2]
        return msgspec.msgpack.encode(OwnerInfo(host, port, self._key))

    def begin(self, offer: Offer, readers: Mapping[str, Sequence[bytes]]) -> None:
        found = {}
        for receiver_id, ranks in readers.items():
            for rank, described in enumerate(ranks):
                info = decode(described, ReaderInfo, f"receiver {receiver_id!r} rank {rank}")
                groups = info.reads.get(self._context.rank, frozenset())
                found[info.token] = Reader(receiver_id, rank, groups)
        with self._changed:
            self._readers, self._policy, self._floor = found, offer.policy, offer.policy

    def slot(self, group: int, nbytes: int) -> Tensor:
        index = (self._generation + 1) % len(self._memory)
        self._settle(index)
        return self._memory[index]

    def put(self, group: int, tensors: Mapping[int, Tensor], seal: Seal) -> None:
        self._generation += 1
        index = self._generation % len(self._memory)
        layout, memory = self._layouts[group], self._memory[index]
        with self._changed:
            waiting = {t: reader for t, reader in self._readers.items() if group in reader.groups}
            held = Held(self._policy, group, self._generation, layout, memory, seal, waiting)
            self._held[index] = held
            self._changed.notify_all()

    def finish(self) -> None:
        for index in range(len(self._held)):
            self._settle(index)
        self._end()

    def lose(self, receiver_id: str) -> None:
        with self._changed:
            gone = [t for t, reader in self._readers.items() if reader.receiver_id == receiver_id]
            for token in gone:
                del self._readers[token]
                for held in filter(None, self._held):
                    held.waiting.pop(token, None)

    def abort(self, error: BaseException) -> None:
        self._end()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:  # the first one is the one that adds others
            thread.join()
        self._listener.close()

    def _settle(self, index: int) -> None:
        """Wait for the credits of what is in a slot, and take it out."""
        if (held := self._held[index]) is not None:
            self._context.watch.until(
                lambda: not held.waiting,
                f"credit for group {held.group}",
                lambda: [
                    f"receiver {r.receiver_id!r} rank {r.rank}" for r in [*held.waiting.values()]
                ],
            )
            held.moved, self._held[index] = True, None

    def _end(self) -> None:
        """Answer no request for this version any more."""
        with self._changed:
            for held in filter(None, self._held):
                held.moved = True
            self._held = [None] * len(self._held)
            self._floor = msgspec.structs.replace(self._policy, attempt=self._policy.attempt + 1)
            self._changed.notify_all()

    def _start(self, body: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=body, args=arguments, name="weightwire-acme", daemon=True)
        self._threads = [*(t for t in self._threads if t.is_alive()), thread]
        thread.start()

    def _listen(self) -> None:
        while not self._closed:
            with contextlib.suppress(OSError):  # nobody came, or left at once
                self._start(self._serve, self._listener.accept()[0])

    def _wait(self, seconds: float, operation: Callable[[], int]) -> int:
        end = time.monotonic() + seconds
        while not self._closed and time.monotonic() < end:
            with contextlib.suppress(TimeoutError):
                return operation()
        raise ConnectionAbortedError

    def _serve(self, connection: socket.socket) -> None:
        """One reader's connection; whatever is wrong with it ends this connection alone."""
        with connection, contextlib.suppress(OSError, TransferError):
            connection.settimeout(POLL_SECONDS)
            link = Link(connection, partial(self._wait, HELLO_SECONDS))
            link.send(challenge := secrets.token_bytes(32))
            hello = link.hear(Hello, "a stranger", HELLO_BYTES)
            if not hmac.compare_digest(hello.proof, hmac.digest(self._key, challenge, "sha256")):
                return
            link.wait = partial(self._wait, math.inf)
            while True:
                self._answer(link, hello.token, link.hear(Request, "a reader"))

    def _answer(self, link: Link, token: bytes, request: Request) -> None:
        def find() -> Held | None:
            wanted = (request.policy, request.group)
            return next((h for h in self._held if h and (h.policy, h.group) == wanted), None)

        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or request.policy < self._floor or find() is not None
            )
            held = find()
        if held is None:
            return link.tell(Part(0, Seal({})))
        pieces = [self._piece(held, region) for region in request.regions]
        link.tell(Part(held.generation, held.seal))
        for piece in pieces:
            link.send(piece)
        # Whoever fills a slot again says first that it moved: these bytes are whole or disowned.
        link.send_word(0 if held.moved else held.generation)
        if link.read_word() == held.generation:
            with self._changed:
                held.waiting.pop(token, None)
        return None

    def _piece(self, held: Held, region: Region) -> memoryview:
        shard = held.layout.shards.get(region.tensor)
        if shard is None or overlap(region, shard) != region:
            raise TransferError(f"a reader asked for {region}, which isn't this rank's")
        staged = held.layout.places[region.tensor].view(held.memory)
        return bytes_of(cut(staged, region, shard.offsets).contiguous())


class AcmeReceiver(ReceiverTransport):
    """Asks all owners of a group for it, then takes their answers one by one."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._token = secrets.token_bytes(32)
        self._links: dict[int, tuple[OwnerInfo, Link]] = {}

    def set_plan(self, table: TensorTable, regions: Sequence[Region]) -> None:
        self._table, self._regions = table, regions
        self._reads: dict[int, set[int]] = {}
        group_of = {i: g for g, members in enumerate(table.groups) for i in members.tensors}
        for region in regions:
            for shard in table.tensors[region.tensor].shards:
                if overlap(region, shard) is not None:
                    self._reads.setdefault(shard.owner, set()).add(group_of[region.tensor])

    def describe(self) -> bytes:
        reads = {owner: frozenset(groups) for owner, groups in self._reads.items()}
        return msgspec.msgpack.encode(ReaderInfo(self._token, reads))

    def begin(self, offer: Offer) -> None:
        self._policy = offer.policy
        for owner in self._reads:
            info = decode(offer.senders[owner], OwnerInfo, f"trainer rank {owner}")
            if owner in self._links and self._links[owner][0] != info:
                self._links.pop(owner)[1].socket.close()
            if owner not in self._links:
                self._links[owner] = info, self._connect(info, f"trainer rank {owner}")

    def fetch(self, group: int, regions: Mapping[int, Tensor]) -> Sequence[Seal]:
        owners = [owner for owner, groups in self._reads.items() if group in groups]
        parts = {owner: self._parts(owner, regions) for owner in owners}
        for owner in owners:
            wanted = tuple(region for region, _ in parts[owner])
            self._links[owner][1].tell(Request(self._policy, group, wanted))
        return [self._take(owner, group, parts[owner]) for owner in owners]

    def finish(self) -> None:
        """Every group was credited when it had been read."""

    def abort(self, error: BaseException) -> None:
        self.close()  # nobody knows where in the stream the next answer would begin

    def close(self) -> None:
        for _, link in self._links.values():
            link.socket.close()
        self._links = {}

    def _connect(self, info: OwnerInfo, owner: str) -> Link:
        connection = socket.socket(socket.AF_INET6 if ":" in info.host else socket.AF_INET)
        connection.setblocking(False)

        def connect() -> int:
            try:
                connection.connect((info.host, info.port))
            except OSError as error:
                if error.errno != errno.EISCONN:
                    raise
            return 1

        try:
            link = Link(connection, partial(self._wait, owner))
            link.wait(connect)
            proof = hmac.digest(info.key, link.exactly(32), "sha256")
            link.tell(Hello(self._token, proof))
        except BaseException:
            connection.close()
            raise
        return link

    def _wait(self, owner: str, operation: Callable[[], int]) -> int:
        def attempt() -> int:
            try:
                return operation()
            except BlockingIOError:
                return 0
            except OSError as error:
                raise PeerLost(
                    f"{owner} can't be reached ({error.strerror}): look whether it is alive, and "
                    "whether the sender's option 'host' is an address that leads to it"
                ) from error

        watch = self._context.watch
        watch.check("bytes", [owner])  # `until` looks at the deadline only when it has to wait
        return watch.until(attempt, "bytes", lambda: [owner])

    def _parts(self, owner: int, regions: Mapping[int, Tensor]) -> list[tuple[Region, Tensor]]:
        """What one owner has of the wanted regions, and where it goes."""
        parts = []
        for position, memory in regions.items():
            region = self._regions[position]
            for shard in self._table.tensors[region.tensor].shards:
                if shard.owner == owner and (part := overlap(region, shard)) is not None:
                    parts.append((part, cut(memory, part, region.offsets)))
        return parts

    def _take(self, owner: int, group: int, parts: Sequence[tuple[Region, Tensor]]) -> Seal:
        link, name = self._links[owner][1], f"trainer rank {owner}"
        answer = link.hear(Part, name)
        if answer.generation == 0:
            raise PeerLost(f"{name} gave up {self._policy}: its own error says why")
        for _, memory in parts:
            arrived = memory if memory.is_contiguous() else torch.empty_like(memory).contiguous()
            link.read(bytes_of(arrived))
            if arrived is not memory:
                memory.copy_(arrived)
        if link.read_word() != answer.generation:
            raise PeerLost(
                f"{name} filled the slot of group {group} again while it was read: this "
                "receiver was stopped for longer than its lease; receive the next version"
            )
        link.send_word(answer.generation)
        return answer.seal


class AcmeBackend(Backend):
    """Plain TCP sockets."""

    name = "acme"
    summary = "plain TCP sockets; authenticated, not encrypted"
    config = AcmeConfig
    capabilities = Capabilities(
        flow="pull",
        default_wait="applied",
        needs_live_receivers=True,
        serves_finished=False,
        ranged_reads=True,
        lands_in_place=True,
        elastic=True,
    )

    def probe(self) -> None:
        try:
            socket.create_server(("127.0.0.1", 0)).close()
        except OSError as error:
            raise BackendUnavailable(f"no TCP socket can be opened here ({error})") from error

    def open_sender(self, context: Context) -> AcmeSender:
        return AcmeSender(context)

    def open_receiver(self, context: Context) -> AcmeReceiver:
        return AcmeReceiver(context)


@weightwire.hookimpl
def weightwire_describe_backend() -> AcmeBackend:
    return AcmeBackend()
