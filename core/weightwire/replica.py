"""One inference rank's part in applying a version, in step with its siblings."""

from __future__ import annotations

import contextlib
import time

import msgspec

from weightwire.contract import Capabilities, Offer, Policy, ReceiverTransport, checked_description
from weightwire.deadline import Deadline, Watch
from weightwire.digest import combine
from weightwire.errors import SessionError, TableMismatch, WeightWireError
from weightwire.fingerprint import Fingerprint, combine_fingerprints
from weightwire.lifecycle.acts import Commit, Fetch, Install, Prepare, Rollback
from weightwire.parts import Fetched, compare_parts
from weightwire.phases import Phases
from weightwire.pipeline import FetchPlan
from weightwire.report import Report
from weightwire.session.agreement import Agreement
from weightwire.session.records import Applied, RankReport, recorded, unpack
from weightwire.session.session import Session
from weightwire.stamp import stamp
from weightwire.table import TensorTable
from weightwire.targets import WeightTarget
from weightwire.waiting import Act, Run, Steps, drive

__all__ = ["Attempt", "Replica"]

_GO, _AGAIN = b"go", b"again"
_DETOUR = b"detour:"  # no offer begins so
_ROLLBACK_SECONDS = 0.15
_MOST_ROLLBACK_SECONDS = 3.0
"""How long ranks wait for each other's roll-back beyond the call's deadline."""


class Attempt:
    """One version on its way into the target."""

    def __init__(self, before: int | None) -> None:
        self.before = before
        self.offer: Offer | None = None
        self.run: Run[Policy] | None = None
        self.told = False
        self.started = False
        self.late = False  # it is taken on another way: see ``catch_up``
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


