"""A group's bytes between owners and readers: header, check, payload, credit.

Both ends step through the messages in one total order: by number, then by owner,
then by reader.  Each waits only for messages that come before those it hasn't
posted yet, so there is always one that both of its ends can complete: no deadlock,
whoever stages in however small buckets.  Credits are outside that order: what takes
them is posted when a version starts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

import msgspec
import torch
from torch import Tensor

from weightwire.contract import Policy, Seal, decode_message
from weightwire.copying import raw_bytes
from weightwire.errors import TableMismatch, TransferError
from weightwire.layout import cut_out
from weightwire.table import Region
from weightwire_nccl.epoch import Epoch
from weightwire_nccl.pieces import ChannelPlan, GroupShards, Message
from weightwire_nccl.records import HEADER_BYTES, Header
from weightwire_nccl.staging import Staging, unpack
from weightwire_nccl.wire import Wire, Work

__all__ = [
    "Channel",
    "Owner",
    "Reader",
    "Sent",
    "Wanted",
    "receive_plan",
    "seal_bound",
    "send_plan",
]

_ASK, _FRAME, _PAYLOAD, _PLAN, _CREDIT = range(1, 6)
_MAX_PLAN = 1 << 30


@dataclass(frozen=True)
class Channel:
    """From one owner to those who read the same of it.

    Attributes:
        owner: rank in the group.
        readers: ranks in the group; one, unless it is a broadcast.
        digest: first 16 bytes of the plan's digest.
        wire: what is broadcast on, the owner first; None point-to-point.
    """

    owner: int
    readers: tuple[int, ...]
    plan: ChannelPlan
    digest: bytes
    wire: Wire | None = None


def seal_bound(tensors: int) -> int:
    """Most bytes of a seal over so many tensors: a digest takes 9 and its key 5 in msgpack."""
    return 64 + 16 * tensors


@dataclass(eq=False)
class Sent:
    """A group that an owner was given.

    Attributes:
        fence: what its tensors wait for.
        asked: who must say that it takes the group, and what takes its message; None until
            that is posted.
        framed: what is said to each of them.
    """

    group: int
    tensors: Mapping[int, Tensor]
    seal: Seal
    fence: Callable[[], None]
    asked: list[tuple[int, Header, Tensor, Work]] | None = None
    framed: list[tuple[int, Work]] = field(default_factory=list)


@dataclass(eq=False)
class Wanted:
    """A group that a reader is given memory for.

    Attributes:
        memory: by region.
        fence: what its memory waits for.
        framed: what takes each owner's frame; None until that is posted.
        asked: what is said to each of them.
    """

    group: int
    memory: Mapping[int, Tensor]
    fence: Callable[[], None]
    framed: list[tuple[Channel, Header, Tensor, Work]] | None = None
    asked: list[tuple[int, Work]] = field(default_factory=list)


Given = TypeVar("Given", Sent, Wanted)


class _End(ABC, Generic[Given]):
    """What both ends share: the version that they are in, and the buckets.

    A group's two small messages, which say that both sides are at the same place, are
    posted while the payload of the group before is on its way.
    """

    def __init__(self, epoch: Epoch, staging: Staging, channels: Sequence[Channel]) -> None:
        self.epoch = epoch
        self.channels = tuple(channels)
        self.staging = staging
        self._policy = Policy(0, 0)
        self._given: list[Given] = []
        self._direct: list[tuple[Wire, Work, tuple[int, ...]]] = []

    def start(self, policy: Policy) -> None:
        self._policy = policy

    def _channels_of(self, group: int) -> list[Channel]:
        return [channel for channel in self.channels if channel.plan.of_group(group)]

    def _messages(self, group: int) -> Iterator[tuple[Channel, Message]]:
        """A group's messages in the order that both ends keep."""
        channels = self._channels_of(group)
        most = max((len(channel.plan.of_group(group)) for channel in channels), default=0)
        for number in range(most):
            for channel in channels:
                messages = channel.plan.of_group(group)
                if number < len(messages):
                    yield channel, messages[number]

    def _header(self, channel: Channel, group: int, seal: int = 0) -> Header:
        nbytes = sum(message.nbytes for message in channel.plan.of_group(group))
        return Header(self._policy, group, self.epoch.generation, nbytes, channel.digest, seal)

    def _check(self, mine: Header, payload: bytes, peer: int) -> Header:
        who = str(self.epoch.members[peer])
        theirs = Header.decode(payload, who)
        difference = mine.difference(theirs)
        if difference:
            raise TableMismatch(
                f"{who} is at another place than this side before group {mine.group} "
                f"({difference}): send the version again"
            )
        return theirs

    @abstractmethod
    def _introduce(self, given: Given) -> None:
        """Post a group's small messages, unless they are."""

    def _look_ahead(self) -> None:
        """Introduce what this end was given meanwhile."""
        for given in tuple(self._given):
            self._introduce(given)

    def _finish_messages(self) -> None:
        direct, self._direct = self._direct, []
        last = {id(wire): number for number, (wire, _, _) in enumerate(direct)}
        for number, (wire, work, peers) in enumerate(direct):
            if not wire.in_order or number == last[id(wire)]:
                self.epoch.complete(work, *peers, meanwhile=self._look_ahead)
        self.staging.drain()
        self.epoch.payload.flush()


