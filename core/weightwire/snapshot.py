"""Late receivers of a backend that serves live ones: from copies in the trainer's host memory.

With ``snapshot="host"`` every trainer rank keeps a copy of its shards as they were in the
newest finished version, in the dtypes of the wire.  A second sender of the same backend, in a
session of its own inside the session, serves them on a thread of its own: the thread that
trains isn't needed for it.

A replica that serves nothing *asks*; rank 0 then *calls* the other ranks to a version of
that second session.  Its number counts calls: which policy version it is, the call says.  A
rank takes part only while its copies are of that version, and rank 0 calls only when all of
them have said so.  Copies are overwritten only while none of them is being sent: a transfer
that is under way gets a moment, and is then ended.  Whoever reads it is told, and asks again.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import torch
from msgspec import Meta
from torch import Tensor

from weightwire.config import BackendChoice
from weightwire.contract import Backend, BackendConfig, Offer
from weightwire.copying import copy_all
from weightwire.errors import ConfigError, SessionError, UnsupportedOperation, WeightWireError
from weightwire.hostmemory import available_nbytes
from weightwire.placements import LocalShard
from weightwire.session.lease import LeaseObserver, Member
from weightwire.session.membership import live_members
from weightwire.session.records import Record
from weightwire.session.session import Session
from weightwire.sources import Resolved, Resolver, Spec, WeightSource, WireRules
from weightwire.streaming import StreamingSource
from weightwire.table import DTYPES
from weightwire.views import View

if TYPE_CHECKING:
    from weightwire.sender import WeightSender

__all__ = [
    "ANY_LAG",
    "SESSION",
    "Call",
    "HostCopies",
    "HostSnapshot",
    "SnapshotAsker",
    "inner_choice",
]

log = logging.getLogger("weightwire")

SESSION = "snapshot"
"""The second session's place in the first."""

_LOOK_SECONDS = 0.1
_MOMENT = 5.0
"""Seconds that a transfer gets to end before the copies that it reads are overwritten."""
_END_SECONDS = 60.0
ANY_LAG = 1 << 40
"""Whoever asked and isn't ready in time is left behind: the others don't wait for it."""
_CALL = "call"

_Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class Call(Record, frozen=True):
    """A version of the second session, and what it is.

    Attributes:
        incarnation: of the second session's sender.
        serial: its version number there.
        version: the policy version that its bytes are.
    """

    incarnation: _Count
    serial: _Count
    version: _Count


class _Ask(Record, frozen=True):
    """A replica serves nothing, and waits."""

    incarnation: _Count


class _Held(Record, frozen=True):
    """What a rank's copies are; None while they are being overwritten."""

    incarnation: _Count
    version: _Count | None


def inner_choice(backend: Backend, config: BackendConfig) -> BackendChoice | None:
    """The backend of the second session, or None where no snapshot is asked for.

    Raises:
        UnsupportedOperation: the backend can't serve one.
    """
    if getattr(config, "snapshot", "none") != "host":
        return None
    capabilities = backend.capabilities
    if capabilities.flow not in ("pull", "push") or not capabilities.elastic:
        raise UnsupportedOperation(
            f"backend {backend.name!r} can't serve a snapshot: its receivers aren't served one by "
            "one; leave snapshot out, or use catch_up"
        )
    update: dict[str, object] = {"snapshot": "none"}
    if "zero_copy" in type(config).model_fields:
        # Staged: a reader that stands still never sees copies that are overwritten.
        update["zero_copy"] = False
    return (backend.name, config.model_copy(update=update))


