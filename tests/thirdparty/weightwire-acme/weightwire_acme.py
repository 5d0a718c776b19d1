"""Weights over plain TCP sockets: a weightwire backend in one module.

Trainer ranks listen.  For each version an inference rank connects to the owners that it
reads from, signs their challenge, and asks for one group after another::

    owner                                          reader
    a challenge                              >
                                             <     who it is, the challenge signed
                                             <     policy and group
    once the group is put: generation, seal  >
    the bytes of its slot                    >
    the generation, 0 if the slot has moved  >
                                             <     the generation: its credit

The key travels through the session: who can read that can read the weights.  The bytes
aren't encrypted.  There is no thread: an owner answers while it waits for credits.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import msgspec
import torch
from torch import Tensor

from weightwire import ConfigError, PeerLost, TransferError, contract, hookimpl
from weightwire.cuts import Cuts
from weightwire.deadline import Watch
from weightwire.layout import slot_layout
from weightwire.table import Region, Shard, TensorTable

__all__ = ["AcmeBackend", "AcmeConfig"]

T = TypeVar("T")
Steps: TypeAlias = Generator[bool, None, T]  # yields whether bytes have moved
Talks: TypeAlias = dict[Any, Steps[None]]
Reader: TypeAlias = tuple[str, int]  # receiver id, rank
CHALLENGE_BYTES, HELLO_BYTES, MESSAGE_BYTES = 32, 1 << 10, 64 << 20


class AcmeConfig(contract.BackendConfig):
    """``host``: the address on which trainer ranks listen, and to which receivers connect."""

    host: str = "127.0.0.1"


class AcmeBackend(contract.Backend):
    """Plain TCP sockets."""

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


def overlap(region: Region, shard: Shard) -> list[range]:
    """Their common indices by dimension; a range is empty where they have none."""
    sides = zip(region.offsets, region.sizes, shard.offsets, shard.sizes, strict=True)
    return [range(max(a, b), min(a + m, b + n)) for a, m, b, n in sides]


def cut(tensor: Tensor, box: Sequence[range], origin: Sequence[int]) -> Tensor:
    """A box of a tensor whose first element has the global index ``origin``."""
    return tensor[tuple(slice(r.start - o, r.stop - o) for r, o in zip(box, origin, strict=True))]


class Link:
    """A connection; its methods are generators that yield where they would block."""

    def __init__(self, connection: socket.socket, who: str) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection, self.who = connection, who

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

    def send(self, data: bytes | memoryview) -> Steps[None]:
        return self.move(self.connection.send, data)

    def read(self, data: bytearray | memoryview) -> Steps[None]:
        return self.move(self.connection.recv_into, data)

    def tell(self, message: object) -> Steps[None]:
        payload = msgspec.msgpack.encode(message)
        return self.send(len(payload).to_bytes(8, "big") + payload)

    def hear(self, kind: type[T], most: int = MESSAGE_BYTES) -> Steps[T]:
        yield from self.read(length := bytearray(8))
        if (nbytes := int.from_bytes(length, "big")) > most:
            raise TransferError(f"{self.who} sends a message of {nbytes} bytes: too many")
        yield from self.read(payload := bytearray(nbytes))
        return decode(payload, kind, self.who)


def talk(watch: Watch, talks: Talks, what: str, missing: Callable[[], list[str]]) -> None:
    """Go on with all conversations until nobody is missing."""

    def go_on() -> bool:
        moved = False
        for key, conversation in list(talks.items()):
            if (step := next(conversation, None)) is None:
                del talks[key]
            moved = moved or bool(step)
        return moved or not missing()

    while who := missing():
        watch.check(what, who)  # `until` doesn't look at the deadline while bytes move
        watch.until(go_on, what, missing)


@dataclass(eq=False)
class Held:
    """A group in its slot, until all readers in ``waiting`` have credited it."""

    key: tuple[contract.Policy, int]
    generation: int
    memory: memoryview
    seal: contract.Seal
    waiting: set[Reader]


class AcmeSender(contract.SenderTransport):
    """Stages groups in one slot, two with ``overlap``, and serves them from there."""

    def __init__(self, context: contract.Context) -> None:
        assert isinstance(context.config, AcmeConfig)
        self._context = context
        self._secret = secrets.token_bytes(32)
        self._talks: Talks = {}
        self._reads: dict[Reader, dict[int, set[int]]] = {}
        self._lost: set[Reader] = set()
        self._held: list[Held | None] = []
        self._generation = 0
        host = context.config.host
        if host in ("", "0.0.0.0"):
            raise ConfigError(f"acme option host={host!r}: give the address that receivers reach")
        try:
            self._listener = socket.create_server((host, 0), backlog=1024)
        except OSError as error:
            raise ConfigError(f"acme option host={host!r} can't be used ({error})") from error
        self._listener.setblocking(False)

    def set_table(self, table: TensorTable) -> None:
        layouts = [slot_layout(table, g, self._context.rank) for g in range(len(table.groups))]
        nbytes = max((layout.nbytes for layout in layouts), default=0)
        self._held = [None] * (2 if self._context.overlap else 1)
        self._slots = [torch.empty(nbytes, dtype=torch.uint8) for _ in self._held]

    def describe(self) -> bytes:
        return msgspec.msgpack.encode((*self._listener.getsockname(), self._secret))

    def begin(self, offer: contract.Offer, readers: Mapping[str, Sequence[bytes]]) -> None:
        self._policy, self._lost = offer.policy, set()
        self._reads = {
            (receiver_id, rank): decode(described, dict[int, set[int]], f"receiver {receiver_id!r}")
            for receiver_id, ranks in readers.items()
            for rank, described in enumerate(ranks)
        }
        self._talks[self._listener] = self._accept()

    def slot(self, group: int, nbytes: int) -> Tensor:
        index = (self._generation + 1) % len(self._slots)
        self._settle(index)
        self._staged = self._slots[index][:nbytes]
        return self._staged

    def put(self, group: int, tensors: Mapping[int, Tensor], seal: contract.Seal) -> None:
        self._generation += 1
        key, memory = (self._policy, group), self._staged.numpy().data  # the tensors lie there
        mine = self._context.rank
        waiting = {reader for reader, reads in self._reads.items() if group in reads.get(mine, ())}
        held = Held(key, self._generation, memory, seal, waiting)
        self._held[self._generation % len(self._slots)] = held

    def finish(self) -> None:
        for index in range(len(self._held)):
            self._settle(index)
        self._hang_up()

    def lose(self, receiver_id: str) -> None:
        self._lost |= {reader for reader in self._reads if reader[0] == receiver_id}

    def abort(self, error: BaseException) -> None:
        self._hang_up()

    def close(self) -> None:
        self._hang_up()
        self._listener.close()

    def _settle(self, index: int) -> None:
        """Answer readers until all have credited what is in a slot, and take it out."""
        if (held := self._held[index]) is not None:
            talk(
                self._context.watch,
                self._talks,
                f"credit for group {held.key[1]}",
                lambda: [f"receiver {r[0]!r} rank {r[1]}" for r in held.waiting - self._lost],
            )
            self._held[index] = None

    def _hang_up(self) -> None:
        while self._talks:
            self._talks.popitem()[1].close()
        self._held = [None] * len(self._held)

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
            reader, proof = yield from link.hear(tuple[Reader, bytes], HELLO_BYTES)
            if not hmac.compare_digest(proof, hmac.digest(self._secret, challenge, "sha256")):
                return
            while True:
                key = yield from link.hear(tuple[contract.Policy, int])
                while (held := next((h for h in self._held if h and h.key == key), None)) is None:
                    yield False
                yield from link.tell((held.generation, held.seal))
                yield from link.send(held.memory)
                # A slot is emptied before it is filled: these bytes are whole, or disowned.
                yield from link.tell(held.generation if held in self._held else 0)
                if (yield from link.hear(int)) == held.generation:
                    held.waiting.discard(reader)


class AcmeReceiver(contract.ReceiverTransport):
    """Asks all owners of a group for it, and takes their answers as they come."""

    def __init__(self, context: contract.Context) -> None:
        self._context = context
        self._links: dict[int, Link] = {}

    def set_plan(self, table: TensorTable, regions: Sequence[Region]) -> None:
        self._table, self._regions = table, regions
        self._reads: dict[int, set[int]] = {}
        cuts = Cuts(table)
        for region in regions:
            for shard in table.tensors[region.tensor].shards:
                if all(overlap(region, shard)):
                    self._reads.setdefault(shard.owner, set()).add(cuts.group_of(region))

    def describe(self) -> bytes:
        return msgspec.msgpack.encode(self._reads)

    def begin(self, offer: contract.Offer) -> None:
        self._policy = offer.policy
        self._with({owner: self._greet(owner, offer) for owner in self._reads}, "connection")

    def fetch(self, group: int, regions: Mapping[int, Tensor]) -> Sequence[contract.Seal]:
        self._seals: list[contract.Seal] = []
        owners = [owner for owner, groups in self._reads.items() if group in groups]
        self._with({o: self._take(o, group, regions) for o in owners}, f"group {group}")
        return self._seals

    def finish(self) -> None:
        self.close()

    def abort(self, error: BaseException) -> None:
        self.close()

    def close(self) -> None:
        while self._links:
            self._links.popitem()[1].connection.close()

    def _with(self, talks: Talks, what: str) -> None:
        talk(self._context.watch, talks, what, lambda: [f"trainer rank {o}" for o in talks])

    def _greet(self, owner: int, offer: contract.Offer) -> Steps[None]:
        link = self._links[owner] = Link(socket.socket(), f"trainer rank {owner}")
        host, port, secret = decode(offer.senders[owner], tuple[str, int, bytes], link.who)
        try:
            link.connection.connect_ex((host, port))  # a refusal shows in the first read
        except (OSError, OverflowError) as error:
            raise PeerLost(
                f"{link.who} is at {host!r}, port {port} ({error}): correct it"
            ) from error
        yield from link.read(challenge := bytearray(CHALLENGE_BYTES))
        proof = hmac.digest(secret, challenge, "sha256")
        yield from link.tell(((self._context.member_id, self._context.rank), proof))

    def _take(self, owner: int, group: int, regions: Mapping[int, Tensor]) -> Steps[None]:
        link, layout = self._links[owner], slot_layout(self._table, group, owner)
        slot = torch.empty(layout.nbytes, dtype=torch.uint8)
        yield from link.tell((self._policy, group))
        generation, seal = yield from link.hear(tuple[int, contract.Seal])
        yield from link.read(slot.numpy().data)
        if (yield from link.hear(int)) != generation:
            raise PeerLost(f"{link.who} refilled a slot under this late reader: receive a new one")
        for position, memory in regions.items():
            region = self._regions[position]
            if (shard := layout.shards.get(region.tensor)) and all(box := overlap(region, shard)):
                staged = cut(layout.places[region.tensor].view(slot), box, shard.offsets)
                with torch.no_grad():
                    cut(memory, box, region.offsets).copy_(staged)
        yield from link.tell(generation)
        self._seals.append(seal)
