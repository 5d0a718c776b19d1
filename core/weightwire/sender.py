"""``WeightSender``: every trainer rank's handle."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Self

import msgspec
from torch import Tensor, nn

from weightwire import catch_up as catching_up
from weightwire import snapshot as snapshots
from weightwire.blocks import ANY
from weightwire.config import BackendChoice
from weightwire.contract import Context, Offer, SenderTransport, Wait
from weightwire.deadline import Deadline, Watch, calling
from weightwire.errors import ConfigError, PeerLost, UnsupportedOperation, WeightWireError
from weightwire.handle import Handle, close_all, slot_device
from weightwire.lifecycle.acts import Transfer
from weightwire.lifecycle.retention import Retention
from weightwire.lifecycle.rollout import Terms
from weightwire.lifecycle.sender import Offering, SenderMachine, lost_readers
from weightwire.options import SenderOptions
from weightwire.phases import Phases
from weightwire.placements import LocalShard
from weightwire.plugins import registry
from weightwire.report import Report, VersionRecord, together
from weightwire.session import keys, membership
from weightwire.session.agreement import Agreement
from weightwire.session.lease import Leader, LeaseObserver, Member, Siblings
from weightwire.session.records import unpack
from weightwire.session.session import Session
from weightwire.snapshot import HostSnapshot
from weightwire.sources import Resolved, WeightSource, WireRules, as_source
from weightwire.trainer_rank import Start, TrainerRank
from weightwire.waiting import Act, drive

log = logging.getLogger("weightwire")

__all__ = ["WeightSender"]


_GOODBYE_SECONDS = 5.0
_NOBODY = b""
_OUTCOME_GRACE = 0.4
"""Seconds by which rank 0 may say later than the deadline how the version ended."""


class _Over(msgspec.Struct, frozen=True):
    """What rank 0 tells the others when a wave is over."""

    more: bool
    left_out: tuple[str, ...]


class WeightSender(Handle):
    """Sends policy versions; made by ``opening.open_sender``, used on every trainer rank alike."""

    def __init__(
        self,
        backend: BackendChoice,
        session: str | Session,
        source: nn.Module | Mapping[str, Tensor | LocalShard] | WeightSource,
        options: SenderOptions,
        *,
        part_of: Watch | None = None,
        is_aside: bool = False,
    ) -> None:
        self._options = options
        self._is_aside = is_aside  # it makes calls of its own, of which observers hear nothing
        self._rank, self._world_size = options.rank, options.world_size
        self._source = as_source(source)
        self._rules = WireRules(options.wire_dtype, options.keep_dtype)
        super().__init__("sender", backend, options.timeout, part_of)
        if options.min_receivers == 0 and self._backend.capabilities.needs_live_receivers:
            raise UnsupportedOperation(
                f"backend {self.backend!r} can't send to nobody (min_receivers=0): it needs live "
                "receivers; choose a backend that stores versions, such as 'filesystem'"
            )
        if options.max_receivers is not None and self._backend.capabilities.flow == "store":
            raise UnsupportedOperation(
                f"backend {self.backend!r} can't keep a pool at max_receivers="
                f"{options.max_receivers}: it stores versions, and whoever comes may read them"
            )
        self._terms = Terms(**{each.name: getattr(options, each.name) for each in fields(Terms)})
        self._last: Report | None = None
        self._published = ""  # digest of the table that the session holds
        self._is_heard = False  # the other ranks read, or have read, how the last call ended
        self._sending: Offer | None = None
        self._verdicts = threading.Lock()  # a version ends, or a receiver is struck off it
        if options.catch_up is not None:
            catching_up.refuse_unfit(self._backend, options.catch_up)
        deadline = Deadline(options.open_timeout)
        self._start_watch(deadline)
        with calling(deadline), contextlib.ExitStack() as undo:
            self._session = self._open_session(
                session, deadline, options.token, serve=self._rank == 0
            )
            undo.callback(self._session.close)
            self._refuse_lost_past(options.resume_from)
            self._observer = LeaseObserver(self._session)
            self._member, self._keeper = membership.enter(
                self._session,
                self._observer,
                self._watch,
                "senders",
                member_id="sender",
                rank=self._rank,
                world_size=self._world_size,
                backend=self._backend.name,
                lease_ttl=options.lease_ttl,
                look_around=self._look_around,
                resume_from=options.resume_from,
            )
            undo.callback(self._leave_session)
            undo.callback(self._keeper.stop)
            siblings = None if self._rank else Siblings(self._session, self._member)
            self._others = siblings or Leader(self._observer, self._member)
            self._agreement = Agreement(self._session, self._member, self._rank, siblings)
            self._transport = self._open_transport()
            undo.callback(self._transport.close)
            self._ours = TrainerRank(
                self._backend,
                self._session,
                self._member,
                self._agreement,
                self._transport,
                self._source,
                self._rules,
                options,
                self._watch,
            )
            self._machine = SenderMachine(
                self._session,
                self._member,
                self._observer,
                self._backend.capabilities,
            )
            self._retention = Retention(
                self._session,
                self._member,
                self._observer,
                keep=self._transport.keep,
                stores=self._backend.capabilities.serves_finished,
            )
            self._stored = self._open_catch_up()
            if self._stored is not None:
                undo.callback(self._stored.close)
            self._snapshot = self._open_snapshot()
            undo.pop_all()

    # ---------------------------------------------------------------------- opening

    def _open_catch_up(self) -> WeightSender | None:
        """The sender through which finished versions are stored for late receivers."""
        options = self._options
        if options.catch_up is None:
            return None
        update = {
            "catch_up": None,
            "min_receivers": 0,
            "max_receivers": None,
            "max_unavailable": None,
            "max_version_lag": None,
            "overlap": False,
            "device": None,
        }
        return WeightSender(
            options.catch_up,
            self._session.within(catching_up.SESSION),
            self._source,
            options.model_copy(update=update),
            part_of=self._watch,
        )

    def _open_snapshot(self) -> HostSnapshot | None:
        """What serves the newest finished version to late receivers."""
        choice = snapshots.inner_choice(self._backend, self._config)
        if choice is None:
            return None
        options = self._options
        if options.catch_up is not None:
            raise ConfigError("snapshot='host' and catch_up serve late receivers: choose one")
        update = {
            "wire_dtype": None,  # the copies have what the wire has
            "keep_dtype": (),
            "min_receivers": 1,
            "max_receivers": None,
            "max_unavailable": None,
            "max_version_lag": snapshots.ANY_LAG,
            "on_receiver_loss": "continue",
            "resume_from": None,
            "overlap": False,
            "device": "cpu",
        }
        copies = snapshots.HostCopies(self._source, self._rules)
        session = self._session.within(snapshots.SESSION)
        sender = WeightSender(
            choice, session, copies, options.model_copy(update=update), is_aside=True
        )
        return snapshots.HostSnapshot(copies, sender, session, self._rank, self._world_size)

    def _refuse_lost_past(self, resume_from: int | None) -> None:
        """Versions can't be taken up again where their records ended with the last sender."""
        stores = self._backend.capabilities.serves_finished
        if resume_from is not None and stores and not self._session.store.outlives_members:
            raise ConfigError(
                f"resume_from={resume_from}: session {self._session.url} ended with its last "
                "sender and knows none of its versions: use a session that outlives it "
                "(file:///…), or leave resume_from out and give this run a directory of its own"
            )

    def _open_transport(self) -> SenderTransport:
        return self._backend.open_sender(
            Context(
                config=self._config,
                session_url=self._session.url,
                session_id=self._session.id,
                session_dir=self._session.store.directory,
                rank=self._rank,
                world_size=self._world_size,
                member_id="sender",
                incarnation=self._member.incarnation,
                overlap=self._options.overlap,
                watch=self._watch,
                device=slot_device(self._options.device, self._source.device, self._backend),
                goes_on_without_lost=self._goes_on_without_lost,
            )
        )

    # ---------------------------------------------------------------------- sending

    @property
    def version(self) -> int | None:
        """The last version that finished, or None."""
        return self._last.version if self._last is not None else None

    @property
    def incarnation(self) -> int:
        """This sender's incarnation in the session."""
        return self._member.incarnation

    @property
    def session_url(self) -> str:
        return self._session.url

    def send(
        self, version: int, *, wait: Wait | None = None, timeout: float | None = None
    ) -> Report:
        """Send one policy version.  Every trainer rank calls it with the same arguments.

        Args:
            version: rises with every call; only an aborted one may be sent again.
            wait: return once every receiver of the roster has ``"applied"`` it, or
                once it is ``"published"``; by default what the backend declares.
            timeout: seconds, by default those given to ``open_sender``.

        Returns:
            This rank's report.  The source may change from here on.

        Raises:
            ConfigError: the version doesn't rise, or a rule matches nothing.
            TransferTimeout: the deadline passed; names who is missing.
            PeerLost: a receiver of the roster died or failed.
            TableMismatch: a receiver declined the tensors.
            SessionError: the session is gone, or another sender took it over.
            HandleError: this sender is closed, forked or busy.
        """
        keys.validate_version(version)
        wait = self._check_wait(wait)
        with self._call(timeout):
            return self._send(version, wait)

    async def asend(
        self, version: int, *, wait: Wait | None = None, timeout: float | None = None
    ) -> Report:
        """``send`` for asyncio: the event loop goes on; cancelling aborts the version."""
        keys.validate_version(version)
        wait = self._check_wait(wait)
        return await self._in_thread(lambda: self._send(version, wait), timeout)

    def release_buffers(self) -> None:
        """Give back the memory that sending takes, until the next ``send`` makes it again.

        For a trainer that shares its GPU or host with an engine: staging slots, their
        registrations and buckets go; what late receivers are served from (``snapshot``, stored
        versions) stays.  Each rank calls it for itself, or doesn't.  The next version costs
        what the first one did.

        Raises:
            HandleError: a version is being sent, or this sender is closed or forked.
        """
        with self._call(None):
            self._release_buffers()

    def _release_buffers(self) -> None:
        self._ours.release_buffers()
        if self._stored is not None:
            self._stored._release_buffers()

    def _send(self, version: int, wait: Wait) -> Report:
        began = time.perf_counter()
        phases = Phases()
        self._is_heard = False
        waves: list[Report] = []
        more = True
        if self._rank == 0:
            self._machine.begin()
        try:
            while more:
                slices, refusal = self._look_ahead(version, wait, phases)
                resolved = self._ours.arrive(
                    version, wait, phases, refusal, column_slices=slices, begins=not waves
                )
                if self._rank == 0:
                    wave, over = self._lead(version, wait, resolved, phases, began)
                else:
                    wave, over = self._follow(version, resolved, phases, began)
                waves += [replace(report, left_out=over.left_out) for report in wave]
                more = over.more
        except BaseException as error:
            self._notify("weightwire_aborted", version, phases.seconds, error=error)
            raise
        stored = self._store(version)
        if self._snapshot is not None:
            stored = self._snapshot.take(version, resolved)
        report = together(waves, time.perf_counter() - began, dict(phases.seconds), stored)
        self._last, self._is_heard = report, True
        self._notify("weightwire_published", version, report.phases, report=report)
        return report

    def _store(self, version: int) -> str:
        """Store a finished version for late receivers; says where, or why not."""
        if self._stored is None:
            return ""
        try:
            return self._stored._send(version, "published").path
        except WeightWireError as error:
            # The version is out all the same: only they have to wait for the next one.
            log.error("version %d isn't stored for late receivers: %s", version, error)
            return f"not stored: {error}"

    def _look_ahead(
        self, version: int, wait: Wait, phases: Phases
    ) -> tuple[int, BaseException | None]:
        """How the version's readers read, and why rank 0 won't send it, or None."""
        if self._rank != 0:
            return ANY, None
        try:
            self._machine.next_policy(version)
            if not self._transport.column_blocks:
                return ANY, None
            with phases.timed("ready"):
                return drive(self._machine.column_slices(self._terms, wait), self._watch), None
        except BaseException as error:  # an interruption too: the other ranks are told
            return ANY, error

    def _lead(
        self,
        version: int,
        wait: Wait,
        resolved: Resolved,
        phases: Phases,
        began: float,
    ) -> tuple[list[Report], _Over]:
        """One wave; the report of what it moved, if there was anybody, and how it ended."""
        assert self._ours.table is not None  # noqa: S101 - _arrive() set it
        reports: list[Report] = []

        mark = time.perf_counter()

        def lap(phase: str) -> None:
            nonlocal mark
            now = time.perf_counter()
            phases.add(phase, now - mark)
            mark = now

        before = dict(phases.seconds) if self._machine.more else {}

        def of_this_wave() -> dict[str, float]:
            lap("commit" if reports else "ready")
            return {name: s - before.get(name, 0.0) for name, s in phases.seconds.items()}

        self._machine.phases = of_this_wave
        self._machine.meanwhile = functools.partial(self._ours.prepare, version)

        def perform(act: Act) -> None:
            nonlocal mark
            assert isinstance(act, Transfer)  # noqa: S101 - the sender's only act
            lap("ready")
            readers = {name: tuple(blobs) for name, blobs in act.readers.items()}
            self._agreement.tell("start", msgspec.msgpack.encode(Start(act.offer, readers)))
            self._sending = act.offer
            reports.append(self._ours.move(act.offer, readers, resolved, phases, began))
            mark = time.perf_counter()
            self._transport.publish()

        try:
            if self._published != self._ours.table_digest:
                self._published = self._session.put_blob(self._ours.table.encode())
            offering = Offering(
                version=version,
                table_digest=self._ours.table_digest,
                nbytes=self._ours.nbytes,
                senders=self._ours.transports,
                verify=self._options.verify,
                wait=wait,
                terms=self._terms,
            )
            drive(self._machine.send(offering), self._watch, perform)
            self._ours.done()
            if not reports:
                self._agreement.tell("start", _NOBODY)
        except BaseException as error:
            self._abandon(error, started=bool(reports))
            raise
        finally:
            with self._verdicts:
                self._sending = None
        over = _Over(self._machine.more, tuple(sorted(self._machine.left_out)))
        self._agreement.tell("outcome", msgspec.msgpack.encode(over))
        self._retire()
        lap("commit")
        return reports, over

    def _retire(self) -> None:
        try:
            self._retention.retire(self._transport.drop, self._ours.blobs)
        except WeightWireError as error:
            # The version is out all the same; the next one tries again.
            log.warning("old versions weren't dropped: %s", error)

    def _follow(
        self, version: int, resolved: Resolved, phases: Phases, began: float
    ) -> tuple[list[Report], _Over]:
        reports: list[Report] = []
        try:
            with phases.timed("ready"):
                self._ours.prepare(version)
                payload = drive(self._agreement.hear("start"), self._watch)
            if payload != _NOBODY:
                start = unpack(payload, Start, "rank 0")
                self._sending = start.offer
                reports.append(self._ours.move(start.offer, start.readers, resolved, phases, began))
            with phases.timed("commit"):
                heard = drive(self._agreement.hear("outcome", grace=_OUTCOME_GRACE), self._watch)
                over = unpack(heard, _Over, "rank 0")
            self._agreement.acknowledge("left")
            self._ours.done()
        except BaseException as error:
            self._ours.abort(error)
            self._agreement.fail("sent", error)
            raise
        finally:
            with self._verdicts:
                self._sending = None
        return reports, over

    def _abandon(self, error: BaseException, *, started: bool) -> None:
        """Rank 0: leave the transport and the other ranks in good order."""
        self._ours.abort(error)
        with contextlib.suppress(WeightWireError):
            if not started:
                self._agreement.tell("start", b"", error)
                self._agreement.fail("sent", error)
            self._agreement.tell("outcome", b"", error)
        self._retire()  # an aborted version may have been published

    # ---------------------------------------------------------------------- as a snapshot's

    def offer_only_to(self, wanted: Callable[[str, Member], bool]) -> None:
        """Other receivers get no offer; asked on rank 0."""
        self._machine.offers_to = wanted

    def give_up(self, reason: str) -> None:
        """End the call that runs on another thread, if there is one."""
        self._watch.cancel(reason)

    # ---------------------------------------------------------------------- watching

    def _look_around(self) -> None:
        """On a thread of its own: end a running call when another sender has taken over, and a
        running transfer when its peers are gone."""
        if not self._busy.locked():
            return  # no call runs, or the sender isn't wholly open yet
        call = self._watch.call
        if self._others is not None and (missing := self._others.failure()):
            self._watch.fail(missing, call)
        superseded = self._machine.supersession()
        if superseded is not None:
            self._watch.fail(superseded, call)
        offer = self._sending
        if offer is None or self._backend.capabilities.flow == "store":
            return
        lost = lost_readers(self._session, self._observer, offer.policy)
        for receiver_id in offer.roster:
            answer = self._machine.answer_of(offer, receiver_id)
            if answer is not None and answer.error is not None:
                error: WeightWireError = answer.error.to_error(f"receiver {receiver_id!r} failed")
            elif answer is None and receiver_id in lost:
                error = PeerLost(
                    f"receiver {receiver_id!r} is gone ({lost[receiver_id]}): restart it and "
                    "send again"
                )
            else:
                continue
            if not self._goes_on_without_lost:
                self._watch.fail(error, call)
                continue
            with self._verdicts:
                # Not after that version ended: the next one may have the receiver again.
                if self._sending is offer:
                    self._transport.lose(receiver_id)

    @property
    def _goes_on_without_lost(self) -> bool:
        return (
            self._options.on_receiver_loss == "continue"
            and self._backend.capabilities.flow != "collective"
        )

    def _notify(
        self,
        hook: str,
        version: int,
        phases: Mapping[str, float],
        *,
        report: Report | None = None,
        error: BaseException | None = None,
    ) -> None:
        is_aside = self._is_part or self._is_aside
        if self._rank == 0 and not is_aside and registry().is_observed(hook):
            record = VersionRecord(
                session_url=self._session.url,
                role="sender",
                member_id="sender",
                version=version,
                report=report,
                error=error,
                backend=self._backend.name,
                phases=dict(phases),
            )
            registry().notify(hook, record)

    def _check_wait(self, wait: Wait | None) -> Wait:
        wait = self._backend.capabilities.default_wait if wait is None else wait
        if wait not in ("applied", "published"):
            raise ConfigError(f"wait={wait!r}: use 'applied' or 'published'")
        return wait

    # ---------------------------------------------------------------------- closing

    def _release(self) -> None:
        close_all(
            *([self._snapshot.close] if self._snapshot is not None else []),
            *([self._stored.close] if self._stored is not None else []),
            self._keeper.stop,
            self._transport.close,
            self._say_goodbye,
            self._session.close,
        )

    def _say_goodbye(self) -> None:
        if self._rank != 0:
            return
        if self._is_heard:
            # The store may be ours to serve: the other ranks read their outcome first.
            watch = Watch()
            watch.start(Deadline(_GOODBYE_SECONDS))
            with contextlib.suppress(WeightWireError):
                drive(self._agreement.acknowledged("left"), watch)
        self._leave_session()

    def _leave_session(self) -> None:
        if self._rank == 0:
            membership.leave(self._session, self._member)

    def __enter__(self) -> Self:
        self._check_usable()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
