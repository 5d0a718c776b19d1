"""The process group of one membership epoch, and the two threads that use it.

Libraries block: what the group does runs on these threads, and the caller's
thread waits for it under its watch.  One of them posts, and waits for what must
come before it may post the next; the other waits until what was posted has
arrived, so that the next messages are under way by then.  Whoever gives up ends
what the threads are blocked in, so that they end, too.

Any failure drops the group whole, on every member: nothing that was on its way
can meet a later version.  The first to fail leaves its reason in the store; the
others, whose connections then end, give that reason instead of their own.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
import torch

from weightwire.contract import decode_message
from weightwire.deadline import Watch
from weightwire.errors import (
    BackendUnavailable,
    PeerLost,
    TableMismatch,
    TransferError,
    TransferTimeout,
    WeightWireError,
)
from weightwire_nccl.gloo import GlooWire
from weightwire_nccl.meeting import Client
from weightwire_nccl.nccl import NcclWire, use_own_stream
from weightwire_nccl.records import Hello, Member, Opening, digest_of
from weightwire_nccl.wire import Wire, WireBroken, WireLate, Work, nothing
from weightwire_nccl.witness import Witness
from weightwire_nccl.workers import Job, Worker

__all__ = ["Epoch"]

log = logging.getLogger("weightwire.nccl")

T = TypeVar("T")

_GRACE_SECONDS = 2.0
"""How much longer than the caller a thread waits: the caller knows better who is missing."""
_FORM_SECONDS = 30.0
"""For connecting, once all members have come: it can't be ended, should one stand still then."""
_CAUSE_SECONDS = 0.3
_PATIENCE = 1.0
"""Seconds after which a wait is witnessed; sooner under a short deadline."""
_JOIN_SECONDS = 0.4
"""For a thread to tell why, and again for it to end when it was hung up on: past a deadline."""
_HANG_UP_SECONDS = 0.2
_FIRST_PAUSE = 0.0001
_LAST_PAUSE = 0.01
_PROBE_TAG = 9


