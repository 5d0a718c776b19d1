"""What a session holds, read by an outside observer: versions, sentinels, members, ages."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from weightwire.contract import Policy
from weightwire.lifecycle.history import offer_of, outcome_of, policies
from weightwire.session import keys
from weightwire.session.lease import LeaseObserver, Member
from weightwire.session.membership import newest
from weightwire.session.records import Applied, MemberRecord, Ready, Retired, Started, Status
from weightwire.session.session import Session

__all__ = ["MemberView", "SessionView", "VersionView", "inspect_session"]


@dataclass(frozen=True)
class MemberView:
    """A sender's or receiver's newest incarnation.

    Attributes:
        alive: judged by its lease so far; an observer needs a lease's length to be sure.
        age_s: seconds since it joined, by this host's wall clock.
        serving: the version that it wholly holds, by its own word.
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


@dataclass(frozen=True)
class VersionView:
    """One attempt at one version, with its sentinels.

    Attributes:
        state: offered, started, finished or aborted; ``wave`` when it finished for its
            roster and goes on to others as the next attempt.
        ready, applied: by receiver: ``yes``, or why not.
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


@dataclass(frozen=True)
class SessionView:
    url: str
    session_id: str
    sender: MemberView | None
    receivers: tuple[MemberView, ...]
    versions: tuple[VersionView, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def inspect_session(session: Session, observer: LeaseObserver, limit: int = 20) -> SessionView:
    """Read a session once; the newest ``limit`` attempts."""
    now = time.time()
    sender = newest(session, "senders")
    receivers = [
        member
        for receiver_id in session.children("receivers")
        if (member := newest(session, f"receivers/{receiver_id}")) is not None
    ]
    found: list[Policy] = []
    for incarnation in reversed(session.numbers("versions")):
        found.extend(policies(session, incarnation))
    return SessionView(
        url=session.url,
        session_id=session.id,
        sender=None if sender is None else _view_member(session, observer, sender, now),
        receivers=tuple(_view_member(session, observer, member, now) for member in receivers),
        versions=tuple(
            view for p in found[:limit] if (view := _view_version(session, p, now)) is not None
        ),
    )


def _view_member(
    session: Session, observer: LeaseObserver, member: Member, now: float
) -> MemberView:
    record: MemberRecord = member.record
    status = session.read(member.key("status"), Status)
    alive = observer.is_alive(member)
    serving = status.serving if status is not None and alive else None
    return MemberView(
        member_id=record.member_id,
        incarnation=record.incarnation,
        world_size=record.world_size,
        backend=record.backend,
        host=record.host,
        pid=record.pid,
        alive=alive,
        age_s=max(0.0, now - record.created),
        state=status.state if status is not None else "",
        serving=serving.version if serving is not None else None,
        serving_incarnation=serving.incarnation if serving is not None else None,
        error=status.error.message if status is not None and status.error is not None else "",
    )


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
    ready, applied = {}, {}
    for name, incarnation in _answers(session, policy, "ready"):
        answer = session.read(keys.answer(policy, "ready", name, incarnation), Ready)
        if answer is not None:
            ready[name] = "yes" if answer.declined is None else answer.declined.message
    for name, incarnation in _answers(session, policy, "applied"):
        result = session.read(keys.answer(policy, "applied", name, incarnation), Applied)
        if result is not None:
            applied[name] = "yes" if result.error is None else result.error.message
    return VersionView(
        incarnation=policy.incarnation,
        version=policy.version,
        attempt=policy.attempt,
        state=state,
        nbytes=record.nbytes,
        seconds=None if outcome is None else outcome.seconds,
        age_s=max(0.0, now - record.created),
        roster=record.offer.roster,
        ready=ready,
        applied=applied,
        error="" if outcome is None or outcome.error is None else outcome.error.message,
        retired=session.read(keys.retired(policy), Retired) is not None,
    )


def _answers(session: Session, policy: Policy, sentinel: str) -> Iterator[tuple[str, int]]:
    """Who answered, with its incarnations rising."""
    prefix = keys.version(policy, sentinel)
    for receiver_id in session.children(prefix):
        for incarnation in session.numbers(f"{prefix}/{receiver_id}"):
            yield receiver_id, incarnation