class Owner(_End[Sent]):
    """A trainer rank's end of its channels.

    Args:
        shards: of this rank.
        seals: most bytes of a seal, by group.

    Attributes:
        sent_nbytes: payload of this version so far; a broadcast counts once.
    """

    def __init__(
        self,
        epoch: Epoch,
        staging: Staging,
        channels: Sequence[Channel],
        shards: GroupShards,
        seals: Sequence[int],
    ) -> None:
        super().__init__(epoch, staging, channels)
        self._shards = shards
        self._seals = seals
        self._credits: list[tuple[Channel, int, Tensor, Work]] = []
        self.sent_nbytes = 0

    def give(self, sent: Sent) -> Callable[[], None]:
        """On the caller's thread: what the group's thread does next, in this order.

        It returns when every tensor may change.
        """
        self._given.append(sent)
        return partial(self._send_group, sent)

    def _send_group(self, sent: Sent) -> None:
        group = sent.group
        sent.fence()
        self._introduce(sent)
        for reader, header, ask, work in sent.asked or ():
            self.epoch.complete(work, reader)
            self._check(header, _bytes(ask), reader)
        for channel, message in self._messages(group):
            self._send(channel, group, message, sent.tensors)
        self._given.remove(sent)
        self._finish_messages()
        for reader, work in sent.framed:
            self.epoch.complete(work, reader)

    def _introduce(self, sent: Sent) -> None:
        if sent.asked is not None:
            return
        group, control = sent.group, self.epoch.control
        sealed = msgspec.msgpack.encode(sent.seal)
        if len(sealed) > self._seals[group]:
            raise TransferError(f"the seal of group {group} has {len(sealed)} bytes: too many")
        sent.asked = []
        for channel in self._channels_of(group):
            header = self._header(channel, group, len(sealed))
            data = _frame(HEADER_BYTES + self._seals[group], header.encode() + sealed)
            for reader in channel.readers:
                with self.epoch.translated(reader):
                    ask = torch.empty(HEADER_BYTES, dtype=torch.uint8)
                    sent.asked.append((reader, header, ask, control.recv(ask, reader, _ASK)))
                    sent.framed.append((reader, control.send(data, reader, _FRAME)))

    def _send(
        self, channel: Channel, group: int, message: Message, tensors: Mapping[int, Tensor]
    ) -> None:
        shards = self._shards[group]
        boxes = [
            tensors[piece.tensor]
            if piece.is_shard
            else cut_out(
                tensors[piece.tensor], piece.begin, piece.sizes, shards[piece.tensor].offsets
            )
            for piece in message.pieces
        ]
        as_it_lies = _travels(boxes, self.epoch.device)
        data = raw_bytes(boxes[0]) if as_it_lies else self.staging.pack(boxes, message.nbytes)
        self.sent_nbytes += data.numel()
        wire = channel.wire or self.epoch.payload
        with self.epoch.translated(*channel.readers):
            if channel.wire is not None:
                work = wire.broadcast(data, 0)
            else:
                work = wire.send(data, channel.readers[0], _PAYLOAD)
        if as_it_lies:
            self._direct.append((wire, work, channel.readers))
        else:
            settle = partial(self.epoch.complete, work, *channel.readers)
            self.staging.when_settled(partial(settle, meanwhile=self._look_ahead))

    def start(self, policy: Policy) -> None:
        """Also post what takes the credits: a reader that is done with this owner goes on to
        others that this one may be waiting for."""
        super().start(policy)
        self._credits = []
        for channel in self.channels:
            for reader in channel.readers if channel.plan.groups else ():
                credit = torch.empty(HEADER_BYTES, dtype=torch.uint8)
                with self.epoch.translated(reader):
                    work = self.epoch.control.recv(credit, reader, _CREDIT)
                self._credits.append((channel, reader, credit, work))

    def await_credits(self) -> None:
        """Return when every reader holds all that this rank has sent."""
        for channel, reader, credit, work in self._credits:
            self.epoch.complete(work, reader)
            last = max(channel.plan.groups)
            self._check(self._header(channel, last), _bytes(credit), reader)
        self._credits = []


