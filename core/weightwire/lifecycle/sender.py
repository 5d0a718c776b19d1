"""Rank 0 of the sender: one version from its offer to its outcome."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from weightwire.blocks import common_slices
from weightwire.contract import Capabilities, Offer, Policy, Wait
from weightwire.errors import (
    ConfigError,
    PeerLost,
    SessionError,
    UnsupportedOperation,
    VerificationError,
    WeightWireError,
)
from weightwire.fingerprint import Fingerprint
from weightwire.lifecycle.acts import Transfer
from weightwire.lifecycle.history import outcome_of
from weightwire.lifecycle.rollout import Rollout, Terms, replica_of
from weightwire.lifecycle.states import (
    SENDER_TRANSITIONS,
    SenderState,
)
from weightwire.session import keys
from weightwire.session.lease import LeaseObserver, Member
from weightwire.session.membership import live_members, newest
from weightwire.session.records import (
    Applied,
    ErrorInfo,
    OfferRecord,
    Outcome,
    Ready,
    Started,
    recorded,
)
from weightwire.session.session import Session
from weightwire.waiting import Steps, Waiting

__all__ = ["Offering", "SenderMachine", "lost_readers"]


def _do_nothing() -> None:
    pass


@dataclass(frozen=True)
class Offering:
    """What ``SenderMachine.send`` is asked to do."""

    version: int
    table_digest: str
    nbytes: int
    senders: tuple[bytes, ...]
    verify: str
    wait: Wait
    terms: Terms


class SenderMachine:
    """Rank 0 of the sender.

    Args:
        member: the claimed incarnation.
        capabilities: of the backend.

    Attributes:
        offers_to: receivers for which it is false get no offer.
        more: after ``send``: other receivers still have to get the version, in a wave
            that calling it again, without ``begin``, moves.
        left_out: of the last wave's roster, those that it went on without.
        phases: asked for the seconds by phase of this wave, when its outcome is recorded.
        meanwhile: called when an offer is out that receivers have to answer first.
    """

    def __init__(
        self,
        session: Session,
        member: Member,
        observer: LeaseObserver,
        capabilities: Capabilities,
    ) -> None:
        self.session = session
        self.member = member
        self.observer = observer
        self.capabilities = capabilities
        self.state = SenderState.IDLE
        self.last: Policy | None = None
        self.more = False
        self.left_out: frozenset[str] = frozenset()
        self.phases: Callable[[], Mapping[str, float]] = dict
        self.meanwhile: Callable[[], None] = _do_nothing
        self._last_finished = False
        self.offers_to: Callable[[str, Member], bool] | None = None
        self._rollout = Rollout()
        self._last_roster: frozenset[str] = frozenset()
        self._finished: list[int] = []

    def _enter(self, state: SenderState) -> None:
        if state not in SENDER_TRANSITIONS[self.state]:
            raise AssertionError(f"sender can't go from {self.state} to {state}")
        self.state = state

    def next_policy(self, version: int) -> Policy:
        """The policy that ``send(version)`` would offer.

        Raises:
            ConfigError: versions must rise; only an aborted one may be sent again.
        """
        keys.validate_version(version)
        resumed = self.member.record.resume_from
        if resumed is not None and version <= resumed:
            raise ConfigError(
                f"version {version} doesn't rise above resume_from={resumed}: send {resumed + 1}"
            )
        attempt = 1
        if self.last is not None:
            if version < self.last.version or (
                version == self.last.version and self._last_finished
            ):
                raise ConfigError(
                    f"version {version} doesn't rise above {self.last.version}, the last one sent: "
                    f"send {self.last.version + 1}"
                )
            if version == self.last.version:
                attempt = self.last.attempt + 1
        return Policy(self.member.incarnation, version, attempt)

    def begin(self) -> None:
        """A version comes, with its first wave; one that ended between its waves is given up."""
        self.more = False
        self._rollout = Rollout()

    def send(self, offering: Offering) -> Steps[Policy | None]:
        """One wave of a version, from its offer to its outcome; see ``more``.

        ``begin`` comes before the first.

        Returns:
            None if nobody was left for another wave.

        Raises:
            ConfigError: the version doesn't rise.
            SessionError: a newer sender has taken the session over.
            TransferTimeout, PeerLost, ...: it was aborted; the record says why.
        """
        self._refuse_if_superseded()
        policy = self.next_policy(offering.version)
        began = time.monotonic()
        roster = yield from self._next_wave(offering)
        if not roster and self.more:
            self._finish(offering.version)  # whoever was left has gone meanwhile
            return None
        offer = Offer(
            policy=policy,
            table_digest=offering.table_digest,
            roster=tuple(sorted(roster)),
            senders=offering.senders,
            verify=offering.verify,  # type: ignore[arg-type]  # checked when the sender opened
        )
        wave = dict(roster)
        self.last, self._last_finished = policy, False
        self._last_roster = self._last_roster | roster.keys() if self.more else frozenset(roster)
        self._enter(SenderState.OFFERED)
        try:
            self._write_offer(offer, offering)
            if self.capabilities.flow == "store":
                yield Transfer(offer, {})
                self._start(policy, roster)
            else:
                self.meanwhile()
                readers = yield from self._gather_ready(offer, roster, offering)
                self._start(policy, roster)
                # Whoever gave up just before may not have seen ``started``.
                self._look_who_is_ready(offer, roster, readers, offering)
                for receiver_id in roster.keys() - readers.keys():
                    error = PeerLost(
                        f"receiver {receiver_id!r} gave {policy} up just before it started: "
                        "its own error says why; send it again"
                    )
                    self._go_on_without(receiver_id, roster, offering, error)
                yield Transfer(offer, readers)
            if offering.wait == "applied" or self._goes_in_waves(offering):
                yield from self._gather_applied(offer, roster, offering)
            self.left_out = frozenset(wave.keys() - roster.keys())
            self._enter(SenderState.CLOSING)
            self._refuse_if_superseded()
            self._rollout.done.update({name: member.incarnation for name, member in wave.items()})
            self.more = self._goes_in_waves(offering) and self._is_anybody_left(offering)
            self._conclude(policy, None, began)
        except GeneratorExit:
            raise  # a crash, to the tests: nothing may be written any more
        except BaseException as error:
            self.state, self.more = SenderState.IDLE, False
            self._conclude(policy, error, began)
            raise
        self._enter(SenderState.IDLE)
        return policy

    def _write_offer(self, offer: Offer, offering: Offering) -> None:
        terms = offering.terms
        self.session.ring("senders")
        self.session.write(
            keys.version(offer.policy, "offer"),
            OfferRecord(
                offer,
                self.member.record.backend,
                offering.nbytes,
                offering.wait,
                time.time(),
                max_receivers=terms.max_receivers,
                max_unavailable=terms.max_unavailable,
            ),
        )

    def _start(self, policy: Policy, readers: Mapping[str, Member]) -> None:
        self._refuse_if_superseded()
        started = Started({name: readers[name].incarnation for name in sorted(readers)})
        self.session.ring("senders")
        self.session.write(keys.version(policy, "started"), started)
        self._enter(SenderState.STARTED)

    def _conclude(self, policy: Policy, error: BaseException | None, began: float) -> None:
        info = None if error is None else ErrorInfo.of(error)
        seconds, phases = time.monotonic() - began, recorded(self.phases())
        outcome = Outcome(info, seconds, time.time(), more=self.more, phases=phases)
        try:
            self.session.ring("senders")
            if self.session.create(keys.version(policy, "outcome"), outcome):
                finished = error is None and not self.more
            else:
                # Interrupted just after it was written: what is there counts.
                written = outcome_of(self.session, policy)
                finished = written is not None and written.error is None and not written.more
            if finished:
                self._finish(policy.version)
        except SessionError:
            if error is None:
                raise  # else the first error matters more than a session that is gone

    def _finish(self, version: int) -> None:
        self.more, self._last_finished = False, True
        self._finished.append(version)

    def supersession(self) -> SessionError | None:
        """Why this sender may not go on, or None."""
        try:
            self._refuse_if_superseded()
        except SessionError as error:
            return error
        return None

    def _refuse_if_superseded(self) -> None:
        current = newest(self.session, "senders")
        if current is None:
            raise SessionError(
                f"session {self.session.url} lost its sender record: something deleted it; "
                "open a new sender"
            )
        if current.incarnation != self.member.incarnation:
            raise SessionError(
                f"session {self.session.url} was taken over by process {current.record.pid} on "
                f"{current.record.host}: close this sender"
            )

    # ---------------------------------------------------------------------- the pool

    def column_slices(self, terms: Terms, wait: Wait) -> Steps[int]:
        """In how many slices of columns those read who'd get an offer now; waits for enough."""
        roster = yield from self._roster(terms, wait)
        return common_slices(member.record.column_slices for member in roster.values())

    def _goes_in_waves(self, offering: Offering) -> bool:
        """Stored versions are read when their readers choose; those take turns instead."""
        return self.capabilities.flow != "store" and offering.terms.max_unavailable is not None

    def _next_wave(self, offering: Offering) -> Steps[dict[str, Member]]:
        roster = yield from self._roster(offering.terms, offering.wait)
        if not self._goes_in_waves(offering):
            return roster
        pool = {name: replica_of(self.session, member) for name, member in roster.items()}
        return self._rollout.next_wave(offering.version, pool, offering.terms.max_unavailable)

    def _is_anybody_left(self, offering: Offering) -> bool:
        alive = self._ours(live_members(self.session, self.observer))
        chosen = self._chosen(alive, offering.terms.max_receivers)
        return any(not self._rollout.is_done(name, member) for name, member in chosen.items())

    def _ours(self, alive: Mapping[str, Member]) -> dict[str, Member]:
        ours = self.member.record.backend
        return {
            name: member
            for name, member in alive.items()
            if _backend(member) == ours and (not self.offers_to or self.offers_to(name, member))
        }

    def _roster(self, terms: Terms, wait: Wait) -> Steps[dict[str, Member]]:
        needs_live = self.capabilities.needs_live_receivers
        waits = needs_live or wait == "applied" or terms.max_version_lag is not None
        minimum = terms.min_receivers if needs_live and not self.more else 0
        while True:
            alive = live_members(self.session, self.observer)
            roster = self._ours(alive)
            unsure = [
                receiver_id
                for receiver_id, member in roster.items()
                if not self.observer.is_confirmed(member)
            ]
            if unsure and waits:
                # One that died before we looked would fail the version: a lease tells.
                yield Waiting("sign of life", tuple(f"receiver {name!r}" for name in unsure))
                continue
            if len(roster) >= minimum:
                roster = self._chosen(roster, terms.max_receivers)
                if not (behind := self._too_far_behind(roster, terms.max_version_lag)):
                    return roster
                lag = terms.max_version_lag
                yield Waiting(f"receivers to come within max_version_lag={lag}", behind)
                continue
            others = tuple(
                f"receiver {name!r} (opened with {_backend(member)!r}, this sender with "
                f"{self.member.record.backend!r})"
                for name, member in alive.items()
                if name not in roster
            )
            joined = f"receivers ({len(roster)} of at least {minimum} joined)"
            yield Waiting(joined, others or ("receivers",))

    def _chosen(self, roster: dict[str, Member], most: int | None) -> dict[str, Member]:
        """At most ``most`` of them: those of the last offer, then those that joined first."""
        takes = self.capabilities.max_receivers
        if most is None and takes is not None and len(roster) > takes:
            raise UnsupportedOperation(
                f"{len(roster)} receivers are in the session, this backend takes {takes}: "
                f"close some, open the sender with max_receivers={takes}, or choose another backend"
            )

        def rank(name: str) -> tuple[bool, float, str]:
            return name not in self._last_roster, roster[name].record.created, name

        return {name: roster[name] for name in sorted(roster, key=rank)[:most]}

    def _too_far_behind(self, roster: Mapping[str, Member], most: int | None) -> tuple[str, ...]:
        """Readers of stored versions that must catch up before there is another one."""
        if most is None or self.capabilities.flow != "store":
            return ()
        behind = []
        for name, member in roster.items():
            replica = replica_of(self.session, member)
            lag = replica.lag(self.member.incarnation, self._finished)
            if lag > most and replica.serving is not None:
                behind.append(f"receiver {name!r} (serves {replica.serving.version}, {lag} behind)")
        return tuple(behind)

    def _may_stay_behind(self, member: Member, most: int) -> bool:
        replica = replica_of(self.session, member)
        if replica.serving is None:
            return True
        return replica.lag(self.member.incarnation, self._finished) + 1 <= most

    # ---------------------------------------------------------------------- the answers

    def _gather_ready(
        self, offer: Offer, roster: dict[str, Member], offering: Offering
    ) -> Steps[dict[str, Sequence[bytes]]]:
        readers: dict[str, Sequence[bytes]] = {}
        patience = time.monotonic() + offering.terms.ready_within
        while True:
            self._look_who_is_ready(offer, roster, readers, offering)
            if time.monotonic() >= patience:
                self._leave_behind(roster, readers, offering)
            missing = sorted(roster.keys() - readers.keys())
            if not missing:
                return readers
            yield self._waiting("receiver_ready", missing)

    def _leave_behind(
        self,
        roster: dict[str, Member],
        readers: Mapping[str, Sequence[bytes]],
        offering: Offering,
    ) -> None:
        """Strike off those that aren't ready, if all of them may fall behind."""
        most = offering.terms.max_version_lag
        if most is None:
            return
        late = roster.keys() - readers.keys()
        enough = 1 if self._goes_in_waves(offering) else max(1, offering.terms.min_receivers)
        if len(readers) >= enough and all(
            self._may_stay_behind(roster[name], most) for name in late
        ):
            for name in late:
                del roster[name]

    def _look_who_is_ready(
        self,
        offer: Offer,
        roster: dict[str, Member],
        readers: dict[str, Sequence[bytes]],
        offering: Offering,
    ) -> None:
        """Fill ``readers``; who was ready may have taken it back since."""
        for receiver_id, member in list(roster.items()):
            place = keys.answer(offer.policy, "ready", receiver_id, member.incarnation)
            ready = self.session.read(place, Ready)
            if ready is not None and ready.declined is None:
                readers[receiver_id] = ready.transports
                continue
            readers.pop(receiver_id, None)
            if ready is not None and ready.declined is not None:
                error = ready.declined.to_error(f"receiver {receiver_id!r} declined")
                self._go_on_without(receiver_id, roster, offering, error)
            elif why := self._why_lost(receiver_id, member):
                self._lose(receiver_id, why, roster, offering)

    def _gather_applied(
        self, offer: Offer, roster: dict[str, Member], offering: Offering
    ) -> Steps[None]:
        applied: set[str] = set()
        alike = self._rollout.alike
        while missing := sorted(roster.keys() - applied):
            for receiver_id in missing:
                member = roster[receiver_id]
                place = keys.answer(offer.policy, "applied", receiver_id, member.incarnation)
                record = self.session.read(place, Applied)
                if record is not None and record.error is not None:
                    error = record.error.to_error(f"receiver {receiver_id!r} failed")
                    self._go_on_without(receiver_id, roster, offering, error)
                elif record is not None:
                    applied.add(receiver_id)
                    _compare_installed(offer.policy, receiver_id, record.fingerprint, alike)
                elif (declined := self._declined(offer, member)) is not None:
                    error = declined.to_error(f"receiver {receiver_id!r} declined")
                    self._go_on_without(receiver_id, roster, offering, error)
                elif why := self._why_lost(receiver_id, member):
                    self._lose(receiver_id, why, roster, offering)
            missing = sorted(roster.keys() - applied)
            if missing:
                yield self._waiting("receiver_applied", missing)

    def _waiting(self, sentinel: str, missing: Sequence[str]) -> Waiting:
        who = tuple(f"receiver {name!r}" for name in missing)
        return Waiting(sentinel, who, bell=self.session.bell("receivers"))

    def _declined(self, offer: Offer, member: Member) -> ErrorInfo | None:
        """Why a receiver of a stored version can't take it, or None."""
        receiver_id = member.record.member_id
        place = keys.answer(offer.policy, "ready", receiver_id, member.incarnation)
        ready = self.session.read(place, Ready)
        return ready.declined if ready is not None else None

    def answer_of(self, offer: Offer, receiver_id: str) -> Applied | None:
        """How the offer ended at a receiver, or None: once it has said so, it may leave."""
        answered = self.session.numbers(keys.version(offer.policy, "applied", receiver_id))
        if not answered:
            return None
        place = keys.answer(offer.policy, "applied", receiver_id, answered[-1])
        return self.session.read(place, Applied)

    def _why_lost(self, receiver_id: str, member: Member) -> str | None:
        return _why_lost(self.session, self.observer, receiver_id, member.incarnation)

    def _lose(
        self, receiver_id: str, why: str, roster: dict[str, Member], offering: Offering
    ) -> None:
        error = PeerLost(
            f"receiver {receiver_id!r} is gone ({why}): restart it, or open the sender with "
            "on_receiver_loss='continue'"
        )
        self._go_on_without(receiver_id, roster, offering, error)

    def _go_on_without(
        self,
        receiver_id: str,
        roster: dict[str, Member],
        offering: Offering,
        error: WeightWireError,
    ) -> None:
        """A roster member is gone or has failed: raise ``error``, or strike it off."""
        if offering.terms.on_receiver_loss == "fail" or self.capabilities.flow == "collective":
            raise error
        del roster[receiver_id]
        if not roster and self.capabilities.needs_live_receivers:
            raise error


