"""``WeightReceiver``: every inference rank's handle."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Self

import msgspec
from torch import Tensor, nn

from weightwire import catch_up as catching_up
from weightwire import snapshot as snapshots
from weightwire.config import BackendChoice
from weightwire.contract import Context, Offer, Policy, ReceiverTransport
from weightwire.deadline import Deadline, Watch, calling
from weightwire.errors import (
    AuthenticationError,
    ConfigError,
    HandleError,
    PeerLost,
    SessionError,
    TransferError,
    WeightWireError,
)
from weightwire.handle import Handle, close_all, slot_device
from weightwire.lifecycle.acts import Commit, Install
from weightwire.lifecycle.receiver import ReceiverMachine
from weightwire.options import ReceiverOptions
from weightwire.plugins import registry
from weightwire.replica import Attempt, Replica
from weightwire.report import Report, VersionRecord
from weightwire.session import keys, membership
from weightwire.session.agreement import Agreement
from weightwire.session.lease import Leader, LeaseObserver, Siblings
from weightwire.session.records import ErrorInfo
from weightwire.session.session import Session
from weightwire.targets import WeightTarget, as_target
from weightwire.waiting import Run, drive

__all__ = ["WeightReceiver"]

_RETURN_PAUSE = 0.1
_GOODBYE_SECONDS = 1.0
_RELEASE_SECONDS = 10.0


class WeightReceiver(Handle):
    """Receives policy versions; made by ``open_receiver``, used alike on every inference rank.

    ``receive`` is ``begin``, ``fetch`` and ``commit``; an engine that must pause,
    finalise and resume in between calls the three itself.
    """

    def __init__(
        self,
        backend: BackendChoice,
        session: str | Session,
        target: nn.Module | Mapping[str, Tensor] | WeightTarget,
        receiver_id: str,
        options: ReceiverOptions,
        *,
        part_of: Watch | None = None,
    ) -> None:
        self._options = options
        self._rank, self._world_size = options.rank, options.world_size
        self._id = keys.validate_member_id(receiver_id)
        self._target = as_target(target)
        super().__init__("receiver", backend, options.timeout, part_of)
        if options.catch_up is not None:
            catching_up.refuse_unfit(self._backend, options.catch_up)
        self._where = session
        self._version: int | None = None
        self._attempt: Attempt | None = None
        self._only: int | None = None  # a snapshot's: the one version that may be taken
        deadline = Deadline(options.open_timeout)
        self._start_watch(deadline)
        with calling(deadline):
            self._open(deadline)

    # ---------------------------------------------------------------------- opening

    def _open(self, deadline: Deadline) -> None:
        self._joined = False
        self._others: Leader | Siblings | None = None
        self._gone: SessionError | None = None
        self._session = self._open_session(self._where, deadline, self._options.token)
        with contextlib.ExitStack() as undo:
            undo.callback(self._session.close)
            self._observer = LeaseObserver(self._session)
            self._member, self._keeper = membership.enter(
                self._session,
                self._observer,
                self._watch,
                f"receivers/{self._id}",
                member_id=self._id,
                rank=self._rank,
                world_size=self._world_size,
                backend=self._backend.name,
                lease_ttl=self._options.lease_ttl,
                look_around=self._look_around,
                column_slices=self._target.column_slices,
            )
            undo.callback(self._say_goodbye)
            undo.callback(self._keeper.stop)
            siblings = None if self._rank else Siblings(self._session, self._member)
            self._others = siblings or Leader(self._observer, self._member)
            self._agreement = Agreement(self._session, self._member, self._rank, siblings)
            capabilities = self._backend.capabilities
            self._transport = self._open_transport()
            undo.callback(self._transport.close)
            self._replica = Replica(
                self._session,
                self._agreement,
                self._transport,
                self._target,
                capabilities,
                self._watch,
                overlap=self._options.overlap,
            )
            self._machine = ReceiverMachine(
                self._session, self._member, self._observer, capabilities
            )
            self._late = self._open_catch_up()
            if self._late is not None:
                undo.callback(self._late.close)
            self._asker = self._open_asker()
            undo.pop_all()
        self._joined = True

    def _open_catch_up(self) -> WeightReceiver | None:
        """The receiver of what was stored, or is kept, for those that come late."""
        choice, place, device = self._options.catch_up, catching_up.SESSION, None
        snapshot = snapshots.inner_choice(self._backend, self._config)
        if snapshot is not None:
            if choice is not None:
                raise ConfigError("snapshot='host' and catch_up serve late receivers: choose one")
            choice, place, device = snapshot, snapshots.SESSION, "cpu"
        if choice is None:
            return None
        return WeightReceiver(
            choice,
            self._session.within(place),
            self._target,
            self._id,
            self._options.model_copy(update={"catch_up": None, "overlap": False, "device": device}),
            part_of=self._watch,
        )

    def _open_asker(self) -> snapshots.SnapshotAsker | None:
        """What asks the sender for its snapshot, where it keeps one."""
        late = self._late
        if late is None or self._options.catch_up is not None or self._rank != 0:
            return None
        return snapshots.SnapshotAsker(late._session, self._id, late._member.incarnation)

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
                device=slot_device(self._options.device, self._target.device, self._backend),
            )
        )

    def _rejoin_if_replaced(self) -> None:
        """A restarted ``tcp`` sender serves a new session: join that one.

        What the target holds belongs to a session that is gone: it counts as
        nothing until a version of the new one is applied.
        """
        if self._joined and not self._session.is_replaced():
            return
        tainted = self._machine.tainted
        self._version = None
        if self._joined:
            self._joined = False
            late = [self._late.close] if self._late is not None else []
            close_all(*late, self._keeper.stop, self._transport.close, self._session.close)
            if self._gone is not None:
                self._watch.forgive(self._gone)  # what the keeper saw is why we are here
        try:
            self._open(self._watch.deadline)
        finally:  # a new machine doesn't know of it, and may be there though opening failed
            self._machine.tainted = tainted

    def _await_replacement(self, error: SessionError) -> None:
        """Return when the store that failed with ``error`` may hold another session.

        Raises:
            SessionError: ``error``, because the store is there and the session is ours.
            TransferTimeout: nobody serves the store any more.
        """
        self._watch.forgive(error)
        if not self._joined:  # joining the one that came failed: it is tried again
            self._watch.check("session", ("the sender that serves it",))
            self._watch.pause(_RETURN_PAUSE)
            return
        while True:
            try:
                if self._session.is_replaced():
                    return
            except AuthenticationError:
                raise
            except SessionError:
                self._watch.check("session", ("the sender that serves it",))
                self._watch.pause(_RETURN_PAUSE)
            else:
                raise error

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

    def holds(self, version: int) -> bool:
        """Whether this replica wholly holds ``version`` or a later one, and it still counts.

        False while a newer attempt of it is on offer, and for a version of an
        earlier sender that the running one didn't take up.
        """
        keys.validate_version(version)
        self._check_usable()
        return self._version is not None and self._machine.holds(version)

    def poll(self) -> int | None:
        """The version on offer that ``receive`` would take now, or None.  Never waits for peers."""
        self._check_usable()
        with contextlib.nullcontext() if self._attempt is not None else self._call(None):
            if self._attempt is None:
                self._rejoin_if_replaced()
            record = self._machine.newest_offer()
            return record.offer.policy.version if record is not None else None

    # ---------------------------------------------------------------------- receiving

    def receive(self, timeout: float | None = None, *, minimum: int = 0) -> Report:
        """Take the newest offer and apply it; waits if there is none.

        Args:
            timeout: seconds, by default those given to ``open_receiver``.
            minimum: leave offers of lower versions alone, and wait for this one.

        Returns:
            This rank's report; ``version`` now names what it applied.

        Raises:
            TransferTimeout: no offer, or no bytes, within the timeout.
            TableMismatch: the trainer's tensors aren't the target's; nothing changed.
            PeerLost: the sender died or aborted; see ``tainted``.
            VerificationError: bytes arrived that aren't sent; see ``tainted``.
            HandleError: this receiver is closed, forked or busy.
        """
        keys.validate_version(minimum)
        with self._call(timeout):
            return self._receive(minimum)

    async def areceive(self, timeout: float | None = None, *, minimum: int = 0) -> Report:
        """``receive`` for asyncio: the event loop goes on; cancelling aborts the version."""
        keys.validate_version(minimum)
        return await self._in_thread(lambda: self._receive(minimum), timeout)

    def _receive(self, minimum: int) -> Report:
        self._begin(minimum)
        self._fetch()
        return self._commit()

    def begin(self, timeout: float | None = None, *, minimum: int = 0) -> Offer:
        """Take the newest offer, plan it, and wait until its transfer has started.

        The target still holds its old version; the engine pauses after this.
        The timeout covers ``fetch`` and ``commit`` too.
        """
        keys.validate_version(minimum)
        with self._call(timeout):
            return self._begin(minimum)

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
            self._watch.start(Deadline(self._timeout))
            self._give_up(HandleError(reason))

    def invalidate(self, reason: str) -> None:
        """The target's memory was overwritten or freed by somebody else.

        From here on this replica holds no version, and is tainted, until a full sync succeeds.
        Call it on every rank, before the memory goes.

        Args:
            reason: for ``tainted`` and ``weightwire inspect``.

        Raises:
            HandleError: amid a version, or this receiver is closed, forked or busy.
            SessionError: the session couldn't be told; this handle knows all the same.
        """
        with self._between("invalidate"):
            self._version = None
            if self._rank == 0:
                self._machine.lose(TransferError(reason))
            else:
                self._machine.serving = None
                self._machine.tainted = ErrorInfo.of(TransferError(reason))

    def release_buffers(self) -> None:
        """Give back the memory that receiving takes, until the next version makes it again.

        For an engine that shares its GPU or host with a trainer: receive slots, their
        registrations and what the target keeps for the next version go.  The target's weights
        stay, and so does ``version``.  Each rank calls it for itself, or doesn't.  The next
        version is planned anew, and costs what the first one did.

        Raises:
            HandleError: amid a version, or this receiver is closed, forked or busy.
        """
        with self._between("release_buffers"):
            self._release_buffers()

    @contextlib.contextmanager
    def _between(self, call: str) -> Iterator[None]:
        """A call that wants no version under way."""
        self._take()
        try:
            if self._attempt is not None:
                raise HandleError(
                    f"{call}() amid {self._attempt.policy}: commit() or abort() it first"
                )
            self._watch.start(Deadline(self._timeout))
            with calling(self._watch.deadline):
                yield
        finally:
            self._leave()

    def _release_buffers(self) -> None:
        self._replica.release_buffers()
        if self._late is not None:
            self._late._release_buffers()

    @contextlib.contextmanager
    def _resumed(self) -> Any:
        """A later part of a call: the same deadline, no new one."""
        self._take()
        try:
            with calling(self._watch.deadline):
                yield
        finally:
            self._leave()

    def _begin(self, minimum: int) -> Offer:
        if self._attempt is not None:
            self._give_up(HandleError("begin() was called again before commit()"))
        while True:
            attempt = Attempt(self._version)
            try:
                self._rejoin_if_replaced()
                return self._take_offer(attempt, minimum)
            except SessionError as error:
                if not self._waits_for_return(attempt, error):
                    raise
                self._await_replacement(error)

    def _waits_for_return(self, attempt: Attempt, error: BaseException) -> bool:
        """Whether the store may have gone with its sender, and nothing was begun."""
        return (
            isinstance(error, SessionError)
            and not isinstance(error, AuthenticationError)
            and not self._session.store.outlives_members
            and attempt.offer is None
        )

    def _take_offer(self, attempt: Attempt, minimum: int) -> Offer:
        attempt.before = self._version
        self._attempt = attempt
        try:
            taken = (
                self._lead_begin(attempt, minimum)
                if self._rank == 0
                else self._replica.follow_begin(attempt)
            )
            attempt.offer = taken if isinstance(taken, Offer) else self._begin_late(attempt, taken)
        except BaseException as error:
            self._attempt = None
            if attempt.run is not None:
                with contextlib.suppress(type(error)):
                    attempt.run.fail(error)
            with contextlib.suppress(WeightWireError):
                self._stop_asking()
            if not self._waits_for_return(attempt, error):
                with contextlib.suppress(WeightWireError):
                    self._replica.tell_failure(attempt, error)
            self._report_failure(attempt, error)
            raise
        attempt.started = True
        return attempt.offer

    def _lead_begin(self, attempt: Attempt, minimum: int) -> Offer | Policy:
        """Rank 0: the offer that was taken and has started, or what was stored before."""
        if self._late is not None:
            newest = self._late._newest_stored if self._asker is None else self._newest_kept
            steps = self._machine.await_offer_or_stored(minimum, newest)
            policy = drive(steps, self._watch)
            if policy is None:
                self._stop_asking()
            else:
                self._replica.tell_detour(attempt, policy)
                return policy
        attempt.run = Run(
            self._machine.receive(minimum, self._only),
            self._watch,
            lambda act: self._replica.perform(attempt, act),
        )
        offer = attempt.run.until(Install).offer
        self._replica.tell_go()
        return offer

    def _fetch(self) -> None:
        attempt = self._running("fetch")
        if attempt.fetched:
            raise HandleError("fetch() was called twice: call commit()")
        self._version = None
        try:
            if attempt.late:
                self._fetch_late()
            elif attempt.run is not None:
                attempt.run.until(Commit)
            else:
                drive(self._replica.fetch_on_all(attempt), self._watch)
            attempt.fetched = True
        except BaseException as error:
            self._end_failed(attempt, error)
            raise

    def _commit(self) -> Report:
        attempt = self._running("commit")
        if not attempt.fetched:
            raise HandleError("commit() before fetch(): fetch the version first")
        late: Report | None = None
        try:
            if attempt.late:
                late = self._commit_late(attempt)
            elif attempt.run is not None:
                attempt.run.finish()
            else:
                drive(self._replica.commit_on_all(attempt), self._watch)
                self._machine.serving, self._machine.tainted = attempt.policy, None
        except BaseException as error:
            self._end_failed(attempt, error)
            raise
        self._attempt = None
        policy = attempt.policy
        self._version = policy.version
        report = late or self._replica.report(attempt, self.backend)
        self._notify("weightwire_applied", policy.version, report.phases, report=report)
        return report

    def _give_up(self, error: BaseException) -> None:
        """Raise ``error`` inside the running attempt, if there is one."""
        attempt = self._attempt
        if attempt is None:
            return
        if attempt.run is not None:
            with contextlib.suppress(type(error)):
                attempt.run.fail(error)
        self._end_failed(attempt, error)

    def _running(self, call: str) -> Attempt:
        if self._attempt is None:
            raise HandleError(f"{call}() without begin(): begin a version first")
        return self._attempt

    # ---------------------------------------------------------------------- catching up

    def _newest_stored(self) -> int | None:
        """The newest version that was stored for late receivers; asked of the part."""
        self._forget()
        record = self._machine.newest_offer()
        return record.offer.policy.version if record is not None else None

    def _newest_kept(self) -> int | None:
        """The version that the sender serves from its snapshot now; it is asked to."""
        late, asker = self._late, self._asker
        assert late is not None and asker is not None  # noqa: S101, PT018 - rank 0 has both
        asker.ask()
        late._forget()
        record = late._machine.newest_offer()
        version = asker.version_of(record.offer) if record is not None else None
        late._only = record.offer.policy.version if record is not None else None
        return version

    def _stop_asking(self) -> None:
        """Another way is taken, or none: the snapshot's sender needn't wait."""
        late = self._late
        if late is None or self._asker is None or not self._asker.withdraw():
            return
        record = late._machine.newest_offer()
        if record is not None and late._attempt is None:
            late._machine.decline(record.offer.policy)

    def _forget(self) -> None:
        """The target was written to by the handle that this one is a part of."""
        self._machine.serving = self._machine.tainted = self._version = None
        self._replica.forget_plan()

    def _begin_late(self, attempt: Attempt, policy: Policy) -> Offer:
        late = self._late
        if late is None:
            raise ConfigError(
                f"receiver {self._id!r} rank {self._rank} was opened without catch_up, rank 0 with "
                "it: open all ranks alike"
            )
        late._forget()
        attempt.late = True
        kept = self._options.catch_up is None  # its sender counts versions of its own
        self._replica.forget_plan()  # the target is planned for the stored table, also if it fails
        offer = late._begin(0 if kept else policy.version)
        if not kept and offer.policy.version != policy.version:  # a newer one finished meanwhile
            newer = self._machine.policy_of(offer.policy.version)
            if newer is None:
                error = PeerLost(
                    f"version {offer.policy.version}, which was stored for late receivers, isn't "
                    "the session's any more: receive again"
                )
                late._give_up(error)
                raise error
            policy = newer
        return msgspec.structs.replace(offer, policy=policy)

    def _fetch_late(self) -> None:
        assert self._late is not None  # noqa: S101 - it has begun
        if self._rank == 0:
            self._machine.detour_begins()
        self._late._fetch()

    def _commit_late(self, attempt: Attempt) -> Report:
        assert self._late is not None  # noqa: S101 - it has begun
        report = self._late._commit()
        policy = attempt.policy
        with contextlib.suppress(SessionError):  # it is all in
            self._stop_asking()
        if self._rank == 0:
            self._machine.detour_ends(policy, report.digest)
        else:
            self._machine.serving, self._machine.tainted = policy, None
        return replace(
            report,
            version=policy.version,
            incarnation=policy.incarnation,
            attempt=policy.attempt,
            path=f"{report.path}, to catch up",
        )

    def _fail_late(self, error: BaseException) -> None:
        assert self._late is not None  # noqa: S101 - it has begun
        self._late._give_up(error)
        with contextlib.suppress(SessionError):
            self._stop_asking()
        tainted = self._late._machine.tainted
        if self._rank == 0:
            self._machine.detour_failed(tainted)
        elif tainted is not None:
            self._machine.tainted = tainted

    # ---------------------------------------------------------------------- outcomes

    def _end_failed(self, attempt: Attempt, error: BaseException) -> None:
        self._attempt = None
        if attempt.late:
            self._fail_late(error)
            serving = self._machine.serving
            self._version = serving.version if serving is not None else None
        elif self._rank != 0:
            restored = self._replica.roll_back(attempt, error)
            if not restored:
                self._machine.tainted = ErrorInfo.of(error)
            self._version = attempt.before if restored else None
        else:
            serving = self._machine.serving
            self._version = serving.version if serving is not None else None
        self._report_failure(attempt, error)

    def _report_failure(self, attempt: Attempt, error: BaseException) -> None:
        version = attempt.offer.policy.version if attempt.offer is not None else -1
        if attempt.offer is not None:
            self._notify("weightwire_aborted", version, attempt.phases.seconds, error=error)

    def _notify(
        self,
        hook: str,
        version: int,
        phases: Mapping[str, float],
        *,
        report: Report | None = None,
        error: BaseException | None = None,
    ) -> None:
        if self._rank == 0 and not self._is_part and registry().is_observed(hook):
            record = VersionRecord(
                session_url=self._session.url,
                role="receiver",
                member_id=self._id,
                version=version,
                report=report,
                error=error,
                backend=self._backend.name,
                phases=dict(phases),
            )
            registry().notify(hook, record)

    def _look_around(self) -> None:
        """On a thread of its own: end a running transfer whose sender is gone."""
        call = self._watch.call
        attempt = self._attempt
        if attempt is None and not self._busy.locked():
            return  # no call runs, or the receiver isn't wholly open yet
        moves_now = self._backend.capabilities.flow != "store"
        # Before the start rank 0 looks for a newer offer rather than fail with the old one.
        has_started = attempt is not None and attempt.started
        offer = attempt.offer if attempt is not None and has_started and moves_now else None
        try:
            if not self._session.store.outlives_members and self._session.is_replaced():
                self._gone = SessionError(
                    f"session {self._session.url} was made anew: receive its version"
                )
                self._watch.fail(self._gone, call)
            elif self._others is not None and (missing := self._others.failure()):
                self._watch.fail(missing, call)
            elif offer is not None:
                failure = self._machine.sender_failure(offer)
                if failure is not None:
                    self._watch.fail(failure, call)
        except SessionError as error:
            if offer is None or self._session.store.outlives_members:
                raise
            self._watch.fail(
                PeerLost(f"the sender is gone, and its session with it: {error}"), call
            )

    # ---------------------------------------------------------------------- closing

    def _release(self) -> None:
        self._start_watch(Deadline(_RELEASE_SECONDS))
        close_all(
            lambda: self._give_up(HandleError("the receiver was closed before commit()")),
            *([self._late.close] if self._late is not None else []),
            self._keeper.stop,
            self._transport.close,
            self._say_goodbye,
            self._session.close,
        )

    def _say_goodbye(self) -> None:
        if self._rank == 0:
            with calling(Deadline(_GOODBYE_SECONDS)):  # a session that is gone needs none
                membership.leave(self._session, self._member)

    def __enter__(self) -> Self:
        self._check_usable()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
