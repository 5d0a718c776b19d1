"""A group's bytes between owners and readers: header, check, payload, credit.

Both ends step through the batches in one total order: by number, then by owner,
then by reader.  Each waits only for messages that come before those it hasn't
posted yet, so there is always one that both of its ends can complete: no deadlock,
whoever stages in however small buckets.  Credits are outside that order: what takes
them is posted when a version starts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from weightwire.contract import Policy, Seal, decode_message
from weightwire.copying import raw_bytes
from weightwire.errors import TableMismatch, TransferError
from weightwire.layout import cut_out
from weightwire.table import Region
from weightwire_nccl.epoch import Epoch
from weightwire_nccl.pieces import Batch, ChannelPlan, GroupShards, Message
from weightwire_nccl.records import HEADER_BYTES, Header
from weightwire_nccl.staging import Bucket, Staging, aligned, unpack
from weightwire_nccl.wire import Wire, Work
from weightwire_nccl.workers import Job

__all__ = [
    "Channel",
    "Owner",
    "Reader",
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


Tensors = Mapping[int, Tensor]
"""By tensor of the table at an owner, by region of the plan at a reader."""


def seal_bound(tensors: int) -> int:
    """Most bytes of a seal over so many tensors: a digest takes 9 and its key 5 in msgpack."""
    return 64 + 16 * tensors


class _End(ABC):
    """What both ends share: the version that they are in, and the buckets.

    The posting thread goes through a group's messages; the other one waits for them, so
    that the next group is announced, checked and posted while this one's payload travels.
    """

    def __init__(self, epoch: Epoch, staging: Staging, channels: Sequence[Channel]) -> None:
        self.epoch = epoch
        self.channels = tuple(channels)
        self.staging = staging
        self._policy = Policy(0, 0)
        self._has_several_wires = len({id(channel.wire) for channel in channels}) > 1
        self._latest: tuple[Wire | None, Sequence[Work]] = (None, ())

    def start(self, policy: Policy) -> None:
        self._policy = policy
        self._latest = (None, ())

    def _channels_of(self, group: int) -> list[Channel]:
        return [channel for channel in self.channels if channel.plan.of_group(group)]

    def _batches(self, group: int) -> Iterator[tuple[Channel, Batch]]:
        """A group's messages in the order that both ends keep."""
        channels = self._channels_of(group)
        most = max((len(channel.plan.of_group(group)) for channel in channels), default=0)
        for number in range(most):
            for channel in channels:
                batches = channel.plan.of_group(group)
                if number < len(batches):
                    yield channel, batches[number]

    def _header(self, channel: Channel, group: int, seal: int = 0) -> Header:
        nbytes = sum(message.nbytes for batch in channel.plan.of_group(group) for message in batch)
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

    def _post(self, channel: Channel, group: int, batch: Batch, tensors: Tensors) -> None:
        """Post a batch from, or into, the tensors themselves where that can be."""
        boxes = [self._boxes(group, message, tensors) for message in batch]
        nbytes = [message.nbytes for message in batch]
        direct = [_travels(found, self.epoch.device) for found in boxes]
        need = sum(aligned(n) for n, is_direct in zip(nbytes, direct, strict=True) if not is_direct)
        bucket = self.staging.take(need) if need else None
        wire = channel.wire or self.epoch.payload
        staged: list[tuple[Tensor, list[Tensor]]] = []

        def post() -> list[Work]:
            works = []
            for found, size, is_direct in zip(boxes, nbytes, direct, strict=True):
                if is_direct or bucket is None:
                    data = raw_bytes(found[0])
                else:
                    data = self._stage(bucket, found, size)
                    staged.append((data, found))
                works.append(self._post_message(channel, wire, data))
            return works

        others = tuple(r for r in (channel.owner, *channel.readers) if r != self.epoch.rank)
        last, under_way = self._latest
        if wire is not last:
            # NCCL promises nothing for kernels of several communicators that wait side by side.
            for work in under_way:
                work.follow()
        with self.epoch.translated(*others):
            works = wire.together(post) if len(batch) > 1 else post()
        if self._has_several_wires:
            self._latest = wire, works

        def settle() -> None:
            for work in works:
                self.epoch.complete(work, *others)
            self._take(staged)

        job = self.epoch.settle_later(settle)
        if bucket is not None:
            bucket.settles = job

    @abstractmethod
    def _boxes(self, group: int, message: Message, tensors: Tensors) -> list[Tensor]:
        """A message's pieces of the tensors."""

    @abstractmethod
    def _stage(self, bucket: Bucket, boxes: Sequence[Tensor], nbytes: int) -> Tensor:
        """A message's memory, where its pieces can't be that."""

    @abstractmethod
    def _post_message(self, channel: Channel, wire: Wire, data: Tensor) -> Work:
        """Let a message leave, or arrive."""

    def _take(self, staged: Sequence[tuple[Tensor, list[Tensor]]]) -> None:
        """What is to be done with staged messages that are through."""


