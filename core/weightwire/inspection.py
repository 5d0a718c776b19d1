"""What a session holds, read by an outside observer: versions, sentinels, members, ages."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from weightwire.contract import Policy
from weightwire.errors import SessionError
from weightwire.lifecycle.history import offer_of, outcome_of, policies
from weightwire.report import PhaseName
from weightwire.session import keys
from weightwire.session.lease import LeaseObserver, Member
from weightwire.session.membership import newest
from weightwire.session.records import (
    Applied,
    ErrorInfo,
    MemberRecord,
    Ready,
    Retired,
    Started,
    Status,
)
from weightwire.session.session import Session
from weightwire.units import printable, rate

__all__ = ["AnswerView", "MemberView", "SessionView", "VersionView", "inspect_session"]

_LONGEST_AGE = 1e9

T = TypeVar("T")


@dataclass(frozen=True)
class MemberView:
    """A sender's or receiver's newest incarnation.

    Attributes:
        alive: judged by its lease so far; an observer needs a lease's length to be sure.
        state: of a receiver: ``serving``, ``installing``, ...; ``gone`` once it isn't alive.
        age_s: seconds since it joined, by this host's wall clock.
        serving: the version that it wholly holds, by its own word.
        behind: finished versions, among those shown, that are newer than what it serves.
        lag_s: seconds since the oldest of these was finished, by this host's wall clock.
    """

    member_id: str
    incarnation: int
    world_size: int
    backend: str
    host: str
    pid: int
    alive: bool
    age_s: float
    state: str = ""
    serving: int | None = None
    serving_incarnation: int | None = None
    error: str = ""
    behind: int = 0
    lag_s: float = 0.0


@dataclass(frozen=True)
class AnswerView:
    """One receiver and one attempt.

    Attributes:
        phase: where it is, by the one vocabulary, as far as sentinels tell: ``ready`` while
            it plans, ``wait`` until the transfer starts, ``fetch`` until it has applied it,
            ``commit`` until the sender concludes; empty when that is over.
        nbytes, seconds, gbps: of its rank 0, from the offer on; 0 until it has applied it.
        phases: seconds by phase of its rank 0.
        digest: of what arrived.
        layout, bits: its install fingerprint; equal layouts must have equal bits.
        mismatch: its bits aren't those of most receivers of its layout.
    """

    receiver_id: str
    phase: str = ""
    nbytes: int = 0
    seconds: float = 0.0
    gbps: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    digest: str = ""
    layout: str = ""
    bits: str = ""
    mismatch: bool = False
    error: str = ""


@dataclass(frozen=True)
class VersionView:
    """One attempt at one version, with its sentinels.

    Attributes:
        state: offered, started, finished or aborted; ``wave`` when it finished for its
            roster and goes on to others as the next attempt.
        ready, applied: by receiver: ``yes``, or why not.
        phases: seconds by phase of the sender's rank 0, once it is over.
        finished_s: seconds since its outcome, by this host's wall clock.
        answers: what is known of each receiver, by id.
    """

    incarnation: int
    version: int
    attempt: int
    state: str
    nbytes: int
    seconds: float | None
    age_s: float
    roster: tuple[str, ...]
    ready: dict[str, str] = field(default_factory=dict)
    applied: dict[str, str] = field(default_factory=dict)
    error: str = ""
    retired: bool = False
    phases: dict[str, float] = field(default_factory=dict)
    finished_s: float | None = None
    answers: tuple[AnswerView, ...] = ()


@dataclass(frozen=True)
class SessionView:
    url: str
    session_id: str
    sender: MemberView | None
    receivers: tuple[MemberView, ...]
    versions: tuple[VersionView, ...]
    unreadable: tuple[str, ...] = ()
    """Why members and versions are left out: their records can't be read."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def inspect_session(session: Session, observer: LeaseObserver, limit: int = 20) -> SessionView:
    """Read a session once; the newest ``limit`` attempts.

    Raises:
        SessionError: it doesn't answer.
    """
    now = time.time()
    reader = _Reader(session)

    def member(kind: str) -> MemberView | None:
        found = newest(session, kind)
        return None if found is None else _view_member(session, observer, found, now)

    sender = reader.read(partial(member, "senders"))
    receivers = [
        reader.read(partial(member, f"receivers/{receiver_id}"))
        for receiver_id in session.children("receivers")
    ]
    found: list[Policy] = []
    for incarnation in reversed(session.numbers("versions")):
        found.extend(policies(session, incarnation))
    views = [reader.read(partial(_view_version, session, policy, now)) for policy in found[:limit]]
    versions = tuple(view for view in views if view is not None)
    return SessionView(
        url=session.url,
        session_id=printable(session.id),
        sender=sender,
        receivers=tuple(_with_lag(view, versions) for view in receivers if view is not None),
        versions=versions,
        unreadable=tuple(reader.unreadable),
    )


