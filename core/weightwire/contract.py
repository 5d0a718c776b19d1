"""The backend contract: what a transport implements, and what core promises it.

A backend moves bytes and knows nothing of models.  Core owns the session, the
lifecycle, the tensor table, staging layouts, digests, deadlines and threads; it
drives a backend through the two interfaces below, one pair of objects a handle.

Four flows, chosen by ``Capabilities.flow``.  In all of them core calls the same
methods; what differs is who waits for whom inside them:

``store``
    *Store and forward* (files).  The sender's ``put`` writes a group where it
    outlives the call, ``finish`` makes the whole version visible at once.  Only
    then is ``started`` written, and receivers ``fetch`` what is there.  Nobody
    waits for anybody.

``pull``
    The sender's ``slot`` waits for the credits of the slot's last group,
    ``put`` announces the group.  The receiver's ``fetch`` waits for the
    announcement of every owner, reads from all of them, and the completed read
    is the credit.  The sender's ``finish`` waits for the last credits.

``push``
    The receiver's ``fetch`` grants its slot and waits for the writes to
    complete; the sender's ``put`` waits for the grant and writes; the completed
    write is the announcement.

``collective``
    Both sides step through the groups in the table's order: ``put`` and
    ``fetch`` of one group meet.

Every method runs on the thread that called ``send`` or ``receive``, except
``lose``, and ``close``, which may run on another after that thread has left.
Native errors are translated into ``weightwire.errors``.

Every wait goes through ``context.watch.until``: it has the call's deadline and
ends when a peer is lost.  The condition that it is given may be evaluated any
number of times, also after it held: it may make progress, but nothing may depend
on how often it ran.  A transport that moves bytes without waiting, such as a
loop over a stream that always has more, calls ``context.watch.check`` at least
every tenth of a second until they have moved: ``until`` looks at the deadline
and at lost peers only while its condition doesn't hold.

Whether a peer is gone is core's verdict, by its lease.  A connection that breaks
may be the first sign: a receiver raises ``PeerLost``.  So does a sender, unless
``context.goes_on_without_lost``: then it drops that reader from the version and
goes on with the others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta
from pydantic import BaseModel, ConfigDict

from weightwire.deadline import Watch
from weightwire.errors import PluginError, TransferError

if TYPE_CHECKING:  # commands that move nothing start without torch
    import torch
    from torch import Tensor

    from weightwire.table import Region, TensorTable

__all__ = [
    "API",
    "Backend",
    "BackendConfig",
    "Capabilities",
    "Context",
    "MAX_DESCRIPTION",
    "Offer",
    "Policy",
    "ReceiverTransport",
    "Seal",
    "SenderTransport",
    "checked_description",
    "decode_message",
]

API = 1
"""Number of the contract.  A backend that was written for another one is refused."""

MAX_DESCRIPTION = 1 << 20
"""Bytes of the longest ``describe``."""


M = TypeVar("M")

Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Flow = Literal["store", "pull", "push", "collective"]
Wait = Literal["applied", "published"]


class BackendConfig(BaseModel):
    """Options of one backend; subclass it.  Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do.  Flags select conformance scenarios and document it.

    Attributes:
        flow: who waits for whom; see the module docstring.
        default_wait: what ``send`` waits for unless told: ``"applied"`` by every
            receiver of the roster, or only ``"published"``.
        needs_live_receivers: if True, ``send`` waits for at least one receiver;
            if False, a version can be sent to nobody and read later.
        serves_finished: if True, a receiver that starts late gets the newest
            finished version at once; if False, it waits for the next offer.
        ranged_reads: if True, a receiver reads only the regions it asks for;
            if False, whole tensors travel and are cut on arrival.
        lands_in_place: if True, bytes may land in the target's own memory; if
            False, core copies them from the transport's slot.
        whole_tensors: if True, each tensor lies on one trainer rank when it is put:
            core moves the shards of others there first, group by group; if False,
            each rank puts what it holds.
        elastic: if True, a changed roster costs the others nothing; if False,
            they form a new group first.
        devices: torch device types whose tensors can be sent and received.
        max_receivers: most receivers in one offer, or None.
        max_tensor_nbytes: largest tensor, in bytes, or None.
    """

    flow: Flow
    default_wait: Wait
    needs_live_receivers: bool
    serves_finished: bool
    ranged_reads: bool
    lands_in_place: bool
    elastic: bool
    whole_tensors: bool = False
    devices: frozenset[str] = field(default_factory=lambda: frozenset({"cpu"}))
    max_receivers: int | None = None
    max_tensor_nbytes: int | None = None


class Policy(msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True):
    """Identity of one attempt to send one policy version."""

    incarnation: Number
    version: Number
    attempt: Number = 1

    def __str__(self) -> str:
        return f"version {self.version} (incarnation {self.incarnation}, attempt {self.attempt})"


class Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A version as both sides' transports see it.

    Attributes:
        policy: identity.
        table_digest: digest of the tensor table that it follows.
        roster: ids of the receivers it is offered to; empty when it is read later.
        senders: one opaque blob per trainer rank, from ``SenderTransport.describe``.
        verify: which digests the seals carry.
    """

    policy: Policy
    table_digest: Annotated[str, Meta(max_length=128)]
    roster: Annotated[tuple[Annotated[str, Meta(max_length=127)], ...], Meta(max_length=1 << 20)]
    senders: Annotated[tuple[bytes, ...], Meta(max_length=1 << 20)]
    verify: Literal["off", "sample", "full"]