class Owner(_End):
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

    def send_group(
        self, group: int, tensors: Tensors, seal: Seal, fence: Callable[[], None]
    ) -> Job[None]:
        """Post a group once its readers take it.

        Args:
            fence: what its tensors wait for.

        Returns:
            It ends when every tensor may change.
        """
        fence()
        framed = self._introduce(group, seal)
        for channel, batch in self._batches(group):
            self._post(channel, group, batch, tensors)

        def settle() -> None:
            for reader, work in framed:
                self.epoch.complete(work, reader)

        return self.epoch.settle_later(settle)

    def _introduce(self, group: int, seal: Seal) -> list[tuple[int, Work]]:
        """Say what comes, and hear that it is taken; returns what ends each saying."""
        control = self.epoch.control
        sealed = msgspec.msgpack.encode(seal)
        if len(sealed) > self._seals[group]:
            raise TransferError(f"the seal of group {group} has {len(sealed)} bytes: too many")
        asked, framed = [], []
        for channel in self._channels_of(group):
            header = self._header(channel, group, len(sealed))
            data = _frame(HEADER_BYTES + self._seals[group], header.encode() + sealed)
            for reader in channel.readers:
                with self.epoch.translated(reader):
                    ask = torch.empty(HEADER_BYTES, dtype=torch.uint8)
                    asked.append((reader, header, ask, control.recv(ask, reader, _ASK)))
                    framed.append((reader, control.send(data, reader, _FRAME)))
        for reader, header, ask, work in asked:
            self.epoch.complete(work, reader)
            self._check(header, _bytes(ask), reader)
        return framed

    def _boxes(self, group: int, message: Message, tensors: Tensors) -> list[Tensor]:
        shards = self._shards[group]
        return [
            tensors[piece.tensor]
            if piece.is_shard
            else cut_out(
                tensors[piece.tensor], piece.begin, piece.sizes, shards[piece.tensor].offsets
            )
            for piece in message.pieces
        ]

    def _stage(self, bucket: Bucket, boxes: Sequence[Tensor], nbytes: int) -> Tensor:
        return bucket.pack(boxes, nbytes)

    def _post_message(self, channel: Channel, wire: Wire, data: Tensor) -> Work:
        self.sent_nbytes += data.numel()
        if channel.wire is not None:
            return wire.broadcast(data, 0)
        return wire.send(data, channel.readers[0], _PAYLOAD)

    def await_credits(self) -> None:
        """Return when every reader holds all that this rank has sent."""
        for channel, reader, credit, work in self._credits:
            self.epoch.complete(work, reader)
            last = max(channel.plan.groups)
            self._check(self._header(channel, last), _bytes(credit), reader)
        self._credits = []
        self._latest = (None, ())  # the trainer's tensors are its own again


class Reader(_End):
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

    def fetch_group(
        self, group: int, memory: Tensors, fence: Callable[[], None]
    ) -> Job[list[Seal]]:
        """Post what takes a group once its owners have said what comes.

        Args:
            memory: by region.
            fence: what it waits for.

        Returns:
            It ends when every region of the group is filled.
        """
        fence()
        seals, asked = self._introduce(group)
        for channel, batch in self._batches(group):
            self._post(channel, group, batch, memory)

        def settle() -> list[Seal]:
            for channel in self._channels_of(group):
                if group == max(channel.plan.groups):
                    asked.append((channel.owner, self._post_credit(channel, group)))
            for owner, work in asked:
                self.epoch.complete(work, owner)
            return seals

        return self.epoch.settle_later(settle)

    def _introduce(self, group: int) -> tuple[list[Seal], list[tuple[int, Work]]]:
        """Ask for a group, and hear what comes; returns also what ends each asking."""
        control = self.epoch.control
        asked, framed = [], []
        for channel in self._channels_of(group):
            header, owner = self._header(channel, group), channel.owner
            with self.epoch.translated(owner):
                ask = control.send(_frame(HEADER_BYTES, header.encode()), owner, _ASK)
                data = torch.empty(HEADER_BYTES + self._seals[owner][group], dtype=torch.uint8)
                framed.append((channel, header, data, control.recv(data, owner, _FRAME)))
            asked.append((owner, ask))
        seals = []
        for channel, header, data, work in framed:
            self.epoch.complete(work, channel.owner)
            seals.append(self._seal(channel, header, data))
        return seals, asked

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

    def _post_credit(self, channel: Channel, group: int) -> Work:
        credit = _frame(HEADER_BYTES, self._header(channel, group).encode())
        with self.epoch.translated(channel.owner):
            return self.epoch.control.send(credit, channel.owner, _CREDIT)

    def _boxes(self, group: int, message: Message, tensors: Tensors) -> list[Tensor]:
        return [
            tensors[piece.region]
            if piece.is_region
            else cut_out(
                tensors[piece.region], piece.begin, piece.sizes, self._regions[piece.region].offsets
            )
            for piece in message.pieces
        ]

    def _stage(self, bucket: Bucket, boxes: Sequence[Tensor], nbytes: int) -> Tensor:
        return bucket.land(nbytes)

    def _post_message(self, channel: Channel, wire: Wire, data: Tensor) -> Work:
        if channel.wire is not None:
            return wire.broadcast(data, 0)
        return wire.recv(data, channel.owner, _PAYLOAD)

    def _take(self, staged: Sequence[tuple[Tensor, list[Tensor]]]) -> None:
        with torch.no_grad():
            for data, boxes in staged:
                unpack(data, boxes)
        if staged:
            self.epoch.payload.flush()


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
