"""A member in a process of its own: commands as lines of JSON, an answer to each."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from typing import Any

from weightwire.deadline import Deadline, Watch
from weightwire.errors import WeightWireError
from weightwire.session import Session, membership
from weightwire.session.lease import LeaseKeeper, LeaseObserver
from weightwire.session.records import Lease

__all__: list[str] = []


class Worker:
    """Sessions that stay open between commands."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._keepers: list[LeaseKeeper] = []

    def open(self, url: str) -> dict[str, Any]:
        """Open a session."""
        self._sessions[url] = Session.open(url, deadline=Deadline(30))
        return {"id": self._sessions[url].id}

    def close(self) -> dict[str, Any]:
        """Close all sessions."""
        for keeper in self._keepers:
            keeper.stop()
        for session in self._sessions.values():
            session.close()
        self._keepers, self._sessions = [], {}
        return {}

    def race(self, url: str, keys: int, me: int) -> dict[str, Any]:
        """Create keys that others create, too."""
        session = self._sessions[url]
        won = [i for i in range(keys) if session.create(f"race/{i}", Lease(me))]
        return {"won": won}

    def claim(self, url: str, count: int) -> dict[str, Any]:
        """Take the next free number, again and again, as members take incarnations."""
        session = self._sessions[url]
        mine: list[int] = []
        while len(mine) < count:
            free = max(session.numbers("claims"), default=0) + 1
            if session.create(f"claims/{free:06d}", Lease(free)):
                mine.append(free)
        return {"mine": mine}

    def overwrite(self, url: str, rounds: int, size: int) -> dict[str, Any]:
        """Replace one value; each is one letter repeated.  With no rounds it goes on for ever."""
        store, i = self._sessions[url].store, 0
        while not rounds or i < rounds:
            store.put("torn", bytes([97 + i % 26]) * (size + i % 7))
            i += 1
        return {}

    def write(self, url: str, key: str, counter: int, durable: bool) -> dict[str, Any]:
        """Write a record."""
        self._sessions[url].write(key, Lease(counter), durable=durable)
        return {}

    def read(self, url: str, key: str) -> dict[str, Any]:
        """Read a record."""
        record = self._sessions[url].read(key, Lease)
        return {"counter": None if record is None else record.counter}

    def put_blob(self, url: str, size: int) -> dict[str, Any]:
        """Store bytes that are known by their number."""
        payload = hashlib.shake_256(b"blob").digest(size)
        return {"digest": self._sessions[url].put_blob(payload)}

    def enter(self, url: str, receiver_id: str, lease_ttl: float) -> dict[str, Any]:
        """Become a receiver that renews its lease."""
        session, watch = self._sessions[url], Watch()
        watch.start(Deadline(30))
        member, keeper = membership.enter(
            session,
            LeaseObserver(session),
            watch,
            f"receivers/{receiver_id}",
            member_id=receiver_id,
            rank=0,
            world_size=1,
            backend="memory",
            lease_ttl=lease_ttl,
            look_around=lambda: None,
        )
        self._keepers.append(keeper)
        return {"incarnation": member.incarnation}


def main() -> None:
    worker = Worker()
    # Whoever started us may end without a word: then so do we, also in the midst of a command.
    lines: list[str] = []
    came = threading.Semaphore(0)

    def listen() -> None:
        for line in sys.stdin:
            lines.append(line)
            came.release()
        lines.append("")
        came.release()

    threading.Thread(target=listen, daemon=True).start()
    print(json.dumps({}), flush=True)  # noqa: T201 - it is up
    while True:
        came.acquire()
        line = lines.pop(0)
        if not line:
            return
        command = json.loads(line)
        try:
            answer = getattr(worker, command.pop("do"))(**command)
        except WeightWireError as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        print(json.dumps(answer), flush=True)  # noqa: T201 - the answer


if __name__ == "__main__":
    main()
