"""One trainer rank's part in sending a version, in step with its siblings."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import msgspec

from weightwire.contract import Backend, Offer, SenderTransport, Wait
from weightwire.deadline import Watch
from weightwire.errors import ConfigError, TableMismatch, UnsupportedOperation
from weightwire.options import SenderOptions
from weightwire.pipeline import SendPlan, combine
from weightwire.report import Phases, Report
from weightwire.session.agreement import Agreement
from weightwire.sources import Resolved, WeightSource, WireRules, resolve
from weightwire.table import TensorTable
from weightwire.tables import build_table
from weightwire.waiting import drive

__all__ = ["Arrival", "Start", "TrainerRank"]


class Arrival(msgspec.Struct, frozen=True):
    """What a rank brings to a ``send``."""

    version: int
    wait: str
    table_digest: str
    transport: bytes


class Start(msgspec.Struct, frozen=True):
    """What rank 0 tells the others when the transfer starts."""

    offer: Offer
    readers: dict[str, tuple[bytes, ...]]


class TrainerRank:
    """This rank's source and transport, and the agreement with the trainer's other ranks.

    Attributes:
        table: of the last source that was resolved.
    """

    def __init__(
        self,
        backend: Backend,
        agreement: Agreement,
        transport: SenderTransport,
        source: WeightSource,
        rules: WireRules,
        options: SenderOptions,
        watch: Watch,
    ) -> None:
        self._backend = backend
        self._agreement = agreement
        self._transport = transport
        self._source = source
        self._rules = rules
        self._options = options
        self._watch = watch
        self._plan: SendPlan | None = None
        self._sending = False
        self.table: TensorTable | None = None
        self.table_digest = ""

    def arrive(
        self, version: int, wait: Wait, phases: Phases, refusal: BaseException | None
    ) -> tuple[Resolved, list[Arrival]]:
        """Resolve the source on every rank, and agree on what is to be sent.

        Args:
            refusal: why rank 0 won't send this version.
        """
        error = refusal
        resolved: Resolved | None = None
        arrival = Arrival(version, wait, "", b"")
        with phases.timed("offer"):
            try:
                resolved = resolve(self._source, self._rules)
                self._use_table(
                    build_table(resolved, self._options.world_size, self._options.group_bytes)
                )
                arrival = Arrival(version, wait, self.table_digest, self._transport.describe())
            except BaseException as caught:  # an interruption too: the other ranks are told
                error = caught
            self._agreement.next_round()
            payloads = drive(
                self._agreement.agree("arrive", msgspec.msgpack.encode(arrival), error), self._watch
            )
        assert resolved is not None  # noqa: S101 - agree() raised otherwise
        arrivals = [msgspec.msgpack.decode(payload, type=Arrival) for payload in payloads]
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
        if digest == self.table_digest:
            return
        limit = self._backend.capabilities.max_tensor_nbytes
        for entry in table.tensors:
            if limit is not None and entry.nbytes > limit:
                raise UnsupportedOperation(
                    f"tensor {entry.name!r} has {entry.nbytes} bytes, backend "
                    f"{self._backend.name!r} takes {limit}: choose another backend"
                )
        self._transport.set_table(table)
        self._plan = SendPlan(table, self._options.rank)
        self.table, self.table_digest = table, digest

    def abort(self, error: BaseException) -> None:
        """Give up the version that is being moved, if there is one.  Idempotent."""
        if self._sending:
            self._sending = False
            self._transport.abort(error)

    def done(self) -> None:
        """The version is out: from here on there is nothing to abort."""
        self._sending = False

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
            self.abort(error)  # first, so that no reader makes another rank wait for this one
        with phases.timed("commit"):
            drive(self._agreement.agree("sent", b"", error), self._watch)
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
            path=f"{self._backend.name} ({self._backend.capabilities.flow})",
            roster=offer.roster,
        )
