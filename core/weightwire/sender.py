"""``WeightSender``: every trainer rank's handle."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, Self

import msgspec
import torch.distributed
from torch import Tensor, nn

from weightwire.config import BackendChoice
from weightwire.contract import Context, Offer, SenderTransport, Wait
from weightwire.deadline import Deadline
from weightwire.digest import Verify
from weightwire.errors import ConfigError, PeerLost, TableMismatch, WeightWireError
from weightwire.grouping import DEFAULT_GROUP_BYTES
from weightwire.handle import Handle, close_all, ranks_of
from weightwire.lifecycle import Offering, SenderMachine, Transfer
from weightwire.lifecycle.retention import Retention
from weightwire.options import SenderOptions, make_options
from weightwire.pipeline import SendPlan, combine
from weightwire.plugins import registry
from weightwire.report import Phases, Report, VersionRecord
from weightwire.session import membership
from weightwire.session.agreement import Agreement
from weightwire.session.membership import LeaseKeeper, LeaseObserver, Member
from weightwire.session.session import Session
from weightwire.sources import Resolved, WeightSource, WireRules, as_source, resolve
from weightwire.table import TensorTable
from weightwire.tables import build_table
from weightwire.waiting import Act, drive

__all__ = ["WeightSender", "open_sender"]


_GOODBYE_SECONDS = 5.0


class _Arrival(msgspec.Struct, frozen=True):
    """What a rank brings to a ``send``."""

    version: int
    wait: str
    table_digest: str
    transport: bytes


class _Start(msgspec.Struct, frozen=True):
    """What rank 0 tells the others when the transfer starts."""

    offer: Offer
    readers: dict[str, tuple[bytes, ...]]


class WeightSender(Handle):
    """Sends policy versions; made by ``open_sender``, used on every trainer rank alike."""

    def __init__(
        self,
        backend: BackendChoice,
        session: str,
        source: nn.Module | Mapping[str, Tensor] | WeightSource,
        options: SenderOptions,
    ) -> None:
        self._options = options
        self._rank, self._world_size = options.rank, options.world_size
        self._source = as_source(source)
        self._rules = WireRules(options.wire_dtype, options.keep_dtype)
        super().__init__("sender", backend, options.timeout)
        self._table: TensorTable | None = None
        self._table_digest = ""
        self._plan: SendPlan | None = None
        self._last: Report | None = None
        self._current: Offer | None = None
        deadline = Deadline(options.open_timeout)
        self._watch.start(deadline)
        self._session = Session.open(
            session, deadline=deadline, serve=self._rank == 0, token=options.token
        )
        with contextlib.ExitStack() as undo:
            undo.callback(self._session.close)
            self._observer = LeaseObserver(self._session)
            self._member = self._join()
            self._keeper = self._keep_lease()
            undo.callback(self._keeper.stop)
            self._agreement = Agreement(self._session, self._member, self._rank)
            self._transport = self._open_transport()
            undo.callback(self._transport.close)
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

    def _join(self) -> Member:
        if self._rank != 0:
            return drive(
                membership.join(
                    self._session,
                    "senders",
                    rank=self._rank,
                    world_size=self._world_size,
                    member_id="sender",
                ),
                self._watch,
            )
        member = drive(
            membership.claim(
                self._session,
                self._observer,
                "senders",
                member_id="sender",
                world_size=self._world_size,
                backend=self._backend.name,
                lease_ttl=self._options.lease_ttl,
                resume_from=self._options.resume_from,
            ),
            self._watch,
        )
        # The lease starts before the other ranks are waited for: they need it to join.
        if self._world_size > 1:
            keeper = LeaseKeeper(self._session, member)
            keeper.start()
            try:
                drive(membership.confirm(self._session, member), self._watch)
            finally:
                keeper.stop()
        return member

    def _keep_lease(self) -> LeaseKeeper:
        keeper = LeaseKeeper(self._session, self._member, self._look_around, renew=self._rank == 0)
        keeper.start()
        return keeper

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
        wait = self._check_wait(wait)
        with self._call(timeout):
            return self._send(version, wait)

    async def asend(
        self, version: int, *, wait: Wait | None = None, timeout: float | None = None
    ) -> Report:
        """``send`` for asyncio: the event loop goes on; cancelling aborts the version."""
        wait = self._check_wait(wait)
        return await self._in_thread(lambda: self._send(version, wait), timeout)

    def _send(self, version: int, wait: Wait) -> Report:
        began = time.perf_counter()
        phases = Phases()
        try:
            resolved, arrivals = self._arrive(version, wait, phases)
            if self._rank == 0:
                report = self._lead(version, wait, resolved, arrivals, phases, began)
            else:
                report = self._follow(resolved, phases, began)
        except BaseException as error:
            self._notify("weightwire_aborted", version, error=error)
            raise
        self._last = report
        self._notify("weightwire_published", version, report=report)
        return report

    def _arrive(self, version: int, wait: Wait, phases: Phases) -> tuple[Resolved, list[_Arrival]]:
        """Resolve the source on every rank, and agree on what is to be sent."""
        error: BaseException | None = None
        resolved: Resolved | None = None
        arrival = _Arrival(version, wait, "", b"")
        with phases.timed("offer"):
            try:
                if self._rank == 0:
                    self._machine.next_policy(version)
                resolved = resolve(self._source, self._rules)
                self._use_table(build_table(resolved, self._world_size, self._options.group_bytes))
                arrival = _Arrival(version, wait, self._table_digest, self._transport.describe())
            except Exception as caught:
                error = caught
            self._agreement.next_round()
            payloads = drive(
                self._agreement.agree("arrive", msgspec.msgpack.encode(arrival), error), self._watch
            )
        assert resolved is not None  # noqa: S101 - agree() raised otherwise
        arrivals = [msgspec.msgpack.decode(payload, type=_Arrival) for payload in payloads]
        first = arrivals[0]
        for rank, other in enumerate(arrivals):
            if (other.version, other.wait) != (first.version, first.wait):
                raise ConfigError(
                    f"trainer rank {rank} sends version {other.version} (wait={other.wait!r}), "
                    f"rank 0 {first.version} (wait={first.wait!r}): call send alike on all ranks"
                )
            if other.table_digest != first.table_digest:
                raise TableMismatch(
                    f"trainer rank {rank} has other names, shapes or dtypes than rank 0: "
                    "give every rank the same source"
                )
        return resolved, arrivals

    def _use_table(self, table: TensorTable) -> None:
        digest = table.digest()
        if digest == self._table_digest:
            return
        limit = self._backend.capabilities.max_tensor_nbytes
        for entry in table.tensors:
            if limit is not None and entry.nbytes > limit:
                raise ConfigError(
                    f"tensor {entry.name!r} has {entry.nbytes} bytes, backend {self.backend!r} "
                    f"takes {limit}: choose another backend"
                )
        self._transport.set_table(table)
        self._plan = SendPlan(table, self._rank)
        self._table, self._table_digest = table, digest

    def _lead(
        self,
        version: int,
        wait: Wait,
        resolved: Resolved,
        arrivals: Sequence[_Arrival],
        phases: Phases,
        began: float,
    ) -> Report:
        assert self._table is not None  # noqa: S101 - _arrive() set it
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
            self._agreement.tell("start", msgspec.msgpack.encode(_Start(act.offer, readers)))
            reports.append(self._move(act.offer, readers, resolved, phases, began))
            mark = time.perf_counter()
            self._transport.publish()

        try:
            self._session.put_blob(self._table.encode())
            offering = Offering(
                version=version,
                table_digest=self._table_digest,
                nbytes=self._table.nbytes,
                senders=tuple(arrival.transport for arrival in arrivals),
                verify=self._options.verify,
                wait=wait,
                on_receiver_loss=self._options.on_receiver_loss,
                min_receivers=self._options.min_receivers,
            )
            drive(self._machine.send(offering), self._watch, perform)
        except BaseException as error:
            self._abandon(error, started=bool(reports))
            raise
        finally:
            self._current = None
        self._agreement.tell("outcome", b"")
        self._retention.retire(self._transport.drop)
        lap("commit")
        return self._finished_report(reports[0], phases, began)

    def _follow(self, resolved: Resolved, phases: Phases, began: float) -> Report:
        with phases.timed("ready"):
            payload = drive(self._agreement.hear("start"), self._watch)
        start = msgspec.msgpack.decode(payload, type=_Start)
        try:
            report = self._move(start.offer, start.readers, resolved, phases, began)
            with phases.timed("commit"):
                drive(self._agreement.hear("outcome"), self._watch)
            self._agreement.acknowledge("left")
        except BaseException as error:
            self._transport.abort(error)
            raise
        finally:
            self._current = None
        return self._finished_report(report, phases, began)

    def _move(
        self,
        offer: Offer,
        readers: Mapping[str, Sequence[bytes]],
        resolved: Resolved,
        phases: Phases,
        began: float,
    ) -> Report:
        """This rank's part of the transfer; returns when every rank's bytes are safe."""
        assert self._plan is not None  # noqa: S101 - _arrive() set it
        self._current = offer
        error: BaseException | None = None
        digest = 0
        try:
            self._transport.begin(offer, readers)
            digest = self._plan.send(
                resolved.tensors,
                self._transport,
                self._backend.capabilities,
                version=offer.policy.version,
                verify=self._options.verify,
                watch=self._watch,
                phases=phases,
            )
        except BaseException as caught:
            if self._agreement.alone:
                raise
            error = caught
        with phases.timed("commit"):
            drive(self._agreement.agree("sent", b"", error), self._watch)
        return Report(
            role="sender",
            backend=self.backend,
            version=offer.policy.version,
            attempt=offer.policy.attempt,
            incarnation=offer.policy.incarnation,
            nbytes=self._plan.nbytes,
            seconds=time.perf_counter() - began,
            phases=dict(phases.seconds),
            digest=combine(digest, self._options.verify),
            path=f"{self.backend} ({self._backend.capabilities.flow})",
            roster=offer.roster,
        )

    def _abandon(self, error: BaseException, *, started: bool) -> None:
        """Rank 0: leave the transport and the other ranks in good order."""
        self._transport.abort(error)
        with contextlib.suppress(WeightWireError):
            if not started:
                self._agreement.tell("start", b"", error)
            self._agreement.tell("outcome", b"", error)

    def _finished_report(self, report: Report, phases: Phases, began: float) -> Report:
        return replace(report, seconds=time.perf_counter() - began, phases=dict(phases.seconds))

    # ---------------------------------------------------------------------- watching

    def _look_around(self) -> None:
        """On the lease's thread: end a running transfer whose peers are gone."""
        offer = self._current
        if offer is None or self._backend.capabilities.flow == "store":
            return
        live = membership.live_members(self._session, self._observer)
        for receiver_id in offer.roster:
            if receiver_id in live:
                continue
            if (
                self._options.on_receiver_loss == "continue"
                and self._backend.capabilities.flow != "collective"
            ):
                self._transport.lose(receiver_id)
            else:
                self._watch.fail(
                    PeerLost(f"receiver {receiver_id!r} is gone: restart it and send again")
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

    def close(self) -> None:
        """Leave the session and release everything.  Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._watch.cancel("the sender was closed")
        with self._busy:  # a call on another thread ends first
            close_all(
                self._keeper.stop,
                self._transport.close,
                self._say_goodbye,
                self._session.close,
            )

    def _say_goodbye(self) -> None:
        if self._rank != 0:
            return
        if self._last is not None:
            # The store may be ours to serve: the other ranks read their outcome first.
            self._watch.start(Deadline(_GOODBYE_SECONDS))
            with contextlib.suppress(WeightWireError):
                drive(self._agreement.acknowledged("left"), self._watch)
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
    source: nn.Module | Mapping[str, Tensor] | WeightSource,
    rank: int | None = None,
    world_size: int | None = None,
    group: torch.distributed.ProcessGroup | None = None,
    token: str | None = None,
    wire_dtype: str | None = None,
    keep_dtype: Sequence[str] = (),
    group_bytes: int = DEFAULT_GROUP_BYTES,
    verify: Verify = "sample",
    overlap: bool = False,
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
        session: URL of the session: ``file:///shared/run42``, ``tcp://host:port/run42``.
        source: module, mapping of names to tensors, or ``WeightSource``.
        rank, world_size: this rank among the trainer's; by default the only one.
        group: a process group to take rank and world size from; it isn't used otherwise.
        token: shared secret; by default the environment's ``WEIGHTWIRE_TOKEN``.
        wire_dtype: dtype of floating-point tensors on the wire; by default as stored.
        keep_dtype: shell patterns of names that stay as stored.
        group_bytes: budget of a transfer group, in bytes.
        verify: how much of each tensor receivers compare with the sender's digest.
        overlap: two slots instead of one.
        resume_from: last version of earlier senders that stays readable; without it
            none does.
        min_receivers: receivers that must have joined before a version is offered
            (only where the backend needs live ones).
        on_receiver_loss: ``"fail"`` the version, or ``"continue"`` without the lost one.
        lease_ttl: seconds of silence after which this sender counts as dead.
        timeout: seconds for a ``send``.
        open_timeout: seconds for reaching the session.

    Raises:
        ConfigError: an argument is wrong.
        BackendNotFound: nothing installed has this name.
        BackendUnavailable: the backend can't run here.
        SessionError: the session can't be reached, or has a live sender.
    """
    rank, world_size = ranks_of(rank, world_size, group)
    options = make_options(
        SenderOptions,
        rank=rank,
        world_size=world_size,
        token=token,
        wire_dtype=wire_dtype,
        keep_dtype=tuple(keep_dtype),
        group_bytes=group_bytes,
        verify=verify,
        overlap=overlap,
        resume_from=resume_from,
        min_receivers=min_receivers,
        on_receiver_loss=on_receiver_loss,
        lease_ttl=lease_ttl,
        timeout=timeout,
        open_timeout=open_timeout,
    )
    return WeightSender(backend, session, source, options)
