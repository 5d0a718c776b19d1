"""Weights over plain TCP sockets: a weightwire backend in one module.

Trainer ranks listen.  For each version an inference rank connects to the owners that it
reads from, signs their challenge, and asks for one group after another::

    owner                                          reader
    a challenge                              >
                                             <     who it is, which version, the signature
                                             <     a group
    once that is put: seal, bytes            >
    whether the slot still holds it          >
                                             <     the group: its credit

The key travels through the session: who can read that can read the weights.  The bytes
aren't encrypted.  There is no thread: an owner answers while it waits for credits.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

import msgspec
import torch
from torch import Tensor

from weightwire import ConfigError, PeerLost, TransferError, contract, hookimpl
from weightwire.cuts import Cuts
from weightwire.layout import slot_layout
from weightwire.table import Region, Shard, TensorTable

__all__ = ["AcmeBackend", "AcmeConfig"]

T = TypeVar("T")
Steps: TypeAlias = Generator[bool, None, T]  # yields whether bytes have moved
Talks: TypeAlias = dict[Any, Steps[None]]
Reader: TypeAlias = tuple[str, int]  # receiver id, rank
Missing: TypeAlias = Callable[[], list[str]]
Reads: TypeAlias = dict[int, set[int]]  # by owner, the groups to read from it
CHALLENGE_BYTES, HELLO_BYTES, MESSAGE_BYTES = 32, 1 << 10, 64 << 20


class AcmeConfig(contract.BackendConfig):
    host: str = "127.0.0.1"  # trainer ranks listen there, and receivers connect to it


class AcmeBackend(contract.Backend):
    name = "acme"
    summary = "plain TCP sockets; authenticated, not encrypted"
    config = AcmeConfig
    capabilities = contract.Capabilities(
        flow="pull",
        default_wait="applied",
        needs_live_receivers=True,
        serves_finished=False,
        ranged_reads=False,
        lands_in_place=True,
        elastic=True,
    )

    def open_sender(self, context: contract.Context) -> AcmeSender:
        return AcmeSender(context)

    def open_receiver(self, context: contract.Context) -> AcmeReceiver:
        return AcmeReceiver(context)


@hookimpl
def weightwire_describe_backend() -> AcmeBackend:
    return AcmeBackend()


def decode(payload: bytes | bytearray, kind: type[T], who: str) -> T:
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise TransferError(f"{who} has another weightwire-acme ({error}): upgrade it") from error


def overlap(box: Region | Shard, other: Region | Shard) -> tuple[slice, ...]:
    """What lies in ``other`` too, as an index into ``box``; a slice is empty if nothing does."""
    sides = zip(box.offsets, box.sizes, other.offsets, other.sizes, strict=True)
    return tuple(slice(max(0, b - a), max(0, min(m, b + n - a))) for a, m, b, n in sides)


class Link:
    """A connection; its methods are generators that yield where they would block."""

    def __init__(self, connection: socket.socket, who: str) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection, self.who = connection, who
        self.send = partial(self.move, connection.send)
        self.read = partial(self.move, connection.recv_into)

    def move(self, operation: Callable[[memoryview], int], data: Any) -> Steps[None]:
        view = memoryview(data)
        while view:
            try:
                if not (count := operation(view)):
                    raise ConnectionResetError("it hung up")
            except BlockingIOError:
                yield False
            except OSError as error:
                raise PeerLost(f"{self.who} is lost ({error}): its own error says why") from error
            else:
                view = view[count:]
                yield True

    def tell(self, message: object) -> Steps[None]:
        payload = msgspec.msgpack.encode(message)
        return self.send(len(payload).to_bytes(8, "big") + payload)

    def hear(self, kind: type[T], most: int = MESSAGE_BYTES) -> Steps[T]:
        yield from self.read(length := bytearray(8))
        if (nbytes := int.from_bytes(length, "big")) > most:
            raise TransferError(f"{self.who} sends a message of {nbytes} bytes: too many")
        yield from self.read(payload := bytearray(nbytes))
        return decode(payload, kind, self.who)


def talk(context: contract.Context, talks: Talks, what: str, missing: Missing) -> None:
    """Go on with all conversations until nobody is missing."""

    def go_on() -> bool:
        steps = {key: next(conversation, None) for key, conversation in list(talks.items())}
        for key in [key for key, moved in steps.items() if moved is None]:
            del talks[key]  # it has ended
        return any(steps.values()) or not missing()

    while who := missing():
        context.watch.check(what, who)  # `until` doesn't look at the deadline while bytes move
        context.watch.until(go_on, what, missing)


class AcmeSender(contract.SenderTransport):
    """Stages groups in one slot, and serves them from there."""

    def __init__(self, context: contract.Context) -> None:
        assert isinstance(context.config, AcmeConfig)
        self._context = context
        self._secret = secrets.token_bytes(32)
        self._talks: Talks = {}
        self._reads: dict[Reader, set[int]] = {}
        self._group: int | None = None  # it is in the slot
        host = context.config.host
        if host in ("", "0.0.0.0"):
            raise ConfigError(f"acme option host={host!r}: give the address that receivers reach")
        try:
            self._listener = socket.create_server((host, 0), backlog=1024)
        except OSError as error:
            raise ConfigError(f"acme option host={host!r} can't be used ({error})") from error
        self._listener.setblocking(False)

    def set_table(self, table: TensorTable) -> None:
        sizes = [slot_layout(table, g, self._context.rank).nbytes for g in range(len(table.groups))]
        self._memory = torch.empty(max(sizes, default=0), dtype=torch.uint8)

    def describe(self) -> bytes:
        return msgspec.msgpack.encode((*self._listener.getsockname(), self._secret))

    def begin(self, offer: contract.Offer, readers: Mapping[str, Sequence[bytes]]) -> None:
        self._policy, self._reads = offer.policy, {}
        for name, ranks in readers.items():
            for rank, described in enumerate(ranks):
                reads = decode(described, Reads, f"receiver {name!r}")
                self._reads[name, rank] = reads.get(self._context.rank, set())
        self._talks[self._listener] = self._accept()

    def slot(self, group: int, nbytes: int) -> Tensor:
        self._settle()
        self._slot = self._memory[:nbytes]
        return self._slot

    def put(self, group: int, tensors: Mapping[int, Tensor], seal: contract.Seal) -> None:
        self._group, self._seal = group, seal  # the tensors lie in the slot
        self._waiting = {reader for reader, groups in self._reads.items() if group in groups}

    def finish(self) -> None:
        self._settle()
        self.abort()

    def lose(self, receiver_id: str) -> None:
        self._reads = {r: groups for r, groups in self._reads.items() if r[0] != receiver_id}

    def abort(self, error: BaseException | None = None) -> None:
        self._group = None
        while self._talks:
            self._talks.popitem()[1].close()

    def close(self) -> None:
        self.abort()
        self._listener.close()

    def _settle(self) -> None:
        if self._group is not None:  # answer readers until all have credited it
            talk(self._context, self._talks, f"credit for group {self._group}", self._missing)
            self._group = None

    def _missing(self) -> list[str]:
        return [f"receiver {r[0]!r} rank {r[1]}" for r in self._waiting & self._reads.keys()]

    def _accept(self) -> Steps[None]:
        while True:
            with contextlib.suppress(OSError):  # nobody is there
                connection, _ = self._listener.accept()
                self._talks[connection] = self._serve(connection)
                next(self._talks[connection], None)
            yield False

    def _serve(self, connection: socket.socket) -> Steps[None]:
        """One reader's conversation; what is wrong with it ends it, and nothing else."""
        with connection, contextlib.suppress(OSError, TransferError):
            link = Link(connection, "a reader")
            yield from link.send(challenge := secrets.token_bytes(CHALLENGE_BYTES))
            hello = yield from link.hear(tuple[Reader, contract.Policy, bytes], HELLO_BYTES)
            reader, policy, proof = hello
            signed = hmac.digest(self._secret, challenge, "sha256")
            if policy != self._policy or not hmac.compare_digest(proof, signed):
                return
            while True:
                group = yield from link.hear(int)
                while self._group != group:
                    yield False
                yield from link.tell(self._seal)
                yield from link.send(self._slot.numpy().data)
                # It leaves the slot before that is filled: these bytes are whole, or disowned.
                yield from link.tell(self._group == group)
                if (yield from link.hear(int)) == self._group:
                    self._waiting.discard(reader)


