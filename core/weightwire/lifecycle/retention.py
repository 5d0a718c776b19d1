"""Which finished versions stay, and how one is dropped under nobody's feet."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Set

from weightwire.contract import Policy
from weightwire.lifecycle.history import offer_of, policies, readable_policies
from weightwire.session import keys
from weightwire.session.lease import LeaseObserver, Member
from weightwire.session.membership import newest
from weightwire.session.records import Closed, Reading, Retired
from weightwire.session.session import Session

__all__ = ["Retention"]

_RECORDS_KEPT = 32
"""Versions of the running incarnation whose records stay for ``inspect``."""

_DEPARTED_KEPT = 16
"""Receivers that left whose records stay for ``inspect``."""


class Retention:
    """Drops versions on behalf of one sender incarnation.

    Args:
        keep: how many finished versions stay readable, or None for all.
        stores: whether finished versions hold bytes that must be dropped.
    """

    def __init__(
        self,
        session: Session,
        member: Member,
        observer: LeaseObserver,
        *,
        keep: int | None,
        stores: bool,
    ) -> None:
        self.session = session
        self.member = member
        self.observer = observer
        self.keep = keep
        self.stores = stores
        self._dropped: set[Policy] = set()
        self._tables_in_use: Set[str] = frozenset()

    def retire(self, drop: Callable[[Policy], None], tables: Set[str] = frozenset()) -> None:
        """Drop what nobody may read any more, and forget old records.

        A version is first marked, then its readers are looked for: a reader
        writes its lease and then looks for the mark, so that one of the two sees
        the other.  Records stay a while longer than bytes, for ``inspect``.

        Args:
            drop: deletes a version's bytes.
            tables: digests of tables and specs that are still in use.
        """
        self._tables_in_use = tables
        if self.stores:
            readable = readable_policies(self.session, self.member)
            self._drop_all_but(set(itertools.islice(readable, self.keep)), drop)
        self._forget_records()
        self._forget_departed()
        self._forget_tables()

    def _drop_all_but(self, kept: set[Policy], drop: Callable[[Policy], None]) -> None:
        for incarnation in self.session.numbers("versions"):
            if incarnation > self.member.incarnation:
                continue
            for policy in policies(self.session, incarnation):
                if policy in kept or policy in self._dropped:
                    continue
                self.session.write(keys.retired(policy), Retired())
                if policy not in self._being_read():
                    drop(policy)
                    self._dropped.add(policy)

    def _being_read(self) -> set[Policy]:
        held = set()
        for receiver_id in self.session.children("reading"):
            member = newest(self.session, f"receivers/{receiver_id}")
            for incarnation in self.session.numbers(f"reading/{receiver_id}"):
                key = keys.reading(receiver_id, incarnation)
                reading = self.session.read(key, Reading)
                if reading is None:
                    continue
                if member is not None and incarnation == member.incarnation:
                    if self.observer.is_alive(member):
                        held.add(reading.policy)
                elif member is not None and incarnation < member.incarnation:
                    self.session.delete(key)  # its writer was replaced
        return held

    def _forget_records(self) -> None:
        for incarnation in self.session.numbers("versions"):
            if incarnation > self.member.incarnation:
                continue
            newest_stay = _RECORDS_KEPT if incarnation == self.member.incarnation else 0
            for policy in policies(self.session, incarnation)[newest_stay:]:
                if self.stores and policy not in self._dropped:
                    continue
                self.session.delete_tree(keys.version(policy))
                self.session.delete(keys.retired(policy))
                self._dropped.discard(policy)

    def _forget_departed(self) -> None:
        """Drop the records of receivers that left, but of the last few."""
        departed = []
        for receiver_id in self.session.children("receivers"):
            member = newest(self.session, f"receivers/{receiver_id}")
            if member is not None and self.session.read(member.key("closed"), Closed) is not None:
                departed.append((member.record.created, receiver_id))
        for _, receiver_id in sorted(departed)[:-_DEPARTED_KEPT]:
            self.session.delete_tree(f"receivers/{receiver_id}")
            self.session.delete_tree(f"reading/{receiver_id}")
            self.session.delete_tree(f"agree/receivers/{receiver_id}")

    def _forget_tables(self) -> None:
        """Drop tables that no offer names any more."""
        stored = set(self.session.children("tables")) - self._tables_in_use
        if len(stored) < 2:
            return
        for incarnation in self.session.numbers("versions"):
            for policy in policies(self.session, incarnation):
                record = offer_of(self.session, policy)
                stored.discard(record.offer.table_digest if record is not None else "")
        for digest in stored:
            self.session.delete_tree(keys.table(digest))
