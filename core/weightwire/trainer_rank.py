"""One trainer rank's part in sending a version, in step with its siblings."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from weightwire.blocks import ANY, common_slices
from weightwire.contract import Backend, Offer, SenderTransport, Wait, checked_description
from weightwire.deadline import Watch
from weightwire.digest import combine
from weightwire.errors import ConfigError, SessionError, TableMismatch, UnsupportedOperation
from weightwire.exchange import Exchange, ExchangePlan
from weightwire.materialise import CheckpointTensors
from weightwire.options import SenderOptions
from weightwire.phases import Phases
from weightwire.report import Report
from weightwire.send_plan import SendPlan
from weightwire.session.agreement import Agreement
from weightwire.session.lease import Member
from weightwire.session.records import unpack
from weightwire.session.session import Session, blob_digest
from weightwire.sources import Resolved, Resolver, Spec, WeightSource, WireRules
from weightwire.stamp import stamp
from weightwire.streaming import Stream, StreamingSource, refuse_lockstep
from weightwire.table import TensorTable
from weightwire.tables import build_table, merge_views
from weightwire.views import View
from weightwire.waiting import drive

__all__ = ["Start", "TrainerRank"]

T = TypeVar("T")


class _Arrival(msgspec.Struct, frozen=True):
    """What a rank brings to a ``send``."""

    version: int
    wait: str
    spec: str
    agreed: tuple[str, ...]
    column_slices: int
    """Of the readers that rank 0 sees."""
    last_slices: int | None
    """For which the last table was made."""


class _Made(msgspec.Struct, frozen=True):
    """What a rank came to when it made the table."""

    table: str
    verify: str
    transport: bytes


class Start(msgspec.Struct, frozen=True):
    """What rank 0 tells the others when the transfer starts."""

    offer: Offer
    readers: dict[str, tuple[bytes, ...]]


class TrainerRank:
    """This rank's source and transport, and the agreement with the trainer's other ranks.

    Attributes:
        table: of all ranks' sources as they were last resolved.
        nbytes: payload of a version of that table.
        transports: what each rank's transport said of itself for that table.
    """

    def __init__(
        self,
        backend: Backend,
        session: Session,
        member: Member,
        agreement: Agreement,
        transport: SenderTransport,
        source: WeightSource,
        rules: WireRules,
        options: SenderOptions,
        watch: Watch,
    ) -> None:
        self._backend = backend
        self._session = session
        self._agreement = agreement
        self._transport = transport
        self._source = source
        self._rules = rules
        self._resolver = Resolver(source, rules)
        self._options = options
        self._watch = watch
        self._plan: SendPlan | None = None
        self._sending = False
        self._exchange = Exchange(session, member, options.rank, watch)
        self._exchanges = False
        self._spec: Spec | None = None
        self._spec_digest = ""
        self._views: tuple[View, ...] = ()
        self._views_digest = ""
        self._views_read: frozenset[str] = frozenset()
        self._digests: tuple[str, ...] = ()
        self._column_slices: int | None = None
        self._released = False  # the transport has no slots: it needs the table again
        self.table: TensorTable | None = None
        self.table_digest = ""
        self.nbytes = 0
        self.transports: tuple[bytes, ...] = ()

    def arrive(
        self,
        version: int,
        wait: Wait,
        phases: Phases,
        refusal: BaseException | None,
        *,
        column_slices: int = ANY,
        begins: bool = True,
    ) -> Resolved:
        """Resolve the source on every rank, and agree on what is to be sent.

        Args:
            refusal: why rank 0 won't send this version.
            column_slices: rank 0: what the table's readers say (``WeightTarget.column_slices``).
            begins: this is the call's first wave.
        """
        error = refusal
        resolved: Resolved | None = None
        agreed = () if self._released else self._digests
        arrival = _Arrival(version, wait, "", agreed, column_slices, self._column_slices)
        with phases.timed("offer"):
            try:
                resolved = self._resolve()
                spec = self._publish_spec(resolved)
                arrival = msgspec.structs.replace(arrival, spec=spec)
            except BaseException as caught:  # an interruption too: the other ranks are told
                error = error or caught
            drive(self._agreement.next_round(begins=begins), self._watch)
            payloads = drive(
                self._agreement.agree("arrive", msgspec.msgpack.encode(arrival), error), self._watch
            )
            arrivals = [unpack(payload, _Arrival, "a trainer rank") for payload in payloads]
            _refuse_unlike(arrivals)
            assert resolved is not None  # noqa: S101 - agree() raised otherwise
            digests = tuple(other.spec for other in arrivals)
            slices = _slices(arrivals[0])
            # Unless every rank came to a table for just these last time, all make it anew.
            if any((other.agreed, other.last_slices) != (digests, slices) for other in arrivals):
                self._agree_on_table(digests, slices)
        return resolved

    def _resolve(self) -> Resolved:
        refuse_lockstep(self._source, self._backend, self._options.world_size)
        if isinstance(self._source, StreamingSource):
            return self._source.resolve(self._rules)
        return self._resolver.resolve()

    def _publish_spec(self, resolved: Resolved) -> str:
        """Put what this rank holds where the others find it; returns its digest."""
        if resolved.views != self._views:
            self._views, self._views_digest = (), ""
            if resolved.views:  # apart: most ranks have the same, and it is stored once
                self._views_digest = self._publish(resolved.views)
            self._views = resolved.views
        spec = msgspec.structs.replace(resolved.spec, views=self._views_digest)
        if spec != self._spec:
            self._spec_digest = self._publish(spec)
            self._spec = spec
        return self._spec_digest

    def _publish(self, value: Any) -> str:
        payload = msgspec.msgpack.encode(value)
        return blob_digest(payload) if self._agreement.alone else self._session.put_blob(payload)

    def _agree_on_table(self, digests: tuple[str, ...], slices: int) -> None:
        """Make the table of all ranks' specs."""
        self._digests = ()  # until every rank has it
        error: BaseException | None = None
        made = b""
        try:
            assert self._spec is not None  # noqa: S101 - _publish_spec() set it
            others = {*digests} - {self._spec_digest}
            specs = {digest: self._read(digest, Spec) for digest in others}
            specs[self._spec_digest] = self._spec
            self._use_table([specs[digest] for digest in digests], slices)
            described = checked_description(self._transport.describe())
            made = msgspec.msgpack.encode(_Made(self.table_digest, self._options.verify, described))
        except BaseException as caught:
            error = caught
        payloads = drive(self._agreement.agree("table", made, error), self._watch)
        found = [unpack(payload, _Made, "a trainer rank") for payload in payloads]
        _refuse_other_options(found)
        self.transports = tuple(other.transport for other in found)
        self._digests, self._column_slices = digests, slices

    def _read(self, digest: str, kind: type[T]) -> T:
        payload = self._session.get_blob(digest)
        if payload is None:
            raise SessionError(f"the spec {digest} of a trainer rank is gone: send again")
        try:
            return msgspec.msgpack.decode(payload, type=kind)
        except (msgspec.DecodeError, RecursionError) as error:
            raise TableMismatch(
                f"what a trainer rank says it holds can't be read ({error}): "
                "run one weightwire version on all ranks"
            ) from error

    def _use_table(self, specs: Sequence[Spec], slices: int) -> None:
        whole = self._backend.capabilities.whole_tensors
        views = merge_views(self._all_views(specs))
        table = build_table(
            specs,
            self._options.group_bytes,
            whole=whole,
            column_slices=slices if self._transport.column_blocks else 1,
            views=views,
        )
        exchange = ExchangePlan(table, specs, views) if whole else None
        self._exchanges = exchange is not None and exchange.needed
        overlap = self._options.overlap
        self._plan = SendPlan(table, self._options.rank, exchange, overlap=overlap)
        digest = table.digest()
        if digest == self.table_digest and not self._released:
            return
        limit = self._backend.capabilities.max_tensor_nbytes
        for entry in table.tensors:
            if limit is not None and entry.nbytes > limit:
                raise UnsupportedOperation(
                    f"tensor {entry.name!r} has {entry.nbytes} bytes, backend "
                    f"{self._backend.name!r} takes {limit}: choose another backend"
                )
        self.table_digest = ""
        self._transport.set_table(table)
        self._released = False
        self.table, self.table_digest, self.nbytes = table, digest, table.nbytes

    def _opened(self, resolved: Resolved) -> CheckpointTensors | Stream:
        if resolved.stream is None:
            return CheckpointTensors(resolved.tensors, resolved.views, resolved.spec.ties)
        assert self.table is not None  # noqa: S101 - _arrive() set it
        options = self._options
        return resolved.stream.open(self.table, options.rank, options.group_bytes)

    def _all_views(self, specs: Sequence[Spec]) -> dict[int, Sequence[View]]:
        first = {spec.views: rank for rank, spec in reversed([*enumerate(specs)]) if spec.views}
        self._views_read = frozenset(first)
        return {
            rank: self._views
            if digest == self._views_digest
            else self._read(digest, tuple[View, ...])
            for digest, rank in first.items()
        }

    @property
    def blobs(self) -> frozenset[str]:
        """Digests of what this trainer still reads from the session: specs and the table."""
        read = {*self._digests, self._spec_digest, *self._views_read, self._views_digest}
        return frozenset({*read, self.table_digest})

    def abort(self, error: BaseException) -> None:
        """Give up the version that is being moved, if there is one.  Idempotent."""
        self._exchange.leave()
        if self._sending:
            self._sending = False
            self._transport.abort(error)

    def release_buffers(self) -> None:
        """Between versions: this rank's staging memory goes, and comes again with the next one."""
        self._released = True
        if self._plan is not None:
            self._plan.release()
        self._transport.release_buffers()

    def done(self) -> None:
        """The version is out: from here on there is nothing to abort."""
        self._sending = False

    def prepare(self, version: int) -> None:
        """While receivers make up their minds: what can be done before they have."""
        if self._plan is not None:
            self._plan.prepare(version, self._options.verify)

    def move(
        self,
        offer: Offer,
        readers: Mapping[str, Sequence[bytes]],
        resolved: Resolved,
        phases: Phases,
        began: float,
    ) -> Report:
        """This rank's part of the transfer; returns when every rank's bytes are safe."""
        assert self._plan is not None  # noqa: S101 - _arrive() set it
        error: BaseException | None = None
        digest = 0
        self._sending = True
        tensors: CheckpointTensors | Stream | None = None
        try:
            self._transport.begin(offer, readers)
            tensors = self._opened(resolved)
            if self._exchanges:
                self._exchange.join(offer.policy)
            digest = self._plan.send(
                tensors,
                self._transport,
                self._backend.capabilities,
                self._exchange,
                version=offer.policy.version,
                of=stamp(self._session.id, offer.policy),
                verify=self._options.verify,
                watch=self._watch,
                phases=phases,
            )
        except BaseException as caught:
            if isinstance(tensors, Stream):
                tensors.close()
                if resolved.stream is not None:
                    resolved.stream.forget()
            if self._agreement.alone:
                raise
            error = caught
            self.abort(error)  # first, so that no reader makes another rank wait for this one
        with phases.timed("commit"):
            drive(self._agreement.agree("sent", b"", error), self._watch)
        capabilities = self._backend.capabilities
        return Report(
            role="sender",
            backend=self._backend.name,
            version=offer.policy.version,
            attempt=offer.policy.attempt,
            incarnation=offer.policy.incarnation,
            nbytes=self._plan.nbytes,
            seconds=time.perf_counter() - began,
            phases=dict(phases.seconds),
            digest=combine(digest, self._options.verify),
            path=f"{self._backend.name} ({self._transport.path or capabilities.flow})",
            roster=offer.roster,
        )


def _slices(first: _Arrival) -> int:
    """For which slices of columns the table is made: those of the last one count on.

    Readers that come and go would have it made anew otherwise.
    """
    before = () if first.last_slices is None else (first.last_slices,)
    return common_slices((first.column_slices, *before))


def _refuse_unlike(arrivals: Sequence[_Arrival]) -> None:
    first = arrivals[0]
    for rank, other in enumerate(arrivals):
        if (other.version, other.wait) != (first.version, first.wait):
            raise ConfigError(
                f"trainer rank {rank} sends version {other.version} (wait={other.wait!r}), rank 0 "
                f"{first.version} (wait={first.wait!r}): call send alike on all ranks"
            )


def _refuse_other_options(made: Sequence[_Made]) -> None:
    """Ranks that lay slots out differently would be read as if they agreed."""
    for rank, other in enumerate(made):
        if other.table != made[0].table:
            raise ConfigError(
                f"trainer rank {rank} makes another table than rank 0 of the same tensors: give "
                "all ranks the same group_bytes and options of the backend"
            )
        if other.verify != made[0].verify:
            raise ConfigError(
                f"trainer rank {rank} has verify={other.verify!r}, rank 0 {made[0].verify!r}: "
                "give all ranks the same"
            )