class Seal(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """What core sends along with one owner's part of a group, opaque to transports.

    Attributes:
        digests: by tensor index, the 64-bit digest of the shards that this owner serves.
        owner: the trainer rank that serves them; -1 if that isn't known.
        of: which attempt of which version of which session they are of (``stamp``).  Core
            refuses seals of another one, and digests bind the bytes to the seal.
    """

    digests: dict[int, int]
    owner: int = -1
    of: int = 0


def _cpu() -> torch.device:
    import torch

    return torch.device("cpu")


@dataclass(frozen=True)
class Context:
    """What core tells a transport about where it runs.

    Attributes:
        config: the backend's own options.
        session_url: for messages; without credentials.
        session_id: hex id of the session; equal on all members, new for a new session.
        session_dir: the session's directory when it has one (``file://``), else None.
        rank: rank within this side's world.
        world_size: ranks of this side: trainer ranks, or ranks of this replica.
        member_id: the receiver's id, or ``"sender"``.
        incarnation: this member's incarnation.
        overlap: if True, hold two slots.
        device: where this rank's tensors lie, and its slots should: ``cpu``, ``cuda:0``.
        watch: every wait goes through it.
        goes_on_without_lost: if True, a reader that gives a version up is dropped from it;
            if False, that ends the version for everybody.
    """

    config: BackendConfig
    session_url: str
    session_id: str
    session_dir: Path | None
    rank: int
    world_size: int
    member_id: str
    incarnation: int
    overlap: bool
    watch: Watch
    goes_on_without_lost: bool = False
    device: torch.device = field(default_factory=_cpu)


class SenderTransport(ABC):
    """One trainer rank's end.  Per version core calls, on every trainer rank:

    1. ``set_table(table)`` when the table is new, and then ``describe()``.
    2. ``begin(offer, readers)`` once the roster is ready (``store``: at once).
    3. for each group in which this rank owns shards: ``slot``, then ``put``.
    4. ``finish()``; when it has returned on every rank, the version is out.
    5. or, at any point after 2 began, ``abort(error)``: also when ``begin`` raised,
       on whatever it had done until then.

    Between versions: ``drop(policy)`` for finished versions that nobody may
    read any more (only with ``serves_finished``), and ``release_buffers()`` where
    the trainer wants its memory; 1 follows it then.  At the end ``close()``.
    """

    keep: int | None = None
    """How many finished versions stay readable; None keeps all.  Only with ``serves_finished``."""

    column_blocks: bool = False
    """If True, large matrices lie in slots in blocks of columns (``Place.tiles``) where receivers
    read slices of columns (``WeightTarget.column_slices``), which are few long runs then;
    ``slot`` then never returns None.  If False, every tensor lies row by row.  Read before
    ``set_table``; equal on all ranks."""

    put_frees_earlier: bool = False
    """If True, ``put`` returns once every tensor handed to the puts before it may change. With
    ``overlap`` core then hands a staged group over while the one before travels, and calls no
    ``settle`` between them."""

    slowed_by_copies: bool = False
    """If True, copies at the whole bandwidth of a GPU's memory slow down what travels meanwhile.
    With ``overlap`` core then stages a group beside the one before with copies that leave a
    third of it.  Read after ``begin``."""

    path: str = ""
    """How this version's bytes travel, and why so, for reports: read after ``begin``."""

    @abstractmethod
    def set_table(self, table: TensorTable) -> None:
        """Size slots, register memory, prepare what all versions of this layout share."""

    def describe(self) -> bytes:
        """Opaque bytes for the receivers' transports: addresses, keys.  At most 1 MiB."""
        return b""

    @abstractmethod
    def begin(self, offer: Offer, readers: Mapping[str, Sequence[bytes]]) -> None:
        """A version starts.

        Args:
            offer: identity and roster.
            readers: for each receiver of the roster that reads, what its ranks'
                ``ReceiverTransport.describe`` returned, by rank.
        """

    def slot(self, group: int, nbytes: int) -> Tensor | None:
        """Memory for the group's shards of this rank, once its last readers are done.

        Returns:
            A contiguous uint8 tensor of at least ``nbytes`` (core copies and
            casts the shards into it, each aligned to 64 bytes), or None when
            ``put`` takes tensors wherever they lie.
        """
        return None

    @abstractmethod
    def put(self, group: int, tensors: Mapping[int, Tensor], seal: Seal) -> None:
        """Send, announce or store this rank's part of one group.

        Between this call and the transport's next one any length of time may pass, and no
        ``settle`` need come: what a receiver needs to fetch the group (a connection, a
        handshake, the announcement; in ``push`` the bytes) mustn't wait for a later call.

        Args:
            group: index into the table's groups.
            tensors: by tensor index, contiguous, of the wire dtype and of the
                shape of what this rank has of the tensor in this group, as in
                ``slot_layout(table, group, rank).shards``: of one that is cut over
                several groups, a part of its shard (of one that lies in blocks of
                columns, its elements as they lie).  They lie in the slot when
                there is one; otherwise they are unchanged until ``settle``,
                ``finish`` or, with ``put_frees_earlier``, a later ``put`` returns.
            seal: to be handed to whoever fetches this part.
        """

    def settle(self) -> None:
        """Return when every tensor handed to ``put`` may change.

        Called before core reuses memory that it handed to ``put``.
        """

    @abstractmethod
    def finish(self) -> None:
        """Return when this rank's bytes are safe: stored, or credited by every reader.

        From then on nothing of this version reads memory that core handed over.
        """

    def publish(self) -> None:
        """``store`` only, on rank 0, after every rank's ``finish``: make the version visible."""

    def lose(self, receiver_id: str) -> None:
        """Wait for this receiver no more; it is gone and the version goes on without it.

        Only called when ``context.goes_on_without_lost``; without, a lost receiver ends the
        version: the wait that runs raises ``PeerLost``, and ``abort`` follows.

        Called on another thread, at any time between ``begin`` and the end of ``finish``,
        while ``slot``, ``put`` or ``finish`` may be waiting; several times for one receiver,
        and also for one that reads nothing from this rank.
        """

    @abstractmethod
    def abort(self, error: BaseException) -> None:
        """Give the version up, and leave the transport fit for the next one.  Never waits long.

        Once it has returned, nothing in this process reads memory that core handed over for
        this version, or writes to it: threads and posted operations have ended.  What a
        library can't cancel uses memory of the transport's own, which is set aside until that
        is over.  What a peer still reads from here, it discards.
        """

    def drop(self, policy: Policy) -> None:
        """Delete a finished or void version; called on rank 0 when no reader holds it."""

    def release_buffers(self) -> None:
        """Give back the memory that only moving bytes takes: slots, registrations, buckets.

        Called between versions, on any number of ranks, also twice in a row, or before the
        first table.  ``set_table`` and ``describe`` follow before the next ``begin``, also
        when the table is the same; where ``describe`` then says something else, receivers
        must cope with it in ``begin``.  What has to outlive the version, such as connections
        and what was published, stays.  By default nothing is held.
        """

    @abstractmethod
    def close(self) -> None:
        """Release everything.  Idempotent."""


class ReceiverTransport(ABC):
    """One inference rank's end.  Per version core calls, on every rank of a replica:

    1. ``check(offer)``; ``set_plan(table, regions)`` when the table is new; ``describe()``.
    2. ``begin(offer)`` once the transfer has started.
    3. for each group with regions of this rank: ``slot``, ``post``, ``fetch``.  With
       ``overlap``, ``slot`` and ``post`` of the next group come before ``fetch`` of this one,
       so that it arrives while this one is verified and written; without, they follow the
       writing of the group before.
    4. ``finish()`` after the last group has been verified.
    5. or, at any point after 2 began, ``abort(error)``: also when ``begin`` raised, and of
       what was posted and not fetched.

    Between versions ``release_buffers()`` where the engine wants its memory.  At the end
    ``close()``.
    """

    path: str = ""
    """How this version's bytes travel, and why so, for reports: read after ``begin``."""

    slowed_by_copies: bool = False
    """If True, copies at the whole bandwidth of a GPU's memory slow down what arrives meanwhile.
    With ``overlap`` core then has a group written beside the next one with copies that leave
    a third of it.  Read after ``begin``."""

    def check(self, offer: Offer) -> None:
        """Refuse an offer that this transport can't take: the sender's options are others.

        Called for every offer before the replica says that it is ready: what it raises
        declines the offer, so that nothing has started and both sides get the error.

        Args:
            offer: its ``senders`` hold what the senders' ``describe`` returned.
        """

    @abstractmethod
    def set_plan(self, table: TensorTable, regions: Sequence[Region]) -> None:
        """Size slots, prepare reads: what all versions of this layout share."""

    def describe(self) -> bytes:
        """Opaque bytes for the senders' transports.  At most 1 MiB."""
        return b""

    @abstractmethod
    def begin(self, offer: Offer) -> None:
        """A version starts.  Raise what is wrong with it before the first byte moves."""

    def slot(self, group: int, nbytes: int) -> Tensor | None:
        """Memory into which a group must be fetched, or None when any memory will do.

        Returns:
            A contiguous uint8 tensor of at least ``nbytes``; valid until the
            next call for a group (with ``overlap``, until the one after).
        """
        return None

    def post(self, group: int, regions: Mapping[int, Tensor]) -> None:
        """Start to bring one group, without waiting for it; ``fetch`` completes it.

        Args:
            group: index into the table's groups.
            regions: exactly what ``fetch`` will be given.
        """

    def landed(self, group: int) -> bool:
        """Whether ``fetch`` of a group that was posted would return at once.

        Never waits.  Core may then ``fetch`` it before it posts the next one, to look at it
        while a GPU still writes the group before.  False is always right.
        """
        return False

    @abstractmethod
    def fetch(self, group: int, regions: Mapping[int, Tensor]) -> Sequence[Seal]:
        """Bring one group.

        Args:
            group: index into the table's groups.
            regions: by position in the plan's regions, the contiguous tensor to
                fill, of the region's shape and wire dtype.

        Returns:
            The seals of the owners of these regions.

        Raises:
            TransferTimeout: an owner didn't announce or deliver; names it.
            PeerLost: an owner is gone.
            VerificationError: the transport's own checksums don't match.
        """

    @abstractmethod
    def finish(self) -> None:
        """Every group has been taken: give back what the version held.

        From then on nothing of this version writes to memory that core handed over.
        """

    @abstractmethod
    def abort(self, error: BaseException) -> None:
        """Give the version up, and leave the transport fit for the next one.  Never waits long.

        Once it has returned, nothing writes to memory that core handed over for this version,
        from here or from a peer: threads and posted operations have ended.  What a library
        can't cancel lands in memory of the transport's own (``slot``), which is set aside until
        that is over.
        """

    def release_buffers(self) -> None:
        """Give back the memory that only moving bytes takes; see the sender's.

        ``set_plan`` and ``describe`` follow before the next ``begin``, also when the table
        and the regions are the same.
        """

    @abstractmethod
    def close(self) -> None:
        """Release everything.  Idempotent."""


class Backend(ABC):
    """A transport as a plug-in describes it: stateless, cheap to import.

    Importing the module that defines it must not import the transport's
    library; ``probe`` does.
    """

    api: ClassVar[int] = API
    name: ClassVar[str]
    summary: ClassVar[str]
    config: ClassVar[type[BackendConfig]]
    capabilities: ClassVar[Capabilities]

    def probe(self) -> None:
        """Return when the backend can run here.

        Raises:
            BackendUnavailable: with the reason and what to install.
        """

    @abstractmethod
    def open_sender(self, context: Context) -> SenderTransport:
        """The transport of one trainer rank."""

    @abstractmethod
    def open_receiver(self, context: Context) -> ReceiverTransport:
        """The transport of one inference rank."""


def checked_description(description: bytes) -> bytes:
    """What a transport says of itself, if it may travel in a record."""
    if len(description) > MAX_DESCRIPTION:
        raise PluginError(
            f"a transport describes itself with {len(description)} bytes, more than "
            f"{MAX_DESCRIPTION}: put large data where the backend's peers can fetch it"
        )
    return description


def decode_message(payload: bytes, kind: type[M], who: str) -> M:
    """What another process sent or described, as the msgspec type that says what is valid.

    Args:
        payload: msgpack.
        who: sent it, for the error.

    Raises:
        TransferError: it can't be read, or isn't valid; names ``who``.
    """
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise TransferError(
            f"what {who} sent can't be read ({error}): run one weightwire version on both sides"
        ) from error
