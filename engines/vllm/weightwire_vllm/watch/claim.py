"""Who drives an engine: one watcher at a time, by a lease in the session."""

from __future__ import annotations

import asyncio
import contextlib

from weightwire.deadline import Deadline, Watch
from weightwire.errors import ConfigError, SessionError
from weightwire.session import membership
from weightwire.session.lease import LeaseKeeper, LeaseObserver, Member
from weightwire.session.session import Session

__all__ = ["Claims"]

_LEASE = 10.0


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
        self._held: list[tuple[Member, LeaseKeeper]] = []

    async def hold(self, timeout: float) -> None:
        """Claim all of them, or claim them again in a session that was made anew.

        Raises:
            ConfigError: a live process watches one of them.
            SessionError: the session can't be reached.
        """
        await asyncio.to_thread(self._hold, timeout)

    def _hold(self, timeout: float) -> None:
        if self._session is not None and not self._session.is_replaced():
            return
        self.release()
        deadline = Deadline(timeout)
        self._session = Session.open(self._url, deadline=deadline, token=self._token)
        watch = Watch()
        watch.start(deadline)
        observer = LeaseObserver(self._session)
        for name in self._names:
            try:
                claimed = membership.enter(
                    self._session,
                    observer,
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
                current = membership.newest(self._session, f"watchers/{name}")
                self.release()
                if current is None:
                    raise
                raise ConfigError(
                    f"engine {name!r} is watched already, by process {current.record.pid} on "
                    f"{current.record.host}: stop that `weightwire watch`, or leave it to it"
                ) from error
            self._held.append(claimed)

    def release(self) -> None:
        """Give all up.  Idempotent."""
        session, self._session = self._session, None
        held, self._held = self._held, []
        for member, keeper in held:
            keeper.stop()
            if session is not None:
                membership.leave(session, member)
        if session is not None:
            with contextlib.suppress(SessionError):
                session.close()


def _nothing() -> None:
    pass
