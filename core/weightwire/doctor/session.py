"""Whether a session can be reached from here, and what it takes to be a member of it."""

from __future__ import annotations

import socket
import statistics
import time

from weightwire.deadline import Deadline
from weightwire.doctor.check import CheckOptions, Verdict
from weightwire.errors import AuthenticationError, ConfigError, SessionError, WeightWireError
from weightwire.inspection import MemberView, SessionView, inspect_session
from weightwire.session.lease import LeaseObserver
from weightwire.session.session import Session

__all__ = ["reach"]

_LOOKS = 7
_SLOW = 0.5
_MEMORY = "memory"


def reach(options: CheckOptions) -> Verdict:
    """Open the session read-only, and read who is there."""
    url = options.session
    if not url:
        return Verdict.absent("no session was named", "name one: --session URL")
    if url.partition(":")[0] == _MEMORY:
        return Verdict.absent(
            "memory isn't a session's scheme, and what its backend uses can't be reached from "
            "here: shared memory belongs to one host",
            "name the session's own URL (file://, tcp:// or redis://)",
        )
    try:
        session = Session.open(url, deadline=Deadline(options.seconds / 2), read_only=True)
    except WeightWireError as error:
        return _unreachable(url, error)
    try:
        began = []
        for _ in range(_LOOKS):
            start = time.perf_counter()
            session.children("receivers")
            began.append(time.perf_counter() - start)
        view = inspect_session(session, LeaseObserver(session), limit=1)
        if view.unreadable:
            raise SessionError(view.unreadable[0])
    except WeightWireError as error:
        return _unreachable(url, error)
    finally:
        session.close()
    return _judge(view, statistics.median(began))


def _judge(view: SessionView, latency: float) -> Verdict:
    members = [m for m in (view.sender, *view.receivers) if m is not None and m.alive]
    details = {
        "latency_s": latency,
        "session_id": view.session_id,
        "members": [{"id": m.member_id, "host": m.host, "backend": m.backend} for m in members],
    }
    here = socket.gethostname()[:256]
    far = [m for m in members if m.backend == _MEMORY and m.host != here]
    if far:
        return Verdict.failed(
            f"{_names(far)} use the memory backend on {far[0].host}, and this is {here}: "
            "shared memory belongs to one host",
            "run on that host, or let the trainer use filesystem, nccl or nixl",
            **details,
        )
    note = ""
    if any(m.backend == _MEMORY for m in members):
        note = "; its memory backend isn't tried: shared memory belongs to this host alone"
    summary = (
        f"reached in {1e3 * latency:.1f} ms: "
        + (
            f"a live sender on {view.sender.host}"
            if view.sender and view.sender.alive
            else "no live sender"
        )
        + f", {sum(m is not view.sender for m in members)} live receivers{note}"
    )
    if latency > _SLOW:
        return Verdict.warning(
            summary, "move the store nearer: each version takes about a dozen accesses", **details
        )
    return Verdict.ok(summary, **details)


def _names(members: list[MemberView]) -> str:
    return ", ".join(member.member_id for member in members[:3])


def _unreachable(url: str, error: WeightWireError) -> Verdict:
    first, _, own = str(error).partition("\n")[0].rpartition(": ")
    text = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    if isinstance(error, AuthenticationError):
        return Verdict.failed(text, "give this process the members' WEIGHTWIRE_TOKEN")
    if isinstance(error, ConfigError):
        return Verdict.failed(text, own or "correct the URL")
    if (
        isinstance(error, SessionError)
        and url.startswith("file:")
        and "doesn't exist" in first + own
    ):
        return Verdict.warning(
            text, "start the sender, which makes it; or correct the URL", exists=False
        )
    return Verdict.failed(
        text,
        "start the process that serves it; see that its port is open from here, and that it "
        "listens beyond loopback (tcp:// does only with WEIGHTWIRE_TOKEN)"
        if "://" in url and not url.startswith("file:")
        else own or "mend what it says",
    )