class HostCopies(WeightSource):
    """A trainer rank's tensors as they were, in host memory.

    Args:
        source: read once, for its sizes; memory for all of it is taken at once.

    Raises:
        ConfigError: there isn't that much memory.
        UnsupportedOperation: the source yields its tensors one by one.
    """

    def __init__(self, source: WeightSource, rules: WireRules) -> None:
        if isinstance(source, StreamingSource):
            raise UnsupportedOperation(
                "snapshot='host' needs a source whose tensors are there at once, a StreamingSource "
                "yields them one by one: use catch_up"
            )
        self._spec: Spec | None = None
        self._copies: dict[str, Tensor] = {}
        self._given: dict[str, LocalShard] = {}
        self._views: tuple[View, ...] = ()
        resolved = Resolver(source, rules).resolve()
        self._fit(resolved.spec)
        del resolved

    @property
    def nbytes(self) -> int:
        return sum(copy.nbytes for copy in self._copies.values())

    def tensors(self) -> Mapping[str, Tensor | LocalShard]:
        return self._given

    def views(self, given: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> Sequence[View]:
        return self._views

    def take(self, resolved: Resolved) -> None:
        """Copy what the source holds now."""
        self._fit(resolved.spec)
        names = list(self._copies)
        copy_all([self._copies[name] for name in names], [resolved.tensors[n] for n in names])
        self._views = resolved.views

    def _fit(self, spec: Spec) -> None:
        if self._spec is not None and (spec.entries, spec.ties) == (
            self._spec.entries,
            self._spec.ties,
        ):
            return
        self._spec, self._copies, self._given = None, {}, {}
        wanted = sum(
            math.prod(entry.shards[0].sizes) * DTYPES[entry.dtype].itemsize
            for entry in spec.entries
        )
        available = available_nbytes()
        if available is not None and wanted > available:
            raise ConfigError(
                f"snapshot='host' takes {wanted} bytes of host memory on this rank, {available} "
                "are available: leave it out and use catch_up, or give the trainer more memory"
            )
        for entry in spec.entries:
            (shard,) = entry.shards
            copy = torch.empty(shard.sizes, dtype=DTYPES[entry.dtype])
            copy.view(-1).view(torch.uint8).zero_()  # the memory is had now or never
            self._copies[entry.name] = copy
            self._given[entry.name] = LocalShard(copy, entry.shape, shard.offsets)
        for alias, carrier in spec.ties.items():
            self._given[alias] = self._given[carrier]
        self._spec = spec


class HostSnapshot:
    """One trainer rank's part in serving the newest finished version to whoever asks.

    Args:
        copies: what ``sender`` sends.
        sender: in the second session.
        session: the second session.
    """

    def __init__(
        self,
        copies: HostCopies,
        sender: WeightSender,
        session: Session,
        rank: int,
        world_size: int,
    ) -> None:
        self._copies = copies
        self._sender = sender
        self._session = session
        self._observer = LeaseObserver(session)
        self._rank = rank
        self._world_size = world_size
        self._version: int | None = None
        self._serial = 0
        self._sending = threading.Lock()
        self._stop = threading.Event()
        sender.offer_only_to(self._is_asking)
        self._thread = threading.Thread(target=self._run, name="weightwire-snapshot", daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------------- the training thread

    def take(self, version: int, resolved: Resolved) -> str:
        """Copy a finished version; says where it is, or why it isn't there."""
        try:
            self._await_end()
            try:
                self._version = None
                self._tell(None)
                self._copies.take(resolved)
                self._version = version
                self._tell(version)
            finally:
                self._sending.release()
        except WeightWireError as error:
            # The version is out all the same: only they have to wait for the next one.
            log.error("version %d isn't kept for late receivers: %s", version, error)
            return f"no snapshot: {error}"
        return f"host memory ({self._copies.nbytes} bytes)"

    def _await_end(self) -> None:
        """Take the copies for oneself."""
        if self._sending.acquire(timeout=_MOMENT):
            return
        self._sender.give_up("the snapshot is replaced by a newer version: receive again")
        if not self._sending.acquire(timeout=_END_SECONDS):
            raise SessionError(
                f"the snapshot's transfer doesn't end within {_END_SECONDS:g} s of being given up"
            )

    def _tell(self, version: int | None) -> None:
        self._session.write(f"held/{self._rank}", _Held(self._sender.incarnation, version))

    def close(self) -> None:
        """End what is being sent, and the thread."""
        self._stop.set()
        while self._thread.is_alive():
            self._sender.give_up("the sender was closed")
            self._thread.join(0.1)
        self._sender.close()

    # ---------------------------------------------------------------------- its own thread

    def _run(self) -> None:
        while not self._stop.wait(_LOOK_SECONDS):
            try:
                if self._rank == 0:
                    self._lead()
                else:
                    self._follow()
            except WeightWireError as error:
                log.info("a late receiver wasn't served: %s", error)
            except Exception:
                log.exception("a late receiver wasn't served")

    def _lead(self) -> None:
        version = self._version
        if version is None or not self._session.children("asks"):
            return
        alive = live_members(self._session, self._observer)
        if not any(self._is_asking(name, member) for name, member in alive.items()):
            return
        with self._sending:
            if self._version is None or not self._all_hold(self._version) or self._stop.is_set():
                return
            self._serial += 1
            call = Call(self._sender.incarnation, self._serial, self._version)
            self._session.write(_CALL, call)
            self._sender.send(self._serial, wait="applied")

    def _all_hold(self, version: int) -> bool:
        wanted = _Held(self._sender.incarnation, version)
        ranks = range(1, self._world_size)
        return all(self._session.read(f"held/{rank}", _Held) == wanted for rank in ranks)

    def _is_asking(self, receiver_id: str, member: Member) -> bool:
        ask = self._session.read(f"asks/{receiver_id}", _Ask)
        return ask is not None and ask.incarnation == member.incarnation

    def _follow(self) -> None:
        call = self._session.read(_CALL, Call)
        if (
            call is None
            or call.incarnation != self._sender.incarnation
            or call.serial <= self._serial
        ):
            return
        with self._sending:
            self._serial = call.serial
            if call.version == self._version and not self._stop.is_set():
                self._sender.send(call.serial, wait="applied")


class SnapshotAsker:
    """Rank 0 of a replica that serves nothing.

    Args:
        session: the second session.
    """

    def __init__(self, session: Session, receiver_id: str, incarnation: int) -> None:
        self._session = session
        self._key = f"asks/{receiver_id}"
        self._incarnation = incarnation
        self._asks = False

    def ask(self) -> None:
        if not self._asks:
            self._asks = True
            self._session.write(self._key, _Ask(self._incarnation))

    def withdraw(self) -> bool:
        """Whether it had asked."""
        if not self._asks:
            return False
        self._asks = False
        self._session.delete(self._key)
        return True

    def version_of(self, offer: Offer) -> int | None:
        """Which policy version an offer of the second session is, or None while nobody says."""
        call = self._session.read(_CALL, Call)
        policy = offer.policy
        if call is None or (call.incarnation, call.serial) != (policy.incarnation, policy.version):
            return None
        return call.version
