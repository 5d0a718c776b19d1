"""What a session says of a pool's replicas: what they serve, and what is there for them."""

from __future__ import annotations

import asyncio
import contextlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weightwire.deadline import Deadline
from weightwire.errors import SessionError
from weightwire.lifecycle.history import (
    newest_published,
    offer_of,
    outcome_of,
    policies,
    readable_policies,
)
from weightwire.plugins import registry
from weightwire.session import keys
from weightwire.session.lease import LeaseObserver, Member
from weightwire.session.membership import newest
from weightwire.session.records import OfferRecord, Ready, Status
from weightwire.session.session import Session

if TYPE_CHECKING:
    from collections.abc import Iterator

    from weightwire.contract import Policy

__all__ = ["ReplicaSight", "Sight"]

_OPEN_SECONDS = 5.0


@dataclass(frozen=True)
class ReplicaSight:
    """One engine's receivers (one, or one for each data-parallel rank), together.

    Attributes:
        joined: whether live receivers of it are in the session.
        holding: the policy that all of them wholly hold, or None.
        tainted: why one of them holds a mixture; empty if none does.
        wanted: the version that is there for one of them to take, or None.
        attempt: identity of what is wanted, for those that count tries.
        stored: whether what is wanted is stored, and waits for nobody.
        most_out: how many replicas may be out of service for it, or None.
        behind: whether there is a finished version that counts, and it serves an older one.
    """

    joined: bool
    holding: Policy | None
    tainted: str
    wanted: int | None
    attempt: Policy | None
    stored: bool
    most_out: int | None
    behind: bool

    @property
    def serving(self) -> int | None:
        """The version of ``holding``."""
        return None if self.holding is None else self.holding.version


class Sight:
    """Reads one session; opens it again when it was made anew.

    Args:
        url: of the session.
        token: by default the environment's ``WEIGHTWIRE_TOKEN``.
        catch_up: whether replicas that serve nothing may take stored versions.
    """

    def __init__(self, url: str, token: str | None = None, *, catch_up: bool = False) -> None:
        self._url = url
        self._token = token
        self._catch_up = catch_up
        self._session: Session | None = None
        self._observer: LeaseObserver | None = None
        self._turn = asyncio.Lock()

    async def look(self, receiver_id: str) -> ReplicaSight:
        """Read what concerns one engine, on another thread.

        Raises:
            SessionError: the session can't be reached, or doesn't exist yet.
        """
        async with self._turn:
            return await asyncio.to_thread(self._look, receiver_id)

    def close(self) -> None:
        """Idempotent."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _look(self, receiver_id: str) -> ReplicaSight:
        try:
            session, observer = self._opened()
            return _Looked(session, observer, self._catch_up).at(receiver_id)
        except SessionError:
            with contextlib.suppress(Exception):
                self.close()  # opened anew at the next look
            raise

    def _opened(self) -> tuple[Session, LeaseObserver]:
        if self._session is not None and self._session.is_replaced():
            self.close()
        if self._session is None or self._observer is None:
            self._session = Session.open(
                self._url, deadline=Deadline(_OPEN_SECONDS), token=self._token, read_only=True
            )
            self._observer = LeaseObserver(self._session)
        return self._session, self._observer


class _Looked:
    def __init__(self, session: Session, observer: LeaseObserver, catch_up: bool) -> None:
        self._session = session
        self._observer = observer
        self._catch_up = catch_up
        self._sender = newest(session, "senders")

    def at(self, receiver_id: str) -> ReplicaSight:
        members = list(self._members(receiver_id))
        states = [self._session.read(m.key("status"), Status) or Status("idle") for m in members]
        served = {state.serving for state in states}
        serving = served.pop() if len(served) == 1 else None
        tainted = [state.error.message for state in states if state.error is not None]
        found: Any = None
        for member, state in zip(members, states, strict=True):
            found = found or self._wanted(member, state.serving)
        finished = next(self._finished(), None)
        return ReplicaSight(
            joined=bool(members),
            holding=serving,
            tainted=tainted[0] if tainted else "",
            wanted=found[0].offer.policy.version if found else None,
            attempt=found[0].offer.policy if found else None,
            stored=bool(found) and found[1],
            most_out=found[0].max_unavailable if found else None,
            behind=finished is not None and finished != serving,
        )

    def _members(self, receiver_id: str) -> Iterator[Member]:
        """Live receivers of one engine."""
        mine = re.compile(re.escape(receiver_id) + r"(-dp\d+)?\Z")
        for name in self._session.children("receivers"):
            member = newest(self._session, f"receivers/{name}") if mine.match(name) else None
            if member is not None and self._observer.is_alive(member):
                yield member

    def _flow(self) -> str:
        assert self._sender is not None  # noqa: S101 - asked of offers
        return registry().backend(self._sender.record.backend).capabilities.flow

    def _finished(self) -> Iterator[Policy]:
        if self._sender is not None:
            yield from readable_policies(self._session, self._sender)

    def _wanted(self, member: Member, serving: Policy | None) -> tuple[OfferRecord, bool] | None:
        """What its receiver would take now, and whether that is stored.

        The same choice as ``ReceiverMachine.newest_offer``, seen from outside.
        """
        if self._sender is None:
            return None
        if self._flow() == "store":
            policy = newest_published(self._session, self._sender)
            if policy is None or policy == serving:
                return None
            record = offer_of(self._session, policy)
            return None if record is None else (record, True)
        record = self._offered(member, serving)
        if record is not None:
            return record, False
        if self._catch_up and serving is None:
            policy = next(self._finished(), None)
            record = offer_of(self._session, policy) if policy is not None else None
            return None if record is None else (record, True)
        return None

    def _offered(self, member: Member, serving: Policy | None) -> OfferRecord | None:
        assert self._sender is not None  # noqa: S101 - asked of offers
        receiver_id = member.record.member_id
        for policy in policies(self._session, self._sender.incarnation):
            record = offer_of(self._session, policy)
            if record is None:
                continue
            place = keys.answer(policy, "ready", receiver_id, member.incarnation)
            answered = self._session.read(place, Ready)
            declined = answered is not None and answered.declined is not None
            over = outcome_of(self._session, policy) is not None
            is_ours = receiver_id in record.offer.roster and policy != serving
            alive = self._observer.is_alive(self._sender)
            return record if is_ours and not declined and not over and alive else None
        return None
