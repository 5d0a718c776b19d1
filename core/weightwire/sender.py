"""``WeightSender``: every trainer rank's handle."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, Self

import msgspec
import torch.distributed
from torch import Tensor, nn

from weightwire.config import BackendChoice
from weightwire.contract import Context, Offer, SenderTransport, Wait
from weightwire.deadline import Deadline, calling
from weightwire.digest import Verify
from weightwire.errors import ConfigError, PeerLost, UnsupportedOperation, WeightWireError
from weightwire.grouping import DEFAULT_GROUP_BYTES
from weightwire.handle import Handle, close_all, ranks_of, slot_device
from weightwire.lifecycle import Offering, SenderMachine, Transfer, lost_readers
from weightwire.lifecycle.retention import Retention
from weightwire.options import SenderOptions, make_options
from weightwire.placements import LocalShard
from weightwire.plugins import registry
from weightwire.report import Phases, Report, VersionRecord
from weightwire.session import keys, membership
from weightwire.session.agreement import Agreement
from weightwire.session.lease import Leader, LeaseObserver
from weightwire.session.records import unpack
from weightwire.session.session import Session
from weightwire.sources import Resolved, WeightSource, WireRules, as_source
from weightwire.trainer_rank import Start, TrainerRank
from weightwire.waiting import Act, drive

log = logging.getLogger("weightwire")

__all__ = ["WeightSender", "open_sender"]


_GOODBYE_SECONDS = 5.0
_OUTCOME_GRACE = 0.4
"""Seconds by which rank 0 may say later than the deadline how the version ended."""


class WeightSender(Handle):
    """Sends policy versions; made by ``open_sender``, used on every trainer rank alike."""

    def __init__(
        self,
        backend: BackendChoice,
        session: str,
        source: nn.Module | Mapping[str, Tensor | LocalShard] | WeightSource,
        options: SenderOptions,
    ) -> None:
        self._options = options
        self._rank, self._world_size = options.rank, options.world_size
        self._source = as_source(source)
        self._rules = WireRules(options.wire_dtype, options.keep_dtype)
        super().__init__("sender", backend, options.timeout)
        if options.min_receivers == 0 and self._backend.capabilities.needs_live_receivers:
            raise UnsupportedOperation(
                f"backend {self.backend!r} can't send to nobody (min_receivers=0): it needs live "
                "receivers; choose a backend that stores versions, such as 'filesystem'"
            )
        self._last: Report | None = None
        self._published = ""  # digest of the table that the session holds
        self._is_heard = False  # the other ranks read, or have read, how the last call ended
        self._sending: Offer | None = None
        self._verdicts = threading.Lock()  # a version ends, or a receiver is struck off it
        deadline = Deadline(options.open_timeout)
        self._watch.start(deadline)
        with calling(deadline), contextlib.ExitStack() as undo:
            self._session = Session.open(
                session, deadline=deadline, serve=self._rank == 0, token=options.token
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
            self._leader = Leader(self._observer, self._member) if self._rank else None
            self._agreement = Agreement(self._session, self._member, self._rank)
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
            undo.pop_all()

    # ---------------------------------------------------------------------- opening

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

    def _send(self, version: int, wait: Wait) -> Report:
        began = time.perf_counter()
        phases = Phases()
        self._is_heard = False
        try:
            resolved = self._ours.arrive(version, wait, phases, self._refusal(version))
            if self._rank == 0:
                report = self._lead(version, wait, resolved, phases, began)
            else:
                report = self._follow(resolved, phases, began)
        except BaseException as error:
            self._notify("weightwire_aborted", version, error=error)
            raise
        self._last, self._is_heard = report, True
        self._notify("weightwire_published", version, report=report)
        return report

    def _refusal(self, version: int) -> ConfigError | None:
        """Why rank 0 won't send this version, or None."""
        if self._rank == 0:
            try:
                self._machine.next_policy(version)
            except ConfigError as error:
                return error
        return None

    def _lead(
        self,
        version: int,
        wait: Wait,
        resolved: Resolved,
        phases: Phases,
        began: float,
    ) -> Report:
        assert self._ours.table is not None  # noqa: S101 - _arrive() set it
        reports: list[Report] = []

        mark = time.perf_counter()

        def lap(phase: str) -> None:
            nonlocal mark
            now = time.perf_counter()
            phases.add(phase, now - mark)
            mark = now

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
                nbytes=self._ours.table.nbytes,
                senders=self._ours.transports,
                verify=self._options.verify,
                wait=wait,
                on_receiver_loss=self._options.on_receiver_loss,
                min_receivers=self._options.min_receivers,
            )
            drive(self._machine.send(offering), self._watch, perform)
            self._ours.done()
        except BaseException as error:
            self._abandon(error, started=bool(reports))
            raise
        finally:
            with self._verdicts:
                self._sending = None
        self._agreement.tell("outcome", b"")
        self._retire()
        lap("commit")
        return self._finished_report(reports[0], phases, began)

    def _retire(self) -> None:
        try:
            self._retention.retire(self._transport.drop, self._ours.blobs)
        except WeightWireError as error:
            # The version is out all the same; the next one tries again.
            log.warning("old versions weren't dropped: %s", error)

    def _follow(self, resolved: Resolved, phases: Phases, began: float) -> Report:
        try:
            with phases.timed("ready"):
                payload = drive(self._agreement.hear("start"), self._watch)
            start = unpack(payload, Start, "rank 0")
            self._sending = start.offer
            report = self._ours.move(start.offer, start.readers, resolved, phases, began)
            with phases.timed("commit"):
                drive(self._agreement.hear("outcome", grace=_OUTCOME_GRACE), self._watch)
            self._agreement.acknowledge("left")
            self._ours.done()
        except BaseException as error:
            self._ours.abort(error)
            self._agreement.fail("sent", error)
            raise
        finally:
            with self._verdicts:
                self._sending = None
        return self._finished_report(report, phases, began)

    def _abandon(self, error: BaseException, *, started: bool) -> None:
        """Rank 0: leave the transport and the other ranks in good order."""
        self._ours.abort(error)
        with contextlib.suppress(WeightWireError):
            if not started:
                self._agreement.tell("start", b"", error)
                self._agreement.fail("sent", error)
            self._agreement.tell("outcome", b"", error)
        self._retire()  # an aborted version may have been published

    def _finished_report(self, report: Report, phases: Phases, began: float) -> Report:
        return replace(report, seconds=time.perf_counter() - began, phases=dict(phases.seconds))

    # ---------------------------------------------------------------------- watching

    def _look_around(self) -> None:
        """On a thread of its own: end a running call when another sender has taken over, and a
        running transfer when its peers are gone."""
        if not self._busy.locked():
            return  # no call runs, or the sender isn't wholly open yet
        call = self._watch.call
        if self._leader is not None and (missing := self._leader.failure()):
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
                error = PeerLost(f"receiver {receiver_id!r} is gone: restart it and send again")
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
        *,
        report: Report | None = None,
        error: BaseException | None = None,
    ) -> None:
        if self._rank == 0:
            record = VersionRecord(self._session.url, "sender", "sender", version, report, error)
            registry().notify(hook, record)

    def _check_wait(self, wait: Wait | None) -> Wait:
        wait = self._backend.capabilities.default_wait if wait is None else wait
        if wait not in ("applied", "published"):
            raise ConfigError(f"wait={wait!r}: use 'applied' or 'published'")
        return wait

    # ---------------------------------------------------------------------- closing

    def _release(self) -> None:
        close_all(
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
            self._watch.start(Deadline(_GOODBYE_SECONDS))
            with contextlib.suppress(WeightWireError):
                drive(self._agreement.acknowledged("left"), self._watch)
        self._leave_session()

    def _leave_session(self) -> None:
        if self._rank == 0:
            membership.leave(self._session, self._member)

    def __enter__(self) -> Self:
        self._check_usable()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def open_sender(
    backend: BackendChoice,
    *,
    session: str,
    source: nn.Module | Mapping[str, Tensor | LocalShard] | WeightSource,
    rank: int | None = None,
    world_size: int | None = None,
    group: torch.distributed.ProcessGroup | None = None,
    token: str | None = None,
    wire_dtype: str | None = None,
    keep_dtype: Sequence[str] = (),
    group_bytes: int = DEFAULT_GROUP_BYTES,
    verify: Verify = "sample",
    overlap: bool = False,
    device: str | None = None,
    resume_from: int | None = None,
    min_receivers: int = 1,
    on_receiver_loss: Literal["fail", "continue"] = "fail",
    lease_ttl: float = 10.0,
    timeout: float = 600.0,
    open_timeout: float = 60.0,
) -> WeightSender:
    """Open this trainer rank's sender.

    Args:
        backend: a name, ``{"backend": name, **options}``, or ``(name, config)``.
        session: URL of the session: ``file:///shared/run42``, ``tcp://host:port/run42``,
            ``redis://host/run42``.
        source: module, mapping of names to tensors, or ``WeightSource``.
        rank, world_size: this rank among the trainer's; by default the only one.
        group: a process group to take rank and world size from; it isn't used otherwise.
        token: shared secret; by default the environment's ``WEIGHTWIRE_TOKEN``.
        wire_dtype: dtype of floating-point tensors on the wire; by default as stored.
        keep_dtype: shell patterns of names that stay as stored.
        group_bytes: budget of a transfer group, in bytes.
        verify: how much of each tensor receivers compare with the sender's digest.
        overlap: two slots instead of one: a group is staged while the last one is read.
        device: where slots lie (``cpu``, ``cuda:0``); by default where the source does, if
            the backend can send from there.
        resume_from: last version of earlier senders that stays readable; without it
            none does.
        min_receivers: receivers that must have joined before a version is offered
            (only where the backend needs live ones); 0 says that it may go to nobody,
            which such a backend refuses.
        on_receiver_loss: ``"fail"`` the version, or ``"continue"`` without the lost one.
        lease_ttl: seconds of silence after which this sender counts as dead.
        timeout: seconds for a ``send``.
        open_timeout: seconds for reaching the session.

    Raises:
        ConfigError: an argument is wrong.
        BackendNotFound: nothing installed has this name.
        BackendUnavailable: the backend can't run here.
        UnsupportedOperation: ``min_receivers=0``, and the backend needs live receivers.
        SessionError: the session can't be reached, or has a live sender.
    """
    rank, world_size = ranks_of(rank, world_size, group)
    options = make_options(
        SenderOptions,
        rank=rank,
        world_size=world_size,
        token=token,
        wire_dtype=wire_dtype,
        keep_dtype=_patterns(keep_dtype),
        group_bytes=group_bytes,
        verify=verify,
        overlap=overlap,
        device=device,
        resume_from=resume_from,
        min_receivers=min_receivers,
        on_receiver_loss=on_receiver_loss,
        lease_ttl=lease_ttl,
        timeout=timeout,
        open_timeout=open_timeout,
    )
    return WeightSender(backend, session, source, options)


def _patterns(names: object) -> object:
    """One pattern is as good as a list of one; anything else is for validation to refuse."""
    if isinstance(names, str):
        return (names,)
    return tuple(names) if isinstance(names, Iterable) else names
