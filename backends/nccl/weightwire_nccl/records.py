"""What members tell each other, all of it typed and bounded: msgpack, and one packed header.

``SenderInfo`` and ``ReaderInfo`` travel in the session's records; ``Opening`` and
``Hello`` lie in the sender's TCPStore; a ``Header`` goes before each group.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from weightwire.contract import Policy
from weightwire.errors import TransferError

__all__ = [
    "HEADER_BYTES",
    "PROTOCOL",
    "Header",
    "Hello",
    "Member",
    "Opening",
    "ReaderInfo",
    "SenderInfo",
    "Wait",
    "digest_of",
]

PROTOCOL = 2

Text = Annotated[str, Meta(max_length=256)]
Digest = Annotated[str, Meta(pattern="^([0-9a-f]{32})?$")]
Count = Annotated[int, Meta(ge=0, le=1 << 62)]


class SenderInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A trainer rank.

    Attributes:
        nonce: new for each transport.
        machine: id of the host's boot, to tell hosts apart.
        host, port: of the store; rank 0 only, else empty and 0.
        mode: ``"p2p"``, ``"broadcast"``, or ``"auto"``: then rank 0 chooses.
        device: where its tensors lie.
        gpu: UUID of the GPU it would use, or empty, and ``no_gpu`` why.
    """

    protocol: Count
    nonce: Text
    machine: Text
    host: Text
    port: Annotated[int, Meta(ge=0, le=65535)]
    bucket_bytes: Count
    library: Text
    mode: Text
    device: Annotated[str, Meta(pattern="^(cpu|cuda|cuda:[0-9]{1,4})$")]
    gpu: Text
    no_gpu: Text


class ReaderInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An inference rank.

    Attributes:
        epoch: the group that it holds, or empty.
        plan: digest of what it reads; empty when that is nothing.
    """

    protocol: Count
    nonce: Text
    machine: Text
    epoch: Text
    plan: Digest
    bucket_bytes: Count
    library: Text
    mode: Text
    device: Annotated[str, Meta(pattern="^(cpu|cuda|cuda:[0-9]{1,4})$")]
    gpu: Text
    no_gpu: Text


class Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One process of a group; its position in ``Opening.members`` is its rank there.

    Attributes:
        name: ``"sender"``, or the receiver's id.
        is_sender: a receiver may be called "sender" too.
        plan: digest of what it reads; empty for trainer ranks.
    """

    name: Text
    is_sender: bool
    rank: Annotated[int, Meta(ge=0, le=1 << 20)]
    nonce: Text
    plan: Digest

    def __str__(self) -> str:
        who = "sender" if self.is_sender else f"receiver {self.name!r}"
        return f"{who} rank {self.rank}"


class Opening(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one version travels; written by the sender's rank 0 before it begins.

    Attributes:
        error: why it doesn't travel at all, or empty.
        epoch: id of the group.
        generation: how many versions the group has carried, this one included.
        members: trainer ranks first, then the replicas' ranks by receiver id.
        reason: why this mode and this library.
    """

    policy: Policy
    error: Annotated[str, Meta(max_length=4096)] = ""
    epoch: Text = ""
    generation: Count = 0
    table: Text = ""
    mode: Literal["p2p", "broadcast"] = "p2p"
    library: Literal["gloo", "nccl"] = "gloo"
    reason: Annotated[str, Meta(max_length=4096)] = ""
    bucket_bytes: Count = 0
    members: Annotated[tuple[Member, ...], Meta(max_length=1 << 20)] = ()


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A member has come to the rendezvous, and says as whom."""

    member: Member
    opening: Text


class Wait(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A member has waited for a while.

    Attributes:
        beat: rises as long as it does.
        awaited: ranks in the group.
    """

    beat: Count
    awaited: Annotated[tuple[Annotated[int, Meta(ge=0, le=1 << 21)], ...], Meta(max_length=1 << 20)]


_HEADER = struct.Struct("<8sQQQIQQ16sI")
_MAGIC = b"wwnccl\x00\x01"
HEADER_BYTES = _HEADER.size


@dataclass(frozen=True)
class Header:
    """What both ends of a channel say before a group's payload.

    Attributes:
        nbytes: of the payload on this channel.
        plan: the first 16 bytes of the plan's digest.
        seal: bytes of the seal that follows; not compared.
    """

    policy: Policy
    group: int
    generation: int
    nbytes: int
    plan: bytes
    seal: int = 0

    def encode(self) -> bytes:
        policy = self.policy
        return _HEADER.pack(
            _MAGIC,
            policy.incarnation,
            policy.version,
            policy.attempt,
            self.group,
            self.generation,
            self.nbytes,
            self.plan,
            self.seal,
        )

    @classmethod
    def decode(cls, payload: bytes, who: str) -> Header:
        magic, incarnation, version, attempt, group, generation, nbytes, plan, seal = (
            _HEADER.unpack(payload)
        )
        if magic != _MAGIC:
            raise TransferError(
                f"{who} sent something that isn't a header: run one weightwire version on all sides"
            )
        policy = Policy(incarnation, version, attempt)
        return cls(policy, group, generation, nbytes, plan, seal)

    def difference(self, other: Header) -> str:
        """The first field in which ``other`` differs, with both values; else empty."""
        for field in ("policy", "generation", "group", "plan", "nbytes"):
            mine, theirs = getattr(self, field), getattr(other, field)
            if mine != theirs:
                if field == "plan":
                    mine, theirs = mine.hex(), theirs.hex()
                return f"{field} {theirs} there, {mine} here"
        return ""


def digest_of(payload: bytes) -> str:
    return hashlib.blake2b(payload, digest_size=16).hexdigest()
