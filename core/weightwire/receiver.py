"""``WeightReceiver``: every inference rank's handle."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any, Self

import msgspec
import torch.distributed
from torch import Tensor, nn

from weightwire.config import BackendChoice
from weightwire.contract import Context, Offer, Policy, ReceiverTransport
from weightwire.deadline import Deadline, Watch
from weightwire.errors import (
    HandleError,
    SessionError,
    TableMismatch,
    WeightWireError,
)
from weightwire.handle import Handle, close_all, ranks_of
from weightwire.lifecycle import (
    Commit,
    Fetch,
    Install,
    Prepare,
    ReceiverMachine,
    Rollback,
)
from weightwire.options import ReceiverOptions, make_options
from weightwire.pipeline import FetchPlan, combine
from weightwire.plugins import registry
from weightwire.report import Phases, Report, VersionRecord
from weightwire.session import keys, membership
from weightwire.session.agreement import Agreement
from weightwire.session.membership import LeaseKeeper, LeaseObserver, Member
from weightwire.session.records import Applied, ErrorInfo, RankReport
from weightwire.session.session import Session
from weightwire.table import TensorTable
from weightwire.targets import WeightTarget, as_target
from weightwire.waiting import Act, Run, Steps, drive

__all__ = ["WeightReceiver", "open_receiver"]

_GO, _AGAIN = b"go", b"again"
_FOLLOWERS_GRACE = 0.3
"""Seconds that other ranks wait longer than rank 0, to hear its own timeout."""


class WeightReceiver(Handle):
    """Receives policy versions; made by ``open_receiver``, used on every inference rank alike.

    ``receive`` is ``begin``, ``fetch`` and ``commit``; an engine that must pause,
    finalise and resume in between calls the three itself.
    """

    def __init__(
        self,
        backend: BackendChoice,
        session: str,
        target: nn.Module | Mapping[str, Tensor] | WeightTarget,
        receiver_id: str,
        options: ReceiverOptions,
    ) -> None:
        self._options = options
        self._rank, self._world_size = options.rank, options.world_size
        self._id = keys.validate_member_id(receiver_id)
        self._target = as_target(target)
        super().__init__("receiver", backend, options.timeout)
        self._url = session
        self._version: int | None = None
        self._digest = ""
        deadline = Deadline(options.open_timeout)
        self._watch.start(deadline)
        self._open(deadline)

    # ---------------------------------------------------------------------- opening

    def _open(self, deadline: Deadline) -> None:
        self._session = Session.open(self._url, deadline=deadline, token=self._options.token)
        self._plan: FetchPlan | None = None
        self._table_digest = ""
        self._attempt: _Attempt | None = None
        with contextlib.ExitStack() as undo:
            undo.callback(self._session.close)
            self._observer = LeaseObserver(self._session)
            self._member = self._join()
            self._keeper = LeaseKeeper(
                self._session, self._member, self._look_around, renew=self._rank == 0
            )
            self._keeper.start()
            undo.callback(self._keeper.stop)
            self._agreement = Agreement(self._session, self._member, self._rank)
            self._transport = self._open_transport()
            self._machine = ReceiverMachine(
                self._session, self._member, self._observer, self._backend.capabilities
            )
            undo.pop_all()

    def _join(self) -> Member:
        kind = f"receivers/{self._id}"
        if self._rank != 0:
            return drive(
                membership.join(
                    self._session,
                    kind,
                    rank=self._rank,
                    world_size=self._world_size,
                    member_id=self._id,
                ),
                self._watch,
            )
        member = drive(
            membership.claim(
                self._session,
                self._observer,
                kind,
                member_id=self._id,
                world_size=self._world_size,
                backend=self._backend.name,
                lease_ttl=self._options.lease_ttl,
            ),
            self._watch,
        )
        if self._world_size > 1:
            keeper = LeaseKeeper(self._session, member)
            keeper.start()
            try:
                drive(membership.confirm(self._session, member), self._watch)
            finally:
                keeper.stop()
        return member

    def _open_transport(self) -> ReceiverTransport:
        return self._backend.open_receiver(
            Context(
                config=self._config,
                session_url=self._session.url,
                session_id=self._session.id,
                session_dir=self._session.store.directory,
                rank=self._rank,
                world_size=self._world_size,
                member_id=self._id,
                incarnation=self._member.incarnation,
                overlap=self._options.overlap,
                watch=self._watch,
            )
        )

    def _rejoin_if_replaced(self) -> None:
        """A restarted ``tcp`` sender serves a new session: join that one.

        What the target holds belongs to a session that is gone: it counts as
        nothing until a version of the new one is applied.
        """
        if not self._session.is_replaced():
            return
        self._keeper.stop()
        self._transport.close()
        self._session.close()
        self._version = None
        self._open(self._watch.deadline)

    # ---------------------------------------------------------------------- queries

    @property
    def receiver_id(self) -> str:
        return self._id

    @property
    def version(self) -> int | None:
        """The version that this replica wholly holds; None while it holds none, or a mixture."""
        return self._version

    @property
    def tainted(self) -> str | None:
        """Why the target is mixed, until a full sync succeeds; else None."""
        info = self._machine.tainted
        return info.message if info is not None else None

    def poll(self) -> int | None:
        """The version on offer that ``receive`` would take now, or None.  Never waits for peers."""
        with self._call(None):
            self._rejoin_if_replaced()
            record = self._machine.newest_offer()
            return record.offer.policy.version if record is not None else None

    # ---------------------------------------------------------------------- receiving

    def receive(self, timeout: float | None = None) -> Report:
        """Take the newest offer and apply it; waits if there is none.

        Args:
            timeout: seconds, by default those given to ``open_receiver``.

        Returns:
            This rank's report; ``version`` now names what it applied.

        Raises:
            TransferTimeout: no offer, or no bytes, within the timeout.
            TableMismatch: the trainer's tensors aren't the target's; nothing changed.
            PeerLost: the sender died or aborted; see ``tainted``.
            VerificationError: bytes arrived that aren't sent; see ``tainted``.
            HandleError: this receiver is closed, forked or busy.
        """
        with self._call(timeout):
            return self._receive()

    async def areceive(self, timeout: float | None = None) -> Report:
        """``receive`` for asyncio: the event loop goes on; cancelling aborts the version."""
        return await self._in_thread(self._receive, timeout)

    def _receive(self) -> Report:
        self._begin()
        self._fetch()
        return self._commit()

    def begin(self, timeout: float | None = None) -> Offer:
        """Take the newest offer, plan it, and wait until its transfer has started.

        The target still holds its old version; the engine pauses after this.
        The timeout covers ``fetch`` and ``commit`` too.
        """
        with self._call(timeout):
            return self._begin()

    def fetch(self) -> None:
        """Bring and verify every group, and write it into the target."""
        with self._resumed():
            self._fetch()

    def commit(self) -> Report:
        """Finish the target on every rank, and report the version as applied."""
        with self._resumed():
            return self._commit()

    def abort(self, reason: str = "the receiver gave the version up") -> None:
        """Give up a version that was begun and not committed; the target is rolled back."""
        with self._resumed():
            self._give_up(HandleError(reason))

    @contextlib.contextmanager
    def _resumed(self) -> Any:
        """A later part of a call: the same deadline, no new one."""
        self._check_usable()
        if not self._busy.acquire(blocking=False):
            raise HandleError("this receiver is busy with another call: wait for it")
        try:
            yield
        finally:
            self._leave()

    def _begin(self) -> Offer:
        if self._attempt is not None:
            self._give_up(HandleError("begin() was called again before commit()"))
        self._rejoin_if_replaced()
        self._attempt = attempt = _Attempt(self._version)
        try:
            if self._rank == 0:
                run = Run(self._machine.receive(), self._watch, self._perform)
                attempt.offer = run.until(Install).offer
                attempt.run = run
                self._agreement.tell("go", _GO)
            else:
                attempt.offer = drive(self._follow_begin(attempt), self._watch_followers())
        except BaseException as error:
            self._attempt = None
            if self._rank == 0:
                with contextlib.suppress(WeightWireError):
                    self._tell_failure(attempt, error)
            self._report_failure(attempt, error)
            raise
        assert attempt.offer is not None  # noqa: S101 - both branches set it
        return attempt.offer

    def _fetch(self) -> None:
        attempt = self._running("fetch")
        try:
            if attempt.run is not None:
                attempt.run.until(Commit)
            else:
                drive(self._fetch_on_all(attempt), self._watch)
            attempt.fetched = True
        except BaseException as error:
            self._end_failed(attempt, error)
            raise

    def _commit(self) -> Report:
        attempt = self._running("commit")
        if not attempt.fetched:
            raise HandleError("commit() before fetch(): fetch the version first")
        try:
            if attempt.run is not None:
                attempt.run.finish()
            else:
                drive(self._commit_on_all(attempt), self._watch)
        except BaseException as error:
            self._end_failed(attempt, error)
            raise
        self._attempt = None
        policy = attempt.policy
        self._version = policy.version
        report = self._report(attempt, policy)
        self._notify("weightwire_applied", policy.version, report=report)
        return report

    def _give_up(self, error: BaseException) -> None:
        """Raise ``error`` inside the running attempt, if there is one."""
        attempt = self._attempt
        if attempt is None:
            return
        self._watch.start(Deadline(self._timeout))
        if attempt.run is not None:
            with contextlib.suppress(type(error)):
                attempt.run.fail(error)
        self._end_failed(attempt, error)

    def _running(self, call: str) -> _Attempt:
        if self._attempt is None:
            raise HandleError(f"{call}() without begin(): begin a version first")
        return self._attempt

    # ---------------------------------------------------------------------- rank 0's acts

    def _perform(self, act: Act) -> object:
        attempt = self._attempt
        assert attempt is not None  # noqa: S101 - acts happen within an attempt
        match act:
            case Prepare(offer):
                return self._perform_prepare(attempt, offer)
            case Install():
                return None
            case Fetch():
                return drive(self._fetch_on_all(attempt), self._watch)
            case Commit():
                return drive(self._commit_on_all(attempt), self._watch)
            case Rollback(error):
                return self._roll_back(attempt, error)
        raise TypeError(f"a receiver doesn't perform {act!r}")

    def _perform_prepare(self, attempt: _Attempt, offer: Offer) -> tuple[bytes, ...]:
        if attempt.offer is not None:
            self._agreement.tell("go", _AGAIN)
        attempt.reset(offer)
        self._agreement.next_round()
        attempt.told = True
        self._agreement.tell("offer", msgspec.msgpack.encode(offer))
        return drive(self._prepare_on_all(attempt, offer), self._watch)

    # ---------------------------------------------------------------------- every rank

    def _prepare_on_all(self, attempt: _Attempt, offer: Offer) -> Steps[tuple[bytes, ...]]:
        error: BaseException | None = None
        described = b""
        with attempt.phases.timed("ready"):
            try:
                self._prepare(offer)
                described = self._transport.describe()
            except Exception as caught:
                error = caught
            return (yield from self._agreement.agree("prepared", described, error))

    def _prepare(self, offer: Offer) -> None:
        if offer.table_digest == self._table_digest:
            return
        payload = self._session.get_blob(offer.table_digest)
        if payload is None:
            raise SessionError(
                f"the tensor table of {offer.policy} isn't in the session: was it deleted? "
                "send a new version"
            )
        table = TensorTable.decode(payload)
        if len(offer.senders) != table.world_size:
            raise TableMismatch(
                f"{offer.policy} names {len(offer.senders)} sender ranks, its table "
                f"{table.world_size}: run one weightwire version on both sides"
            )
        self._table_digest = ""
        regions = tuple(self._target.plan(table))
        self._transport.set_plan(table, regions)
        self._plan = FetchPlan(table, regions)
        self._table_digest = offer.table_digest

    def _fetch_on_all(self, attempt: _Attempt) -> Steps[None]:
        assert self._plan is not None  # noqa: S101 - prepared
        assert attempt.offer is not None  # noqa: S101 - begun
        offer = attempt.offer
        self._version = None
        error: BaseException | None = None
        digest = 0
        try:
            self._transport.begin(offer)
            attempt.dirty = True
            self._target.begin(offer.policy.version)
            digest = self._plan.fetch(
                self._transport,
                self._target,
                self._backend.capabilities,
                version=offer.policy.version,
                verify=offer.verify,
                watch=self._watch,
                phases=attempt.phases,
            )
        except BaseException as caught:
            if self._agreement.alone:
                raise
            error = caught
        payload = digest.to_bytes(8, "little")
        digests = yield from self._agreement.agree("fetched", payload, error)
        attempt.digest = digest
        attempt.total = sum(int.from_bytes(part, "little") for part in digests) & ((1 << 64) - 1)

    def _commit_on_all(self, attempt: _Attempt) -> Steps[Applied]:
        assert attempt.offer is not None  # noqa: S101 - begun
        assert self._plan is not None  # noqa: S101 - prepared
        error: BaseException | None = None
        try:
            with attempt.phases.timed("finalize"):
                self._target.commit()
        except BaseException as caught:
            if self._agreement.alone:
                raise
            error = caught
        with attempt.phases.timed("commit"):
            yield from self._agreement.agree("committed", b"", error)
            # Rank 0 reports the version as applied only when the others need no record more.
            self._agreement.acknowledge("settled")
            if self._rank == 0:
                yield from self._agreement.acknowledged("settled")
        attempt.committed = True
        return Applied(
            self._member.incarnation,
            nbytes=self._plan.nbytes,
            seconds=time.perf_counter() - attempt.began,
            digest=combine(attempt.total, attempt.offer.verify),
        )

    def _roll_back(self, attempt: _Attempt, error: BaseException) -> bool:
        """Undo on this rank; True only if every rank's target is what it was."""
        restored = True
        with contextlib.suppress(Exception):
            self._transport.abort(error)
        if attempt.dirty:
            try:
                restored = not attempt.committed and bool(self._target.rollback(error))
            except Exception as failure:
                error.add_note(f"rolling back failed too: {failure}")
                restored = False
        if self._agreement.alone:
            return restored
        report = RankReport(b"\1" if restored else b"\0")
        try:
            reports = drive(
                self._agreement.gather("rolled-back", report), self._watch_followers(renew=True)
            )
        except WeightWireError:
            return False
        return all(part.payload == b"\1" for part in reports)

    # ---------------------------------------------------------------------- other ranks

    def _follow_begin(self, attempt: _Attempt) -> Steps[Offer]:
        while True:
            self._agreement.next_round()
            offer = msgspec.msgpack.decode((yield from self._agreement.hear("offer")), type=Offer)
            attempt.reset(offer)
            yield from self._prepare_on_all(attempt, offer)
            if (yield from self._agreement.hear("go")) == _GO:
                return offer

    def _watch_followers(self, *, renew: bool = False) -> Watch:
        """A watch that outlasts rank 0's, so that its reason is heard rather than our own."""
        watch = Watch()
        left = self._watch.deadline.remaining()
        watch.start(Deadline(left + (1.0 if renew else _FOLLOWERS_GRACE)))
        return watch

    def _tell_failure(self, attempt: _Attempt, error: BaseException) -> None:
        if not attempt.told:
            self._agreement.next_round()
            self._agreement.tell("offer", b"", error)
        self._agreement.tell("go", b"", error)

    # ---------------------------------------------------------------------- outcomes

    def _end_failed(self, attempt: _Attempt, error: BaseException) -> None:
        self._attempt = None
        if self._rank != 0:
            restored = self._roll_back(attempt, error)
            self._machine.tainted = None if restored else ErrorInfo.of(error)
            self._version = attempt.before if restored else None
        else:
            serving = self._machine.serving
            self._version = serving.version if serving is not None else None
        self._report_failure(attempt, error)

    def _report_failure(self, attempt: _Attempt, error: BaseException) -> None:
        version = attempt.offer.policy.version if attempt.offer is not None else -1
        if attempt.offer is not None:
            self._notify("weightwire_aborted", version, error=error)

    def _report(self, attempt: _Attempt, policy: Policy) -> Report:
        assert self._plan is not None  # noqa: S101 - prepared
        assert attempt.offer is not None  # noqa: S101 - begun
        return Report(
            role="receiver",
            backend=self.backend,
            version=policy.version,
            attempt=policy.attempt,
            incarnation=policy.incarnation,
            nbytes=self._plan.nbytes,
            seconds=time.perf_counter() - attempt.began,
            phases=dict(attempt.phases.seconds),
            digest=combine(attempt.digest, attempt.offer.verify),
            path=f"{self.backend} ({self._backend.capabilities.flow})",
            roster=attempt.offer.roster,
        )

    def _notify(
        self,
        hook: str,
        version: int,
        *,
        report: Report | None = None,
        error: BaseException | None = None,
    ) -> None:
        if self._rank == 0:
            record = VersionRecord(self._session.url, "receiver", self._id, version, report, error)
            registry().notify(hook, record)

    def _look_around(self) -> None:
        """On the lease's thread: end a running transfer whose sender is gone."""
        attempt = self._attempt
        if attempt is None or attempt.offer is None or self._backend.capabilities.flow == "store":
            return
        failure = self._machine.sender_failure(attempt.offer)
        if failure is not None:
            self._watch.fail(failure)

    # ---------------------------------------------------------------------- closing

    def close(self) -> None:
        """Leave the session and release everything.  Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._watch.cancel("the receiver was closed")
        with self._busy:  # a call on another thread ends first
            close_all(
                lambda: self._give_up(HandleError("the receiver was closed before commit()")),
                self._keeper.stop,
                self._transport.close,
                self._say_goodbye,
                self._session.close,
            )

    def _say_goodbye(self) -> None:
        if self._rank == 0:
            membership.leave(self._session, self._member)

    def __enter__(self) -> Self:
        self._check_usable()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Attempt:
    """One version on its way into the target."""

    def __init__(self, before: int | None) -> None:
        self.before = before
        self.offer: Offer | None = None
        self.run: Run[Policy] | None = None
        self.told = False
        self.dirty = False
        self.fetched = False
        self.committed = False
        self.digest = 0
        self.total = 0
        self.phases = Phases()
        self.began = time.perf_counter()

    def reset(self, offer: Offer) -> None:
        """A (newer) offer was taken: its clock starts now."""
        self.offer = offer
        self.phases = Phases()
        self.began = time.perf_counter()

    @property
    def policy(self) -> Policy:
        assert self.offer is not None  # noqa: S101 - begun
        return self.offer.policy


def open_receiver(
    backend: BackendChoice,
    *,
    session: str,
    target: nn.Module | Mapping[str, Tensor] | WeightTarget,
    receiver_id: str,
    rank: int | None = None,
    world_size: int | None = None,
    group: torch.distributed.ProcessGroup | None = None,
    token: str | None = None,
    overlap: bool = False,
    lease_ttl: float = 10.0,
    timeout: float = 600.0,
    open_timeout: float = 60.0,
) -> WeightReceiver:
    """Open this inference rank's receiver.

    Args:
        backend: a name, ``{"backend": name, **options}``, or ``(name, config)``; the sender's.
        session: URL of the session.
        target: module, mapping of names to tensors to fill in place, or ``WeightTarget``.
        receiver_id: names this replica in the session; unique among live replicas.
        rank, world_size: this rank among the replica's; by default the only one.
        group: a process group to take rank and world size from; it isn't used otherwise.
        token: shared secret; by default the environment's ``WEIGHTWIRE_TOKEN``.
        overlap: two slots instead of one.
        lease_ttl: seconds of silence after which this replica counts as dead.
        timeout: seconds for a ``receive``.
        open_timeout: seconds for reaching the session.

    Raises:
        ConfigError: an argument is wrong.
        BackendNotFound: nothing installed has this name.
        BackendUnavailable: the backend can't run here.
        SessionError: the session can't be reached, or a live replica has this id.
    """
    rank, world_size = ranks_of(rank, world_size, group)
    options = make_options(
        ReceiverOptions,
        rank=rank,
        world_size=world_size,
        token=token,
        overlap=overlap,
        lease_ttl=lease_ttl,
        timeout=timeout,
        open_timeout=open_timeout,
    )
    return WeightReceiver(backend, session, target, receiver_id, options)