def _backend(member: Member) -> str:
    return member.record.backend


def _compare_installed(
    policy: Policy,
    receiver_id: str,
    fingerprint: Fingerprint | None,
    alike: dict[str, tuple[str, str]],
) -> None:
    """Refuse a replica that made something else of the version than one laid out alike."""
    if fingerprint is None:
        return
    other, bits = alike.setdefault(fingerprint.layout, (receiver_id, fingerprint.bits))
    if bits != fingerprint.bits:
        raise VerificationError(
            f"receivers {other!r} and {receiver_id!r} are laid out alike and hold different bits "
            f"after {policy}: take both out of service, and compare each with a fresh engine"
        )


def lost_readers(session: Session, observer: LeaseObserver, policy: Policy) -> dict[str, str]:
    """Those for whom a started transfer waits and who are gone, and how that was noticed; for
    every trainer rank.

    One that restarted is gone too: its successor takes the next version.
    """
    started = session.read(keys.version(policy, "started"), Started)
    readers = {} if started is None else started.readers
    return {
        receiver_id: why
        for receiver_id, incarnation in readers.items()
        if (why := _why_lost(session, observer, receiver_id, incarnation))
    }


def _why_lost(
    session: Session, observer: LeaseObserver, receiver_id: str, incarnation: int
) -> str | None:
    """Who a lost receiver was, and how its loss was noticed; None while it is there."""
    current = newest(session, f"receivers/{receiver_id}")
    if current is None:
        return "its records were deleted"
    record = current.record
    who = f"process {record.pid} on {record.host}"
    if current.incarnation != incarnation:
        return f"{who} took its place"
    if observer.is_alive(current):
        return None
    return f"{who}: {observer.why_gone(current)}"
