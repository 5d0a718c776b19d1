"""What the two sides tell each other: metadata at set-up, then notifications."""

from __future__ import annotations

import contextlib
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from weightwire.contract import Policy
from weightwire.errors import TransferError
from weightwire_nixl.config import Direction
from weightwire_nixl.route import Endpoint

__all__ = [
    "Aborted",
    "Announced",
    "Bye",
    "Credit",
    "Forgot",
    "GaveUp",
    "Granted",
    "Live",
    "Message",
    "Over",
    "PlanPart",
    "ReaderInfo",
    "SenderInfo",
    "Written",
    "encode",
    "read_message",
    "readable",
]

MAX_SLOTS = 128

_Name = Annotated[str, Meta(min_length=1, max_length=256)]
_Size = Annotated[int, Meta(ge=0, le=1 << 50)]
_Address = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Slot = Annotated[int, Meta(ge=0, lt=MAX_SLOTS)]
_Metadata = Annotated[bytes, Meta(max_length=1 << 26)]
_Seal = Annotated[bytes, Meta(max_length=1 << 26)]


class Arena(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rank's slots, one after another in one registered piece of memory.

    Attributes:
        device: torch device type.
        device_id: NIXL's device number.
    """

    address: _Address
    slot_nbytes: _Size
    slots: Annotated[int, Meta(ge=1, le=MAX_SLOTS)]
    device: Annotated[str, Meta(max_length=16)]
    device_id: Annotated[int, Meta(ge=0, le=4096)]


class SenderInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A trainer rank.

    Attributes:
        agent: its name, new for each incarnation.
        metadata: NIXL's, opaque.
        process: its identity, for who runs on the same host.
        words: address of the slots' generation words, in host memory.
        zero_copy: its groups lie in the trainer's own tensors, not in slots.
    """

    session: _Name
    agent: _Name
    metadata: Annotated[bytes, Meta(max_length=1 << 20)]
    process: Annotated[str, Meta(max_length=512)]
    endpoint: Endpoint
    direction: Direction
    unsafe_pull: bool
    arena: Arena
    words: _Address
    zero_copy: bool


class ReaderInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An inference rank.

    Attributes:
        reads: by owner, the groups in which it wants something of it.
    """

    session: _Name
    agent: _Name
    metadata: Annotated[bytes, Meta(max_length=1 << 20)]
    process: Annotated[str, Meta(max_length=512)]
    endpoint: Endpoint
    direction: Direction
    unsafe_pull: bool
    arena: Arena
    reads: Annotated[
        dict[int, Annotated[tuple[int, ...], Meta(max_length=1 << 24)]], Meta(max_length=1 << 20)
    ]


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """What a notification says."""

    policy: Policy


class Live(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Where the tensors of a group lie that isn't staged.

    Attributes:
        bases: address of each tensor that isn't empty, in the order of the slot's layout.
        device, device_id: of all of them.
        metadata: NIXL's, of memory that this reader hasn't heard of yet.
    """

    bases: Annotated[bytes, Meta(max_length=1 << 26)]
    device: Annotated[str, Meta(max_length=16)]
    device_id: Annotated[int, Meta(ge=0, le=4096)]
    metadata: Annotated[
        tuple[Annotated[bytes, Meta(max_length=1 << 26)], ...], Meta(max_length=4096)
    ]


class Announced(_Message, frozen=True, tag="announced"):
    """Owner to reader: the group lies in this slot, in this generation."""

    group: _Number
    slot: _Slot
    generation: _Number
    seal: _Seal
    live: Live | None


class Credit(_Message, frozen=True, tag="credit"):
    """Reader to owner, sent by the last read of a group: the slot is read."""

    group: _Number
    generation: _Number


class PlanPart(_Message, frozen=True, tag="plan"):
    """Reader to an owner that pushes: a part of what to write, once for both agents.

    Attributes:
        part, parts: which part of how many.
        rows: N by 4 uint64, little-endian: group, first byte in the owner's slot, first
            byte in the reader's slot, bytes; sorted by the first two.
    """

    part: Annotated[int, Meta(ge=0, lt=1 << 12)]
    parts: Annotated[int, Meta(ge=1, le=1 << 12)]
    rows: Annotated[bytes, Meta(max_length=1 << 18)]


class Granted(_Message, frozen=True, tag="granted"):
    """Reader to owner: the group may be written into this slot of mine."""

    group: _Number
    slot: _Slot
    number: _Number


class Written(_Message, frozen=True, tag="written"):
    """Owner to reader, sent by the write itself: what was granted under this number is there."""

    group: _Number
    number: _Number
    seal: _Seal


class Aborted(_Message, frozen=True, tag="aborted"):
    """Owner to reader: this version won't go on; only wakes the reader early.

    Attributes:
        in_flight: a write to this reader is still under way.
    """

    in_flight: bool


class GaveUp(_Message, frozen=True, tag="gave-up"):
    """Reader to owner: this version won't go on here; only wakes the owner early.

    Attributes:
        in_flight: a read of this owner's memory is still under way, or a write that was granted.
        metadata: NIXL's, of the reader's agent, where something was granted: an owner that has
            never met it can answer, too.
    """

    in_flight: bool
    metadata: Annotated[bytes, Meta(max_length=1 << 20)] = b""


class Over(_Message, frozen=True, tag="over"):
    """Nothing of this version is under way any more between the two."""


class Forgot(_Message, frozen=True, tag="forgot"):
    """Owner to reader: whom the reader's new agent replaces isn't known here any more.

    Attributes:
        agent: its name; nothing is under way to its memory.
    """

    agent: _Name


class Bye(_Message, frozen=True, tag="bye"):
    """This agent closes."""


Message: TypeAlias = (
    Announced | Credit | PlanPart | Granted | Written | Aborted | GaveUp | Over | Forgot | Bye
)

_messages = msgspec.msgpack.Decoder(Message)
encode = msgspec.msgpack.encode


def read_message(payload: bytes, who: str) -> Message:
    """A notification as what it says.

    Raises:
        TransferError: it says nothing that this version knows.
    """
    try:
        return _messages.decode(payload)
    except (msgspec.DecodeError, RecursionError) as error:
        raise TransferError(
            f"{who} sent a signal that can't be read ({error}): run one weightwire version on "
            "both sides"
        ) from error


def readable(payload: bytes) -> Message | None:
    """What a notification says; None where it says nothing that this version knows."""
    with contextlib.suppress(msgspec.DecodeError, RecursionError):
        return _messages.decode(payload)
    return None
