"""Rank 0 of a receiver: one version from the newest offer to ``receiver_applied``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from weightwire.contract import Capabilities, Offer, Policy
from weightwire.errors import (
    Cancelled,
    ConfigError,
    PeerLost,
    SessionError,
    TableMismatch,
    TransferError,
    WeightWireError,
)
from weightwire.lifecycle.acts import Commit, Fetch, Install, Prepare, Rollback
from weightwire.lifecycle.history import (
    newest_published,
    offer_of,
    outcome_of,
    policies,
    readable_policies,
)
from weightwire.lifecycle.states import (
    RECEIVER_TRANSITIONS,
    ReceiverState,
)
from weightwire.lifecycle.turns import Turns
from weightwire.session import keys
from weightwire.session.lease import LeaseObserver, Member
from weightwire.session.membership import newest
from weightwire.session.records import (
    Applied,
    ErrorInfo,
    OfferRecord,
    Reading,
    Ready,
    Retired,
    Started,
    Status,
)
from weightwire.session.session import Session
from weightwire.waiting import Steps, Waiting

__all__ = ["ReceiverMachine"]

_MOST_REASON = 300
"""Characters of another process's reason within a message of this one."""


class ReceiverMachine:
    """Rank 0 of a receiver.

    Attributes:
        serving: the policy that the target wholly holds, or None.
        tainted: what left the target mixed, until a full sync succeeds.
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
        self.state = ReceiverState.IDLE
        self.serving: Policy | None = None
        self.tainted: ErrorInfo | None = None
        self._tried: Policy | None = None
        self._turns = Turns(session, member, observer)

    @property
    def receiver_id(self) -> str:
        return self.member.record.member_id

    @property
    def _reading(self) -> str:
        return keys.reading(self.receiver_id, self.member.incarnation)

    def _answer(self, policy: Policy, sentinel: str) -> str:
        return keys.answer(policy, sentinel, self.receiver_id, self.member.incarnation)

    def _reply(self, policy: Policy, sentinel: str, record: Ready | Applied) -> None:
        """Write this replica's answer; the sender that waits for it looks sooner."""
        self.session.ring("receivers")
        self.session.write(self._answer(policy, sentinel), record)

    def _enter(self, state: ReceiverState) -> None:
        if state not in RECEIVER_TRANSITIONS[self.state]:
            raise AssertionError(f"receiver can't go from {self.state} to {state}")
        self.state = state

    def holds(self, version: int) -> bool:
        """Whether the target holds this version or a later one that still counts.

        A version of an earlier incarnation counts only where the running sender
        took it up; one that is offered again is not held until it is applied again.
        """
        serving = self.serving
        if serving is None or serving.version < version:
            return False
        sender = newest(self.session, "senders")
        if sender is None:
            return True
        resumed = sender.record.resume_from
        is_void = serving.incarnation != sender.incarnation and (
            resumed is None or serving.version > resumed
        )
        return not is_void and self.newest_offer() is None

    def newest_offer(self) -> OfferRecord | None:
        """The offer that ``receive`` would take now, or None.

        Raises:
            SessionError: another process has taken this receiver's id.
            ConfigError: the sender uses another backend.
        """
        self._refuse_if_superseded()
        sender = newest(self.session, "senders")
        if sender is None:
            return None
        theirs = sender.record.backend
        if theirs != self.member.record.backend and self.observer.is_alive(sender):
            # Before an offer: it may wait for us to make one.
            self._refuse_other_backend(theirs, "the sender was opened with")
        if self.capabilities.flow == "store":
            return self._newest_published(sender)
        for policy in policies(self.session, sender.incarnation):
            record = offer_of(self.session, policy)
            if record is None:
                continue  # its writer crashed, or is about to write
            if policy in (self._tried, self.serving):
                return None
            self._refuse_other_offer(record)
            open_to_us = self.receiver_id in record.offer.roster
            return record if open_to_us and outcome_of(self.session, policy) is None else None
        return None

    def _refuse_if_superseded(self) -> None:
        current = newest(self.session, self.member.kind)
        if current is not None and current.incarnation != self.member.incarnation:
            raise SessionError(
                f"receiver {self.receiver_id!r} was taken over by process {current.record.pid} on "
                f"{current.record.host}: close this receiver"
            )

    def _newest_published(self, sender: Member) -> OfferRecord | None:
        policy = newest_published(self.session, sender)
        if policy is None or policy == self.serving:
            return None
        record = offer_of(self.session, policy)
        if record is not None:
            self._refuse_other_offer(record)
        return record

    def _refuse_other_offer(self, record: OfferRecord) -> None:
        version = record.offer.policy.version
        self._refuse_other_backend(record.backend, f"the sender offers version {version} over")

    def _refuse_other_backend(self, theirs: str, says: str) -> None:
        ours = self.member.record.backend
        if theirs != ours:
            raise ConfigError(
                f"{says} {theirs!r}, this receiver was opened with {ours!r}: "
                "open both with one backend"
            )

    def receive(self, minimum: int = 0, only: int | None = None) -> Steps[Policy]:
        """One version, from the newest offer to its ``receiver_applied``.

        Args:
            minimum: offers of lower versions are left alone.
            only: the version that is on offer now; no other is taken, nor waited for.

        Raises:
            PeerLost: ``only`` isn't on offer any more.

        Yields ``Prepare``, ``Install``, ``Fetch`` and ``Commit`` in this order;
        after ``Prepare`` it may begin again with a newer offer.
        """
        while True:
            record = yield from self._await_offer(minimum, only)
            offer = record.offer
            self._enter(ReceiverState.PREPARING)
            try:
                yield from self._prepare(offer)
                go = yield from self._await_start(offer)
                if go and self.capabilities.flow == "store":
                    go = yield from self._await_turn(record)
            except GeneratorExit:
                raise
            except BaseException as error:
                self._withdraw(offer.policy, error)
                self._settle()
                raise
            if go:
                break
            self._settle()
        return (yield from self._install(offer))

    def _await_offer(self, minimum: int, only: int | None) -> Steps[OfferRecord]:
        while True:
            record = self.newest_offer()
            if only is not None and (record is None or record.offer.policy.version != only):
                raise PeerLost("the sender gave up what it had on offer: receive again")
            if record is not None and record.offer.policy.version >= minimum:
                return record
            if record is not None and self.capabilities.flow != "store":
                self._decline_low(record.offer.policy, minimum)
            yield self._waiting("offer", self._who_offers())

    def await_offer_or_stored(
        self, minimum: int, stored: Callable[[], int | None]
    ) -> Steps[Policy | None]:
        """What to take: None for the offer that is there, or a finished version that is stored.

        A replica that serves a version waits for offers only.

        Args:
            stored: the newest version that was stored for late receivers, or None.
        """
        while True:
            record = self.newest_offer()
            if self.serving is not None:
                return None
            if record is not None and record.offer.policy.version >= minimum:
                return None
            finished = next(self._finished(), None)
            # A newer one may be on its way there: an older one isn't current.
            if finished is not None and minimum <= finished.version == stored():
                return finished
            yield self._waiting("offer", self._who_offers())

    def detour_begins(self) -> None:
        """The target is about to be written to on another way: it serves nothing."""
        self.serving = None
        self._write_status(Status("installing"))

    def detour_ends(self, policy: Policy, digest: str) -> None:
        """The target holds ``policy`` on every rank."""
        self.serving, self.tainted = policy, None
        self.state = ReceiverState.APPLIED
        self._write_status(Status("serving", policy, digest=digest))

    def detour_failed(self, tainted: ErrorInfo | None) -> None:
        """The target holds no version; ``tainted`` unless it is as it was."""
        if tainted is not None:
            self.tainted = tainted
        self._settle()
        with contextlib.suppress(SessionError):
            self._write_current_status()

    def lose(self, why: WeightWireError) -> None:
        """The target's memory was taken from it: it holds nothing until a full sync."""
        self.serving, self.tainted = None, ErrorInfo.of(why)
        self._settle()
        self._write_current_status()

    def _waiting(self, record: str, whom: str) -> Waiting:
        return Waiting(record, (whom,), bell=self.session.bell("senders"))

    def policy_of(self, version: int) -> Policy | None:
        """The finished policy with this version number, or None if none counts."""
        return next((policy for policy in self._finished() if policy.version == version), None)

    def _finished(self) -> Iterator[Policy]:
        """Finished policies that count, newest first."""
        sender = newest(self.session, "senders")
        if sender is not None:
            yield from readable_policies(self.session, sender)

    def _who_offers(self) -> str:
        sender = newest(self.session, "senders")
        if sender is None:
            return "a sender to join"
        for policy in policies(self.session, sender.incarnation)[:1]:
            record = offer_of(self.session, policy)
            most = record.max_receivers if record is not None else None
            if record is not None and most is not None:
                roster = record.offer.roster
                if self.receiver_id not in roster and len(roster) >= most:
                    return f"the sender, whose max_receivers={most} are {', '.join(roster)}"
            outcome = outcome_of(self.session, policy)
            if outcome is not None and outcome.error is not None:
                why = outcome.error.message.partition("\n")[0][:_MOST_REASON]
                return f"the sender, which aborted version {policy.version} ({why}),"
        return "the sender"

    def decline(self, policy: Policy) -> None:
        """Tell a sender that this replica takes another way."""
        reason = ConfigError("it takes another offer")
        self._reply(policy, "ready", Ready(declined=ErrorInfo.of(reason)))

    def _decline_low(self, policy: Policy, minimum: int) -> None:
        """Tell a sender that waits for us that we wait for a later version."""
        self._tried = policy
        reason = ConfigError(f"it waits for version {minimum} or later: send that")
        self._reply(policy, "ready", Ready(declined=ErrorInfo.of(reason)))

    def _prepare(self, offer: Offer) -> Steps[None]:
        try:
            transports: tuple[bytes, ...] = yield Prepare(offer)
        except GeneratorExit:
            raise
        except BaseException as error:
            self._tried = offer.policy
            self._reply(offer.policy, "ready", Ready(declined=ErrorInfo.of(error)))
            raise
        if self.capabilities.flow != "store":
            self._reply(offer.policy, "ready", Ready(transports))
        self._enter(ReceiverState.READY)

    def _await_start(self, offer: Offer) -> Steps[bool]:
        """True when the transfer runs; False when another offer should be looked for."""
        policy = offer.policy
        if self.capabilities.flow == "store":
            # The lease comes before the look at the mark: see Retention.retire.
            self.session.write(self._reading, Reading(policy))
            if self.session.read(keys.retired(policy), Retired) is None:
                return offer_of(self.session, policy) is not None
            return False
        while True:
            outcome = outcome_of(self.session, policy)
            started = self.session.read(keys.version(policy, "started"), Started)
            ours = started is not None and (
                started.readers.get(self.receiver_id) == self.member.incarnation
            )
            if outcome is not None and ours and (failure := self.sender_failure(offer)):
                raise failure  # it was aborted before we looked: we hear why all the same
            if outcome is not None:
                return False
            if started is not None:
                if ours:
                    return True
                self._tried = policy  # it goes on without us
                return False
            sender = newest(self.session, "senders")
            if sender is None or sender.incarnation != policy.incarnation:
                return False
            if not self.observer.is_alive(sender):
                raise PeerLost(
                    f"the sender (process {sender.record.pid} on {sender.record.host}) is gone "
                    f"({self.observer.why_gone(sender)}) before it started {policy}: restart it"
                )
            yield self._waiting("started", "the sender")

    def _await_turn(self, record: OfferRecord) -> Steps[bool]:
        """True once this replica may stop serving; False when there is a newer version."""
        most = record.max_unavailable
        if most is None or self.serving is None:
            return True  # one that serves nothing isn't taken out of service
        while holders := self._turns.take(most):
            latest = self.newest_offer()
            if latest is None or latest.offer.policy != record.offer.policy:
                return False
            who = tuple(f"receiver {name!r}, whose turn it is" for name in holders)
            yield Waiting(f"a turn to be out of service (max_unavailable={most})", who)
        return True

    def _withdraw(self, policy: Policy, error: BaseException) -> None:
        """Take ``receiver_ready`` back, and answer a sender that has started on it.

        It is taken back before the look at ``started``, and the sender looks at it once
        more after it has written that: one of the two sees the other.
        """
        if self.state is not ReceiverState.READY or self.capabilities.flow == "store":
            return
        info = ErrorInfo.of(error)
        # The error that is being raised matters more than a session that is gone.
        with contextlib.suppress(SessionError):
            if isinstance(error, TransferError) and not isinstance(error, Cancelled):
                # Out of time, or it took the sender for dead: it may call again for this offer.
                self.session.delete(self._answer(policy, "ready"))
            else:
                self._tried = policy
                self._reply(policy, "ready", Ready(declined=info))
            if self.session.read(keys.version(policy, "started"), Started) is not None:
                self._tried = policy
                tainted = self.tainted is not None
                self._reply(policy, "applied", Applied(error=info, tainted=tainted))

    def _install(self, offer: Offer) -> Steps[Policy]:
        policy = offer.policy
        before = self.serving
        self._enter(ReceiverState.INSTALLING)
        self.serving = None
        try:
            # Before the first byte changes, nobody may think that the old version is served.
            self._write_status(Status("installing"))
            yield Install(offer)
            yield Fetch(offer)
            applied: Applied = yield Commit(offer)
        except GeneratorExit:
            raise
        except BaseException as error:
            try:
                restored = bool((yield Rollback(error)))
            except GeneratorExit:
                raise
            except BaseException:
                self._fail(policy, error, None, restored=False)
                raise
            self._fail(policy, error, before if restored else None, restored)
            raise
        # In place on every rank, whether the session can still be told or not.
        self.serving, self.tainted = policy, None
        self._enter(ReceiverState.APPLIED)
        self._write_status(Status("serving", policy, digest=applied.digest))
        self._release()
        # The last write: once the sender has read it, it may take the session away.
        self._reply(policy, "applied", applied)
        return policy

    def _fail(
        self, policy: Policy, error: BaseException, serving: Policy | None, restored: bool
    ) -> None:
        self._tried = policy if self.capabilities.flow != "store" else None
        info = ErrorInfo.of(error)
        self.serving = serving
        if not restored:
            self.tainted = info
        self._enter(ReceiverState.TAINTED if self.tainted is not None else ReceiverState.IDLE)
        # The error that is being raised matters more than a session that is gone.
        with contextlib.suppress(SessionError):
            self._write_current_status()
            self._release()
            tainted = self.tainted is not None
            self._reply(policy, "applied", Applied(error=info, tainted=tainted))

    def _settle(self) -> None:
        self.state = ReceiverState.TAINTED if self.tainted is not None else ReceiverState.IDLE
        self._release()

    def _release(self) -> None:
        """Give back what this receiver holds in the session; else it ends with its lease."""
        if self.capabilities.flow == "store":
            with contextlib.suppress(SessionError):
                self.session.delete(self._reading)
                if self.serving is not None:  # else it is still out of service
                    self._turns.give_back()

    def _write_current_status(self) -> None:
        if self.tainted is not None:
            self._write_status(Status("tainted", None, self.tainted))
        elif self.serving is not None:
            self._write_status(Status("serving", self.serving))
        else:
            self._write_status(Status("idle"))

    def _write_status(self, status: Status) -> None:
        self.session.write(self.member.key("status"), status)

    def sender_failure(self, offer: Offer) -> WeightWireError | None:
        """Why the sender won't complete a started offer, or None."""
        outcome = outcome_of(self.session, offer.policy)
        if outcome is not None and outcome.error is None:
            return None  # its bytes are all credited: the sender isn't needed any more
        if outcome is not None and outcome.error is not None:
            who = f"the sender aborted {offer.policy}"
            error = outcome.error.to_error(who)
            if isinstance(error, TableMismatch):
                return error  # each side of a disagreement gets the same
            return PeerLost(f"{who}: {outcome.error.message}; wait for its next version")
        sender = newest(self.session, "senders")
        if sender is None or sender.incarnation != offer.policy.incarnation:
            return PeerLost(
                f"the sender of {offer.policy} was replaced: receive the new one's version"
            )
        if not self.observer.is_alive(sender):
            return PeerLost(
                f"the sender (process {sender.record.pid} on {sender.record.host}) of "
                f"{offer.policy} is gone ({self.observer.why_gone(sender)}): restart it"
            )
        return None
