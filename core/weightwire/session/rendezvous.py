"""A torch.distributed store over session records, by which our own process groups meet."""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Sequence

from torch.distributed import Store  # type: ignore[attr-defined]  # not in torch's __all__

from weightwire.deadline import Watch
from weightwire.session.records import RankReport
from weightwire.session.session import Session

__all__ = ["SessionRendezvous"]


class SessionRendezvous(Store):
    """What ``ProcessGroupGloo`` needs of a store: set, get and wait.

    Its addresses are session records, so they are authenticated as those are,
    and nothing listens but the group itself.

    Args:
        prefix: key of the session under which this group's records lie.
        watch: waits have its deadline.
    """

    def __init__(self, session: Session, prefix: str, watch: Watch) -> None:
        super().__init__()
        self._session = session
        self._prefix = prefix
        self._watch = watch

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._session.write(self._place(key), RankReport(data))

    def get(self, key: str) -> bytes:
        place = self._place(key)
        record = self._watch.until(
            lambda: self._session.read(place, RankReport),
            "address for the trainer's own process group",
            lambda: ["a trainer rank"],
        )
        return record.payload

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        del timeout  # the watch has the call's deadline
        for key in keys:
            self.get(key)

    def _place(self, key: str) -> str:
        name = hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
        return f"{self._prefix}/{name}"