class _Reader:
    """Reads what can be read: one bad record doesn't hide the others."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.unreadable: list[str] = []

    def read(self, look: Callable[[], T]) -> T | None:
        try:
            return look()
        except SessionError as error:
            self._session.is_replaced()  # raises where it is the session that doesn't answer
            self.unreadable.append(printable(str(error)))
            return None


def _with_lag(member: MemberView, versions: tuple[VersionView, ...]) -> MemberView:
    """How far a live receiver is behind what is finished."""
    if not member.alive:
        return member
    serves = (member.serving_incarnation or 0, -1 if member.serving is None else member.serving)
    newer = [
        version
        for version in versions
        if version.state == "finished" and (version.incarnation, version.version) > serves
    ]
    lag = max((version.finished_s or 0.0 for version in newer), default=0.0)
    return replace(member, behind=len(newer), lag_s=lag)


def _view_member(
    session: Session, observer: LeaseObserver, member: Member, now: float
) -> MemberView:
    record: MemberRecord = member.record
    status = session.read(member.key("status"), Status)
    alive = observer.is_alive(member)
    serving = status.serving if status is not None and alive else None
    return MemberView(
        member_id=printable(record.member_id),
        incarnation=record.incarnation,
        world_size=record.world_size,
        backend=printable(record.backend),
        host=printable(record.host),
        pid=record.pid,
        alive=alive,
        age_s=_age(record.created, now),
        state=(status.state if status is not None else "") if alive else "gone",
        serving=serving.version if serving is not None else None,
        serving_incarnation=serving.incarnation if serving is not None else None,
        error=_message(status.error if status is not None else None),
    )


def _age(created: float, now: float) -> float:
    return min(_LONGEST_AGE, max(0.0, now - created))


def _seconds(phases: Mapping[PhaseName, float]) -> dict[str, float]:
    return {str(name): seconds for name, seconds in phases.items()}


def _verdict(error: ErrorInfo | None) -> str:
    return "yes" if error is None else _message(error) or printable(error.type) or "failed"


def _message(error: ErrorInfo | None) -> str:
    return "" if error is None else printable(error.message)


def _view_version(session: Session, policy: Policy, now: float) -> VersionView | None:
    record = offer_of(session, policy)
    if record is None:
        return None
    outcome = outcome_of(session, policy)
    if outcome is not None:
        done = "wave" if outcome.more else "finished"
        state = done if outcome.error is None else "aborted"
    elif session.read(keys.version(policy, "started"), Started) is not None:
        state = "started"
    else:
        state = "offered"
    ready: dict[str, Ready] = {}
    applied: dict[str, Applied] = {}
    for name, incarnation in _answers(session, policy, "ready"):
        answer = session.read(keys.answer(policy, "ready", name, incarnation), Ready)
        if answer is not None:
            ready[name] = answer
    for name, incarnation in _answers(session, policy, "applied"):
        result = session.read(keys.answer(policy, "applied", name, incarnation), Applied)
        if result is not None:
            applied[name] = result
    roster = tuple(printable(name) for name in record.offer.roster)
    names = sorted({*roster, *ready, *applied})
    return VersionView(
        incarnation=policy.incarnation,
        version=policy.version,
        attempt=policy.attempt,
        state=state,
        nbytes=record.nbytes,
        seconds=None if outcome is None else outcome.seconds,
        age_s=_age(record.created, now),
        roster=roster,
        ready={name: _verdict(found.declined) for name, found in ready.items()},
        applied={name: _verdict(found.error) for name, found in applied.items()},
        error=_message(None if outcome is None else outcome.error),
        retired=session.read(keys.retired(policy), Retired) is not None,
        phases={} if outcome is None else _seconds(outcome.phases),
        finished_s=None if outcome is None else _age(outcome.created, now),
        answers=_compared(
            _view_answer(name, state, ready.get(name), applied.get(name)) for name in names
        ),
    )


def _view_answer(name: str, state: str, ready: Ready | None, applied: Applied | None) -> AnswerView:
    if applied is None:
        refused = ready is not None and ready.declined is not None
        over = refused or state in ("finished", "aborted", "wave")
        phase = "" if over else "ready" if ready is None else "wait"
        if state == "started" and not over:
            phase = "fetch"
        return AnswerView(name, phase, error=_message(ready.declined if ready else None))
    installed = applied.fingerprint
    return AnswerView(
        receiver_id=name,
        phase="commit" if state in ("offered", "started") and applied.error is None else "",
        nbytes=applied.nbytes,
        seconds=applied.seconds,
        gbps=rate(applied.nbytes, applied.seconds),
        phases=_seconds(applied.phases),
        digest=printable(applied.digest),
        layout=printable(installed.layout) if installed is not None else "",
        bits=printable(installed.bits) if installed is not None else "",
        error=_message(applied.error),
    )


def _compared(answers: Iterable[AnswerView]) -> tuple[AnswerView, ...]:
    """The same, with those marked that hold other bits than most of their layout."""
    found = tuple(answers)
    bits: dict[str, Counter[str]] = {}
    for answer in found:
        if answer.bits:
            bits.setdefault(answer.layout, Counter())[answer.bits] += 1
    return tuple(
        replace(answer, mismatch=True)
        if answer.bits and answer.bits != bits[answer.layout].most_common(1)[0][0]
        else answer
        for answer in found
    )


def _answers(session: Session, policy: Policy, sentinel: str) -> Iterator[tuple[str, int]]:
    """Who answered, with its incarnations rising."""
    prefix = keys.version(policy, sentinel)
    for receiver_id in session.children(prefix):
        for incarnation in session.numbers(f"{prefix}/{receiver_id}"):
            yield receiver_id, incarnation