class Epoch:
    """A member's end of the group; not formed until ``enter``.

    Args:
        address: of this process, for the group's own connections.
        server: host and port of the store.
        gpu: index of this process's GPU, or None.

    Attributes:
        id: of the group that is formed, or empty.
        members: by rank in the group.
        generation: versions that the group has carried.
        formed_in: seconds that forming the group took.
    """

    def __init__(
        self, watch: Watch, address: str, server: tuple[str, int], gpu: int | None
    ) -> None:
        self._watch = watch
        self._gpu = gpu
        self._address = address
        self.server = server
        self.id = ""
        self.members: tuple[Member, ...] = ()
        self.rank = -1
        self.generation = 0
        self.formed_in = 0.0
        self.device = torch.device("cpu")
        self.failure: BaseException | None = None
        self._me = "a member"
        self._reason = ""
        self._client: Client | None = None
        self._second: Client | None = None
        self._control: GlooWire | None = None
        self._payload: Wire | None = None
        self._shared: dict[tuple[int, ...], Wire] = {}
        self._all_wires: list[Wire] = []
        self._giving_up = threading.Event()
        self._connecting = False
        self._failing = threading.Lock()
        name, ways = "weightwire-nccl", (self._refuse_late, self._failed)
        self._arriving = Worker(f"{name}-arriving", *ways, leave=nothing)
        self._posting = Worker(name, *ways, leave=self._leave)

    # ------------------------------------------------------------------ the caller's thread

    def submit(self, work: Callable[[], T]) -> Job[T]:
        """Have the posting thread do something, after all that it was given before."""
        return self._posting.submit(work)

    def wait(self, job: Job[T], what: str) -> T:
        """The job's result.

        Raises:
            TransferTimeout, PeerLost, ...: what the watch or the job says.
        """
        witness: Witness | None = None
        patience = time.monotonic() + min(_PATIENCE, self._watch.deadline.remaining() / 4)

        def rest(seconds: float) -> None:
            nonlocal witness
            late = not job.done.wait(seconds) and time.monotonic() > patience
            if late and witness is None and self._second is not None:
                witness = self._witness(self._second)

        def missing() -> Sequence[str]:
            ranks = (witness.silent if witness is not None else ()) or self._awaited()
            return self._names(ranks)

        try:
            self._watch.until(job.done.is_set, what, missing, rest=rest)
        finally:
            if witness is not None:
                witness.close()
        return job.outcome()

    def wait_settled(self, job: Job[Job[T]], what: str) -> T:
        """The result of what a posting leaves to be settled."""
        return self.wait(self.wait(job, what), what)

    def _awaited(self) -> Sequence[int]:
        """For whom this process waits: what is posted comes before what isn't yet."""
        return self._arriving.awaited or self._posting.awaited

    def _witness(self, client: Client) -> Witness:
        return Witness(
            client,
            f"epoch/{self.id}",
            self.rank,
            len(self.members),
            self._awaited,
        )

    def give_up(self, error: BaseException) -> None:
        """Drop the group; the members learn why.  Never waits long; idempotent."""
        if not self._giving_up.is_set():
            first = (str(error).splitlines() or [""])[0] or type(error).__name__
            self._give_up_for(f"{self._me} gave up: {first}")
        self._end()

    def _give_up_for(self, reason: str) -> None:
        self._reason = self._reason or reason
        self._giving_up.set()
        self._abort_wires()

    def _abort_wires(self) -> None:
        for wire in tuple(self._all_wires):
            wire.abort()

    def close(self) -> None:
        """Leave the group in good order: nothing is under way.  Idempotent."""
        self._end()

    def _end(self) -> None:
        self._posting.end()  # the other thread ends with it: it is given work until then
        # What the library itself connects to can't be hung up on: no use in waiting for that.
        patience = _HANG_UP_SECONDS if self._connecting else _JOIN_SECONDS
        if not self._connecting and self._posting.join(patience):
            return
        self._give_up_for(f"{self._me} closed its end")
        end = time.monotonic() + patience
        while time.monotonic() < end:
            if self._client is not None:
                self._client.hang_up()  # again: it retries while it connects
            if self._posting.join(_LAST_PAUSE):
                return
        # The library may still be connecting to a process that came and then stood still.
        log.warning("a group's threads haven't ended yet; they will within %g s", _FORM_SECONDS)

    # ------------------------------------------------------------------ the group's threads

    def settle_later(self, work: Callable[[], T]) -> Job[T]:
        """Have the other thread wait for what was posted, after all that was posted before."""
        return self._arriving.submit(work)

    def join(self, job: Job[T]) -> T:
        """On the posting thread: the outcome of what the other one does."""
        self._posting.awaited = ()
        if not job.done.wait(self._seconds()):
            who = ", ".join(self._names(self._arriving.awaited)) or "what travels"
            raise TransferTimeout(f"no sign of {who}: check that every member is alive")
        return job.outcome()

    def _refuse_late(self) -> None:
        if self.failure is not None:
            raise self.failure
        if self._giving_up.is_set():
            raise TransferError(self._reason)

    def _failed(self, error: BaseException) -> BaseException:
        """Drop the group because of ``error``; what the caller is told."""
        with self._failing:
            if self.failure is not None:
                return self.failure
            self.failure = error
            if not self._giving_up.is_set():
                first = (str(error).splitlines() or [""])[0]
                told = isinstance(error, PeerLost)  # names the one who failed already
                self._reason = first if told else f"{self._me} gave up: {first}"
        try:
            self._tell_reason()
        finally:
            self._abort_wires()
        return error

    def _tell_reason(self) -> None:
        client = self._client
        if self._reason and self.id and client is not None and client.store is not None:
            with contextlib.suppress(WeightWireError):
                client.first(f"why/{self.id}", self._reason)

    def _leave(self) -> None:
        if self._giving_up.is_set():
            self._tell_reason()
        self._arriving.end()
        if not self._arriving.join(_JOIN_SECONDS):  # closed with something under way
            self._give_up_for(f"{self._me} closed its end")
            self._arriving.join(_JOIN_SECONDS)
        self._drop_group()
        for client in (self._client, self._second):
            if client is not None:
                client.close()

    def _drop_group(self) -> None:
        for wire in self._all_wires:
            wire.close()
        self._all_wires.clear()
        self._shared.clear()
        self._control = self._payload = None
        self.id = ""

    @property
    def client(self) -> Client:
        """The connection to the store, made when it is first used."""
        if self._client is None:
            self._posting.awaited = (0,)
            self._client = Client(*self.server, "sender rank 0")
            self._client.connect(self._watch.deadline.remaining())
        return self._client

    def until(self, look: Callable[[], T | None], awaited: Callable[[], Sequence[int]]) -> T:
        """On the posting thread: look until there is something."""
        pause = _FIRST_PAUSE
        end = time.monotonic() + self._watch.deadline.remaining() + _GRACE_SECONDS
        while True:
            value = look()
            if value:
                return value
            self._posting.awaited = ranks = tuple(awaited())
            if self._giving_up.wait(pause):
                raise TransferError(self._reason)
            if time.monotonic() > end:
                raise TransferTimeout(f"no sign of {', '.join(self._names(ranks))}")
            pause = min(pause * 1.5, _LAST_PAUSE)

    def opening(self, key: str) -> Opening:
        """What the sender's rank 0 says of a version, once it has."""
        payload = self.until(lambda: self.client.peek(key), lambda: (0,))
        return decode_message(payload, Opening, "sender rank 0")

    def enter(self, opening: Opening, me: Member) -> None:
        """Form the group that ``opening`` names, unless this is it.

        Raises:
            TableMismatch: this process isn't one of the members, or another says it is.
            PeerLost, TransferTimeout: a member didn't come; names it.
        """
        if opening.epoch == self.id and opening.generation == self.generation + 1:
            self.generation += 1
            return
        if opening.generation != 1:
            raise TransferError(
                f"{me} isn't in the group {opening.epoch!r} any more: send the version again"
            )
        began = time.perf_counter()
        self._drop_group()
        places = [i for i, member in enumerate(opening.members) if member == me]
        if len(places) != 1:
            raise TableMismatch(
                f"{me} is {len(places)} times among the {len(opening.members)} members of "
                f"{opening.policy}: open each rank of a replica once, with its own rank"
            )
        self.members, self.rank, self._me = opening.members, places[0], str(me)
        self.id, self.generation = opening.epoch, 1
        if self._second is None:  # early: connecting to a server that stands still can't be ended
            second = Client(*self.server, "sender rank 0")
            second.connect(self._watch.deadline.remaining())
            self._second = second
        self._roll_call(opening, me)
        self._form(opening)
        self.formed_in = time.perf_counter() - began

    def _roll_call(self, opening: Opening, me: Member) -> None:
        """Every member says who it is; together they are the members, each once."""
        prefix = f"epoch/{opening.epoch}/hello"
        digest = digest_of(msgspec.msgpack.encode(opening))
        client = self.client
        mine = secrets.token_hex(8)  # a copy of this process has its nonce
        if client.first(f"{prefix}/{self.rank}/by", mine) != mine:
            self.id = ""  # the group of the one that came first goes on
            raise TableMismatch(f"two processes say that they are {me}: give each its own rank")
        client.put(f"{prefix}/{self.rank}", msgspec.msgpack.encode(Hello(me, digest)))
        absent = dict(enumerate(opening.members))

        def all_came() -> bool:
            for rank in tuple(absent):
                payload = client.peek(f"{prefix}/{rank}")
                if payload is None:
                    self._raise_cause()
                    return False
                member = absent.pop(rank)
                hello = decode_message(payload, Hello, str(member))
                if hello != Hello(member, digest):
                    raise TableMismatch(
                        f"{member} came to the group as {hello.member}, or to another version: "
                        "run one weightwire version on all sides"
                    )
            return True

        self.until(all_came, lambda: tuple(absent))

    def _form(self, opening: Opening) -> None:
        ranks = tuple(range(len(self.members)))
        self._control = self._gloo("control", ranks)
        if opening.library == "nccl":
            assert self._gpu is not None  # noqa: S101 - it said that it has one
            device = torch.device("cuda", self._gpu)
            # What a thread's stream waits for mustn't hold up the caller's.
            use_own_stream(device)
            self.join(self.settle_later(partial(use_own_stream, device)))
            self._payload, self.device = self._nccl("all", ranks, device), device
        else:
            self._payload, self.device = self._control, torch.device("cpu")

    def shared_wire(self, ranks: tuple[int, ...]) -> Wire:
        """A communicator of these members, the first of which is the root.

        Every one of them calls it, all in one order.
        """
        if ranks not in self._shared:
            name = "shared-" + digest_of(repr(ranks).encode())
            if self.device.type == "cuda":
                self._shared[ranks] = self._nccl(name, ranks, self.device)
            else:
                self._shared[ranks] = self._gloo(name, ranks)
        return self._shared[ranks]

    def _gloo(self, name: str, ranks: tuple[int, ...]) -> GlooWire:
        seconds = min(self._seconds(), _FORM_SECONDS)
        with self._forming(ranks):
            wire = GlooWire(
                self._substore(name), ranks.index(self.rank), len(ranks), self._address, seconds
            )
        self._keep(wire)
        return wire

    def _nccl(self, name: str, ranks: tuple[int, ...], device: torch.device) -> NcclWire:
        with self._forming(ranks):
            wire = NcclWire(self._substore(name), ranks.index(self.rank), len(ranks), device)
        self._keep(wire)
        return wire

    def _keep(self, wire: Wire) -> None:
        self._all_wires.append(wire)
        if self._giving_up.is_set():
            wire.abort()
            raise TransferError(self._reason)

    @contextlib.contextmanager
    def _forming(self, ranks: Sequence[int]) -> Iterator[None]:
        """The library connects these members; nothing ends that but its own timeout."""
        others = tuple(rank for rank in ranks if rank != self.rank)
        self._posting.awaited = others
        self._connecting = True
        try:
            with self.translated(*others):
                yield
        finally:
            self._connecting = False

    def _substore(self, name: str) -> Any:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # see meeting.py

        return PrefixStore(f"epoch/{self.id}/{name}", self.client.store)

    # ------------------------------------------------------------------ messages

    @property
    def control(self) -> GlooWire:
        if self._control is None:
            raise BackendUnavailable("the group isn't formed")
        return self._control

    @property
    def payload(self) -> Wire:
        if self._payload is None:
            raise BackendUnavailable("the group isn't formed")
        return self._payload

    def complete(self, work: Work, *peers: int) -> None:
        """On one of the threads: wait for an operation with these members.

        Raises:
            PeerLost: one of them is gone, or gave up; says which.
            TransferTimeout: nothing came.
        """
        worker = self._arriving if self._arriving.is_this else self._posting
        worker.awaited = peers
        with self.translated(*peers):
            work.wait(self._seconds())

    @contextlib.contextmanager
    def translated(self, *peers: int) -> Iterator[None]:
        """Errors of the wire, in weightwire's tree."""
        try:
            yield
        except WireLate as error:
            raise TransferTimeout(
                f"no message from {', '.join(self._names(peers))} in time: check that it is alive"
            ) from error
        except WireBroken as error:
            self._refuse_late()
            self._await_cause()
            lost = self._gone(peers) if len(peers) > 1 else peers
            who = " or ".join(self._names(lost or peers))
            raise PeerLost(
                f"{who} is gone (its connection ended): restart it, and send again\n{error}"
            ) from error

    def _names(self, peers: Sequence[int]) -> list[str]:
        if not self.members:
            return ["sender rank 0"]  # nobody else is known before the group is
        return [str(self.members[peer]) for peer in peers]

    def _seconds(self) -> float:
        return self._watch.deadline.remaining() + _GRACE_SECONDS

    def _await_cause(self) -> None:
        """Raise what another member said of its failure, if it says so soon."""
        end = time.monotonic() + _CAUSE_SECONDS
        while time.monotonic() < end and not self._giving_up.is_set():
            self._raise_cause()
            time.sleep(_LAST_PAUSE)

    def _raise_cause(self) -> None:
        cause = self.client.peek(f"why/{self.id}")
        if cause is not None:
            raise PeerLost(cause.decode("utf-8", "replace"))

    def _gone(self, peers: Sequence[int]) -> tuple[int, ...]:
        """Those to whom nothing can be sent any more; empty where that can't be told."""
        if self._control is None:
            return ()
        probe = torch.empty(1, dtype=torch.uint8)
        gone = []
        for peer in peers:
            try:
                self._control.send(probe, peer, _PROBE_TAG)
            except WireBroken:
                gone.append(peer)
        return tuple(gone)
