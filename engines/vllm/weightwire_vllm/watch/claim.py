"""Who drives an engine: one watcher at a time, by a lease in the session."""

from __future__ import annotations

import asyncio
import contextlib
import threading

from weightwire.deadline import Deadline, Watch
from weightwire.errors import ConfigError, SessionError
from weightwire.session import membership
from weightwire.session.lease import LeaseKeeper, LeaseObserver, Member
from weightwire.session.session import Session

__all__ = ["Claims"]

_LEASE = 10.0
_OPEN_SECONDS = 5.0
"""For reaching the session: whoever holds tries again, and is told to stop in between."""


class Claims:
    """The engines that this process watches.

    Args:
        url: of the session.
        names: their receiver ids.
    """

    def __init__(self, url: str, names: list[str], token: str | None = None) -> None:
        self._url = url
        self._names = names
        self._token = token
        self._session: Session | None = None
        self._held: dict[str, tuple[Member, LeaseKeeper]] = {}
        self._turn = threading.Lock()

    async def hold(self, timeout: float, name: str | None = None) -> None:
        """Claim all of them, or claim them again in a session that was made anew.

        Args:
            name: one whose claim may have been lost while this process stood still.

        Raises:
            ConfigError: a live process watches one of them.
            SessionError: the session can't be reached.
        """
        await asyncio.to_thread(self._hold, timeout, name)

    def _hold(self, timeout: float, name: str | None) -> None:
        with self._turn:  # of engines' tasks that see a new session at the same time
            if self._session is not None and not self._session.is_replaced():
                if name is not None:
                    self._refuse_if_lost(self._session, name)
                return
            self.release()
            opening = Deadline(min(timeout, _OPEN_SECONDS))
            self._session = Session.open(self._url, deadline=opening, token=self._token)
            watch = Watch()
            watch.start(Deadline(timeout))
            try:
                for each in self._names:
                    self._held[each] = self._entered(self._session, watch, each)
            except BaseException:
                self.release()
                raise

    def _entered(self, session: Session, watch: Watch, name: str) -> tuple[Member, LeaseKeeper]:
        try:
            return membership.enter(
                session,
                LeaseObserver(session),
                watch,
                f"watchers/{name}",
                member_id=name,
                rank=0,
                world_size=1,
                backend="watch",
                lease_ttl=_LEASE,
                look_around=_nothing,
            )
        except SessionError as error:
            current = membership.newest(session, f"watchers/{name}")
            if current is None:
                raise
            raise _watched(name, current) from error

    def _refuse_if_lost(self, session: Session, name: str) -> None:
        member, _ = self._held[name]
        current = membership.newest(session, member.kind)
        if current is not None and current.incarnation > member.incarnation:
            raise _watched(name, current)

    def release(self) -> None:
        """Give all up.  Idempotent."""
        session, self._session = self._session, None
        held, self._held = self._held, {}
        for member, keeper in held.values():
            keeper.stop()
            if session is not None:
                membership.leave(session, member)
        if session is not None:
            with contextlib.suppress(SessionError):
                session.close()


def _watched(name: str, by: Member) -> ConfigError:
    return ConfigError(
        f"engine {name!r} is watched already, by process {by.record.pid} on {by.record.host}: "
        "stop that `weightwire watch`, or leave it to it"
    )


def _nothing() -> None:
    pass