class AcmeReceiver(contract.ReceiverTransport):
    """Asks all owners of a group for it, and takes their answers as they come."""

    def __init__(self, context: contract.Context) -> None:
        self._context = context
        self._links: dict[int, Link] = {}

    def set_plan(self, table: TensorTable, regions: Sequence[Region]) -> None:
        self._table, self._regions, cuts = table, regions, Cuts(table)
        self._reads: Reads = {}
        for region in regions:
            for shard in table.tensors[region.tensor].shards:
                if all(side.start < side.stop for side in overlap(region, shard)):
                    self._reads.setdefault(shard.owner, set()).add(cuts.group_of(region))

    def describe(self) -> bytes:
        return msgspec.msgpack.encode(self._reads)

    def begin(self, offer: contract.Offer) -> None:
        self._with({owner: self._greet(owner, offer) for owner in self._reads}, "connection")

    def fetch(self, group: int, regions: Mapping[int, Tensor]) -> Sequence[contract.Seal]:
        self._seals: list[contract.Seal] = []
        owners = [owner for owner, groups in self._reads.items() if group in groups]
        self._with({o: self._take(o, group, regions) for o in owners}, f"group {group}")
        return self._seals

    def abort(self, error: BaseException | None = None) -> None:
        while self._links:
            self._links.popitem()[1].connection.close()

    finish = close = abort  # a version has its own connections

    def _with(self, talks: Talks, what: str) -> None:
        talk(self._context, talks, what, lambda: [f"trainer rank {o}" for o in talks])

    def _greet(self, owner: int, offer: contract.Offer) -> Steps[None]:
        link = self._links[owner] = Link(socket.socket(), f"trainer rank {owner}")
        host, port, secret = decode(offer.senders[owner], tuple[str, int, bytes], link.who)
        try:
            link.connection.connect_ex((host, port))  # a refusal shows in the first read
        except (OSError, OverflowError) as error:
            raise PeerLost(f"{link.who} is at {host!r}, {port} ({error}): correct it") from error
        yield from link.read(challenge := bytearray(CHALLENGE_BYTES))
        proof = hmac.digest(secret, challenge, "sha256")
        yield from link.tell(((self._context.member_id, self._context.rank), offer.policy, proof))

    def _take(self, owner: int, group: int, regions: Mapping[int, Tensor]) -> Steps[None]:
        link, layout = self._links[owner], slot_layout(self._table, group, owner)
        slot = torch.empty(layout.nbytes, dtype=torch.uint8)
        yield from link.tell(group)
        seal = yield from link.hear(contract.Seal)
        yield from link.read(slot.numpy().data)
        if not (yield from link.hear(bool)):
            raise PeerLost(f"{link.who} refilled a slot under this late reader: receive a new one")
        for position, memory in regions.items():
            region = self._regions[position]
            if shard := layout.shards.get(region.tensor):
                staged = layout.places[region.tensor].view(slot)[overlap(shard, region)]
                memory.detach()[overlap(region, shard)].copy_(staged)
        yield from link.tell(group)
        self._seals.append(seal)