class Reader(_End[Wanted]):
    """An inference rank's end of its channels.

    Args:
        regions: the plan's.
        seals: most bytes of a seal, by owner and group.
    """

    def __init__(
        self,
        epoch: Epoch,
        staging: Staging,
        channels: Sequence[Channel],
        regions: Sequence[Region],
        seals: Mapping[int, Sequence[int]],
    ) -> None:
        super().__init__(epoch, staging, channels)
        self._regions = regions
        self._seals = seals

    def want(self, wanted: Wanted) -> Callable[[], list[Seal]]:
        """On the caller's thread: what the group's thread does next, in this order.

        It returns when every region of the group is filled.
        """
        self._given.append(wanted)
        return partial(self._fetch_group, wanted)

    def _introduce(self, wanted: Wanted) -> None:
        if wanted.framed is not None:
            return
        group, control = wanted.group, self.epoch.control
        wanted.framed = []
        for channel in self._channels_of(group):
            header = self._header(channel, group)
            owner = channel.owner
            with self.epoch.translated(owner):
                ask = control.send(_frame(HEADER_BYTES, header.encode()), owner, _ASK)
                data = torch.empty(HEADER_BYTES + self._seals[owner][group], dtype=torch.uint8)
                frame = control.recv(data, owner, _FRAME)
            wanted.framed.append((channel, header, data, frame))
            wanted.asked.append((owner, ask))

    def _fetch_group(self, wanted: Wanted) -> list[Seal]:
        group, control, asked = wanted.group, self.epoch.control, wanted.asked
        wanted.fence()
        self._introduce(wanted)
        seals = []
        for channel, header, data, work in wanted.framed or ():
            self.epoch.complete(work, channel.owner)
            seals.append(self._seal(channel, header, data))
        for channel, message in self._messages(group):
            self._receive(channel, message, wanted.memory)
        self._given.remove(wanted)
        self._finish_messages()
        for channel in self._channels_of(group):
            if group == max(channel.plan.groups):
                credit = _frame(HEADER_BYTES, self._header(channel, group).encode())
                with self.epoch.translated(channel.owner):
                    asked.append((channel.owner, control.send(credit, channel.owner, _CREDIT)))
        for owner, work in asked:
            self.epoch.complete(work, owner)
        return seals

    def _seal(self, channel: Channel, header: Header, data: Tensor) -> Seal:
        payload = _bytes(data)
        theirs = self._check(header, payload[:HEADER_BYTES], channel.owner)
        if theirs.seal > len(payload) - HEADER_BYTES:
            raise TransferError(
                f"{self.epoch.members[channel.owner]} announces a seal of {theirs.seal} bytes: "
                "run one weightwire version on all sides"
            )
        sealed = payload[HEADER_BYTES : HEADER_BYTES + theirs.seal]
        return decode_message(sealed, Seal, str(self.epoch.members[channel.owner]))

    def _receive(self, channel: Channel, message: Message, memory: Mapping[int, Tensor]) -> None:
        boxes = [
            memory[piece.region]
            if piece.is_region
            else cut_out(
                memory[piece.region], piece.begin, piece.sizes, self._regions[piece.region].offsets
            )
            for piece in message.pieces
        ]
        in_place = _travels(boxes, self.epoch.device)
        data = raw_bytes(boxes[0]) if in_place else self.staging.land(message.nbytes)
        others = (channel.owner, *(r for r in channel.readers if r != self.epoch.rank))
        wire = channel.wire or self.epoch.payload
        with self.epoch.translated(*others):
            if channel.wire is not None:
                work = wire.broadcast(data, 0)
            else:
                work = wire.recv(data, channel.owner, _PAYLOAD)
        if in_place:
            self._direct.append((wire, work, others))
        else:
            self.staging.when_settled(partial(self._take, work, others, data, boxes))

    def _take(
        self, work: Work, peers: tuple[int, ...], data: Tensor, boxes: Sequence[Tensor]
    ) -> None:
        self.epoch.complete(work, *peers, meanwhile=self._look_ahead)
        with torch.no_grad():
            unpack(data, boxes)


def send_plan(epoch: Epoch, payload: bytes, owners: Sequence[int]) -> None:
    """A reader's regions, to the trainer ranks: once for all who read the same."""
    size = _frame(8, len(payload).to_bytes(8, "little"))
    body = _frame(max(1, len(payload)), payload)
    works = []
    for owner in owners:
        with epoch.translated(owner):
            works.append((epoch.control.send(size, owner, _PLAN), owner))
            works.append((epoch.control.send(body, owner, _PLAN), owner))
    for work, owner in works:
        epoch.complete(work, owner)


def receive_plan(epoch: Epoch, reader: int) -> bytes:
    """What ``send_plan`` sent."""
    size = torch.empty(8, dtype=torch.uint8)
    with epoch.translated(reader):
        work = epoch.control.recv(size, reader, _PLAN)
    epoch.complete(work, reader)
    nbytes = int.from_bytes(_bytes(size), "little")
    if nbytes > _MAX_PLAN:
        raise TransferError(
            f"{epoch.members[reader]} announces a plan of {nbytes} bytes: "
            "run one weightwire version on all sides"
        )
    body = torch.empty(max(1, nbytes), dtype=torch.uint8)
    with epoch.translated(reader):
        work = epoch.control.recv(body, reader, _PLAN)
    epoch.complete(work, reader)
    return _bytes(body)[:nbytes]


def _travels(boxes: Sequence[Tensor], device: torch.device) -> bool:
    """Whether a message can leave from, or land in, the tensor itself."""
    return len(boxes) == 1 and boxes[0].is_contiguous() and boxes[0].device == device


def _frame(nbytes: int, payload: bytes) -> Tensor:
    """A uint8 tensor that begins with ``payload``."""
    return torch.frombuffer(bytearray(payload.ljust(nbytes, b"\0")), dtype=torch.uint8)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()