class Replica:
    """This rank's target and transport, and the agreement with the replica's other ranks.

    Rank 0 performs the acts of its ``ReceiverMachine``; the others follow what it
    tells.  A failure on one rank is raised on all of them.
    """

    def __init__(
        self,
        session: Session,
        agreement: Agreement,
        transport: ReceiverTransport,
        target: WeightTarget,
        capabilities: Capabilities,
        watch: Watch,
        *,
        overlap: bool,
    ) -> None:
        self._session = session
        self._agreement = agreement
        self._transport = transport
        self._target = target
        self._capabilities = capabilities
        self._watch = watch
        self._overlap = overlap
        self._plan: FetchPlan | None = None
        self._table_digest = ""
        self._receiving = False

    def perform(self, attempt: Attempt, act: Act) -> object:
        """Rank 0: carry out what the machine asks for, on all ranks."""
        match act:
            case Prepare(offer):
                return self._lead_prepare(attempt, offer)
            case Install():
                return None
            case Fetch():
                return drive(self.fetch_on_all(attempt), self._watch)
            case Commit():
                return drive(self.commit_on_all(attempt), self._watch)
            case Rollback(error):
                return self.roll_back(attempt, error)
        raise TypeError(f"a receiver doesn't perform {act!r}")

    def _lead_prepare(self, attempt: Attempt, offer: Offer) -> tuple[bytes, ...]:
        if attempt.offer is not None:
            self._agreement.tell("go", _AGAIN)
        attempt.reset(offer)
        self._agreement.open_round()
        attempt.told = True
        self._agreement.tell("offer", msgspec.msgpack.encode(offer))
        return drive(self.prepare_on_all(attempt, offer), self._watch)

    # ---------------------------------------------------------------------- every rank

    def prepare_on_all(self, attempt: Attempt, offer: Offer) -> Steps[tuple[bytes, ...]]:
        error: BaseException | None = None
        described = b""
        with attempt.phases.timed("ready"):
            try:
                self._prepare(offer)
                described = checked_description(self._transport.describe())
            except BaseException as caught:  # an interruption too: the other ranks are told
                error = caught
            return (yield from self._agreement.agree("prepared", described, error))

    def _prepare(self, offer: Offer) -> None:
        self._transport.check(offer)
        if offer.table_digest == self._table_digest and self._plan is not None:
            self._check_senders(offer, self._plan.table)
            return
        payload = self._session.get_blob(offer.table_digest)
        if payload is None and self._session.has_blob(offer.table_digest):
            raise TableMismatch(
                f"the tensor table of {offer.policy} isn't the one that its offer names: "
                "something changed it in the session; open the sender again"
            )
        if payload is None:
            raise SessionError(
                f"the tensor table of {offer.policy} isn't in the session: was it deleted? "
                "send a new version"
            )
        table = TensorTable.decode(payload)
        self._check_senders(offer, table)
        self._table_digest = ""
        regions = tuple(self._target.plan(table))
        plan = FetchPlan(
            table,
            regions,
            pieces=self._target.takes_pieces,
            # What lands where it belongs is copied by the transport; descriptors don't count.
            blocks=not self._capabilities.lands_in_place,
            overlap=self._overlap,
        )
        self._transport.set_plan(table, plan.regions)
        self._plan = plan
        self._table_digest = offer.table_digest

    def _check_senders(self, offer: Offer, table: TensorTable) -> None:
        if len(offer.senders) != table.world_size:
            raise TableMismatch(
                f"{offer.policy} names {len(offer.senders)} sender ranks, its table "
                f"{table.world_size}: run one weightwire version on both sides"
            )

    def fetch_on_all(self, attempt: Attempt) -> Steps[None]:
        assert self._plan is not None  # noqa: S101 - prepared
        assert attempt.offer is not None  # noqa: S101 - begun
        offer = attempt.offer
        error: BaseException | None = None
        fetched = Fetched()
        self._receiving = True
        try:
            self._transport.begin(offer)
            attempt.dirty = True
            self._target.begin(offer.policy.version)
            fetched = self._plan.fetch(
                self._transport,
                self._target,
                self._capabilities,
                version=offer.policy.version,
                of=stamp(self._session.id, offer.policy),
                verify=offer.verify,
                watch=self._watch,
                phases=attempt.phases,
            )
        except BaseException as caught:
            if self._agreement.alone:
                raise
            error = caught
            self._abort(error)  # first, so that no sender makes another rank wait for this one
        payloads = yield from self._agreement.agree("fetched", fetched.encode(), error)
        ranks = [Fetched.decode(payload) for payload in payloads]
        compare_parts(self._plan.table, ranks, offer.policy.version)  # the same on every rank
        attempt.digest = fetched.digest
        attempt.total = sum(rank.digest for rank in ranks) & ((1 << 64) - 1)

    def commit_on_all(self, attempt: Attempt) -> Steps[Applied]:
        assert attempt.offer is not None  # noqa: S101 - begun
        assert self._plan is not None  # noqa: S101 - prepared
        error: BaseException | None = None
        payload = b""
        try:
            with attempt.phases.timed("finalize"):
                self._target.commit()
            with attempt.phases.timed("verify"):
                payload = self._fingerprint(attempt.offer)
        except BaseException as caught:
            if self._agreement.alone:
                raise
            error = caught
        with attempt.phases.timed("commit"):
            payloads = yield from self._agreement.agree("committed", payload, error)
            # Rank 0 reports the version as applied only when the others need no record more.
            self._agreement.acknowledge("settled")
            if self._agreement.leads:
                yield from self._agreement.acknowledged("settled")
        fingerprints = [
            unpack(payload, Fingerprint | None, f"rank {rank}")  # type: ignore[arg-type]  # a union
            for rank, payload in enumerate(payloads)
        ]
        attempt.committed = True
        self._receiving = False
        return Applied(
            nbytes=self._plan.nbytes,
            seconds=time.perf_counter() - attempt.began,
            digest=combine(attempt.total, attempt.offer.verify),
            fingerprint=combine_fingerprints(fingerprints),
            phases=recorded(attempt.phases.seconds),
        )

    def _fingerprint(self, offer: Offer) -> bytes:
        verifies = offer.verify != "off"
        return msgspec.msgpack.encode(
            self._target.fingerprint(offer.policy.version) if verifies else None
        )

    def roll_back(self, attempt: Attempt, error: BaseException) -> bool:
        """Undo on this rank; True only if every rank's target is what it was."""
        restored = True
        self._table_digest = ""  # the next version is planned anew: the target may have changed
        self._abort(error)
        if attempt.dirty:
            try:
                restored = not attempt.committed and bool(self._target.rollback(error))
            except Exception as failure:
                error.add_note(f"rolling back failed too: {failure}")
                restored = False
        if self._agreement.alone or attempt.committed:
            return restored
        for step in ("fetched", "committed"):  # whoever still waits there hears why
            self._agreement.fail(step, error)
        report = RankReport(b"\1" if restored else b"\0")
        try:
            reports = drive(self._agreement.gather("rolled-back", report), self._watch_rollback())
        except WeightWireError:
            return False
        return all(part.payload == b"\1" for part in reports)

    def _abort(self, error: BaseException) -> None:
        if self._receiving:
            self._receiving = False
            with contextlib.suppress(Exception):
                self._transport.abort(error)

    # ---------------------------------------------------------------------- other ranks

    def tell_go(self) -> None:
        """Rank 0: the transfer has started."""
        self._agreement.tell("go", _GO)

    def tell_detour(self, attempt: Attempt, policy: Policy) -> None:
        """Rank 0: this version is taken on another way."""
        self._agreement.open_round()
        attempt.told = True
        self._agreement.tell("offer", _DETOUR + msgspec.msgpack.encode(policy))

    def release_buffers(self) -> None:
        """Between versions: this rank's receive memory goes; the next version is planned anew."""
        self._table_digest = ""
        if self._plan is not None:
            self._plan.release()
        self._transport.release_buffers()
        self._target.release_buffers()

    def forget_plan(self) -> None:
        """The target was planned for another table since."""
        self._table_digest = ""

    def follow_begin(self, attempt: Attempt) -> Offer | Policy:
        """Other ranks: what rank 0 takes, planned and started; or what it takes on another way."""
        return drive(self._follow_begin(attempt), self._watch)

    def _follow_begin(self, attempt: Attempt) -> Steps[Offer | Policy]:
        begins = True
        while True:
            yield from self._agreement.next_round(begins=begins)
            begins = False
            heard = yield from self._agreement.hear("offer")
            if heard.startswith(_DETOUR):
                return unpack(heard.removeprefix(_DETOUR), Policy, "rank 0")
            offer = unpack(heard, Offer, "rank 0")
            attempt.reset(offer)
            yield from self.prepare_on_all(attempt, offer)
            if (yield from self._agreement.hear("go")) == _GO:
                return offer

    def _watch_rollback(self) -> Watch:
        """A watch without the failure that is being rolled back."""
        watch = Watch()
        left = self._watch.deadline.remaining()
        watch.start(Deadline(min(left, _MOST_ROLLBACK_SECONDS) + _ROLLBACK_SECONDS))
        return watch

    def tell_failure(self, attempt: Attempt, error: BaseException) -> None:
        """The version failed before its first byte: the other ranks hear why."""
        if not self._agreement.leads:
            if attempt.offer is not None:
                self._agreement.fail("prepared", error)
                self._agreement.fail("fetched", error)
            return
        if not attempt.told:
            self._agreement.open_round()
            self._agreement.tell("offer", b"", error)
        self._agreement.tell("go", b"", error)

    def report(self, attempt: Attempt, backend: str) -> Report:
        """What the attempt did on this rank."""
        assert self._plan is not None  # noqa: S101 - prepared
        assert attempt.offer is not None  # noqa: S101 - begun
        policy = attempt.offer.policy
        return Report(
            role="receiver",
            backend=backend,
            version=policy.version,
            attempt=policy.attempt,
            incarnation=policy.incarnation,
            nbytes=self._plan.nbytes,
            seconds=time.perf_counter() - attempt.began,
            phases=dict(attempt.phases.seconds),
            digest=combine(attempt.digest, attempt.offer.verify),
            path=", ".join(
                part
                for part in (
                    f"{backend} ({self._transport.path or self._capabilities.flow})",
                    self._target.path,
                )
                if part
            ),
            roster=attempt.offer.roster,
        )
