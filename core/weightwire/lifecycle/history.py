"""What a session's records say about versions: offered, finished, readable."""

from __future__ import annotations

from collections.abc import Iterator

from weightwire.contract import Policy
from weightwire.errors import SessionError
from weightwire.session import keys
from weightwire.session.lease import Member
from weightwire.session.records import MemberRecord, OfferRecord, Outcome, Retired, Started
from weightwire.session.session import Session

__all__ = [
    "finished_policies",
    "newest_published",
    "offer_of",
    "outcome_of",
    "policies",
    "readable_policies",
]


def policies(session: Session, incarnation: int) -> list[Policy]:
    """Every attempt of an incarnation, newest first."""
    found = [
        policy
        for name in session.children(keys.versions(incarnation))
        if (policy := keys.parse_policy(incarnation, name)) is not None
    ]
    return sorted(found, reverse=True)


def outcome_of(session: Session, policy: Policy) -> Outcome | None:
    return session.read(keys.version(policy, "outcome"), Outcome)


def offer_of(session: Session, policy: Policy) -> OfferRecord | None:
    record = session.read(keys.version(policy, "offer"), OfferRecord)
    if record is not None and record.offer.policy != policy:
        raise SessionError(
            f"the offer at {policy} is of {record.offer.policy}: is something else writing to "
            f"session {session.url}?"
        )
    return record


def finished_policies(session: Session, incarnation: int) -> Iterator[Policy]:
    """Finished versions of one incarnation, newest first."""
    for policy in policies(session, incarnation):
        outcome = outcome_of(session, policy)
        if outcome is not None and outcome.error is None and not outcome.more:
            yield policy


def readable_policies(session: Session, sender: Member) -> Iterator[Policy]:
    """Finished versions that may be read under this incarnation, newest first.

    Its own; and, where it declared ``resume_from=v``, those that its
    predecessor could read up to ``v``.
    """
    yield from finished_policies(session, sender.incarnation)
    limit = sender.record.resume_from
    incarnation = sender.incarnation - 1
    while limit is not None and incarnation > 0:
        for policy in finished_policies(session, incarnation):
            if policy.version <= limit:
                yield policy
        record = session.read(keys.member("senders", incarnation, "record"), MemberRecord)
        if record is None or record.resume_from is None:
            return
        limit = min(limit, record.resume_from)
        incarnation -= 1


def newest_published(session: Session, sender: Member) -> Policy | None:
    """The newest stored version that may be read: one that has started, or is finished."""
    for policy in policies(session, sender.incarnation):
        outcome = outcome_of(session, policy)
        if outcome is not None and outcome.error is not None:
            continue
        if session.read(keys.version(policy, "started"), Started) is not None:
            return policy
    for policy in readable_policies(session, sender):
        # What was dropped before its late outcome was seen isn't readable.
        if session.read(keys.retired(policy), Retired) is None:
            return policy
    return None
