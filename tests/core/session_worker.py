"""What the session tests run in processes of their own: ``session_worker.py ACTION JSON``."""

from __future__ import annotations

import json
import os
import sys
import time

from weightwire.deadline import Deadline, Watch
from weightwire.errors import WeightWireError
from weightwire.session import membership
from weightwire.session.lease import LeaseKeeper, LeaseObserver
from weightwire.session.records import Lease
from weightwire.session.session import Session
from weightwire.waiting import drive


def say(**values: object) -> None:
    print(json.dumps(values), flush=True)


def wait_for_line() -> str:
    return sys.stdin.readline().strip()


def open_session(url: str, *, serve: bool = False, seconds: float = 20, token=None) -> Session:
    return Session.open(url, deadline=Deadline(seconds), serve=serve, token=token)


def serve(url: str, token: str | None = None) -> None:
    """Serve a store until standard input is closed."""
    session = open_session(url, serve=True, token=token)
    say(url=session.url, id=session.id, pid=os.getpid())
    wait_for_line()
    session.close()


def ask_stopped(url: str) -> None:
    """Ask a server that is stopped meanwhile, and end; say how long the answer took."""
    session = open_session(url)
    say(ready=True)
    wait_for_line()
    began = time.monotonic()
    try:
        session.read("session", Lease)
    except WeightWireError as error:
        say(error=type(error).__name__, message=str(error), seconds=time.monotonic() - began)
    session.close()


def member(
    url: str,
    kind: str,
    member_id: str,
    rank: int = 0,
    world_size: int = 1,
    lease_ttl: float = 2.0,
    timeout: float = 30.0,
) -> None:
    """Be a member until standard input says ``leave``; or say why not."""
    session = open_session(url)
    watch = Watch()
    watch.start(Deadline(timeout))
    try:
        joined, keeper = membership.enter(
            session,
            LeaseObserver(session),
            watch,
            kind,
            member_id=member_id,
            rank=rank,
            world_size=world_size,
            backend="memory",
            lease_ttl=lease_ttl,
            look_around=lambda: None,
        )
    except WeightWireError as error:
        say(error=type(error).__name__, message=str(error))
        session.close()
        return
    say(incarnation=joined.incarnation, pid=os.getpid())
    if wait_for_line() == "leave" and rank == 0:
        keeper.stop()
        membership.leave(session, joined)
    keeper.stop()
    session.close()


def claim_without_lease(url: str, kind: str, member_id: str) -> None:
    """Claim a name as a process of another host would, and die before the first renewal."""
    session = open_session(url)
    watch = Watch()
    watch.start(Deadline(10))
    from weightwire.session import process

    process.identity = lambda: ""
    claimed = drive(
        membership.claim(
            session,
            LeaseObserver(session),
            kind,
            member_id=member_id,
            world_size=1,
            backend="memory",
            lease_ttl=1.0,
        ),
        watch,
    )
    LeaseKeeper(session, claimed).renew()
    say(incarnation=claimed.incarnation)
    os._exit(0)


if __name__ == "__main__":
    globals()[sys.argv[1]](**json.loads(sys.argv[2]))
