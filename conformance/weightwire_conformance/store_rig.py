"""What the tests of session stores run on: places for sessions, and other processes."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from weightwire.deadline import Deadline
from weightwire.errors import ConfigError
from weightwire.plugins import registry
from weightwire.session import Session

__all__ = ["Peer", "Peers", "Place", "Sessions", "StoresPlugin", "store_id"]


_SERVED = re.compile(r":0(/|\Z)")


class Place:
    """Where sessions of a scheme can be made.

    Args:
        asked: a URL in which ``{}`` stands for a session's name, or one that ``/name`` is
            added to.
    """

    def __init__(self, asked: str) -> None:
        self.asked = asked
        self._template = asked if "{}" in asked else asked.rstrip("/") + "/{}"

    def new(self) -> str:
        """The URL of a session that nobody has used."""
        return self._template.replace("{}", f"ww{secrets.token_hex(6)}")

    @property
    def is_served(self) -> bool:
        """Whether a member serves the store, at a port that only it knows."""
        return bool(_SERVED.search(self.asked))

    def reach(self, session: Session) -> str:
        """A session's URL for other members."""
        if not self.is_served:
            return self._template.replace("{}", _name(session.url, self._template))
        return session.url

    def beside(self, session: Session) -> str:
        """The URL of a session that isn't there, in a store that is."""
        name = _name(self.reach(session), self._template)
        return self.reach(session).replace(name, f"ww{secrets.token_hex(6)}")


def _name(url: str, template: str) -> str:
    """The name that ``Place.new`` gave to a session."""
    found = re.search(r"ww[0-9a-f]{12}", url)
    if found is None:
        raise AssertionError(f"the store of {template} says that it is {url}: where is its name?")
    return found[0]


class Sessions:
    """Sessions of one test; closed with it, and what they hold deleted."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._emptied: set[str] = set()

    def open(self, url: str, *, serve: bool = False, **options: Any) -> Session:
        session = Session.open(url, deadline=Deadline(30), serve=serve, **options)
        self._stack.callback(session.close)
        if session.url not in self._emptied and not options.get("read_only"):
            self._emptied.add(session.url)
            self._stack.callback(_empty, session)
        return session

    def close(self) -> None:
        self._stack.close()


def _empty(session: Session) -> None:
    """Delete the records that the tests have made."""
    for top in ("a", "b", "claims", "k", "l", "race", "receivers", "retired", "session", "t"):
        session.store.delete_tree(top)
    for top in ("tables", "top", "top-1", "topper", "torn", "versions"):
        session.store.delete_tree(top)


class Peer:
    """A process of ``store_worker``."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self.unanswered = 0
        self.process = subprocess.Popen(
            [sys.executable, "-m", "weightwire_conformance.store_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, do: str, **arguments: Any) -> None:
        """Begin a command."""
        assert self.process.stdin is not None  # noqa: S101 - it is a pipe
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()
        self.unanswered += 1

    def answer(self) -> dict[str, Any]:
        """The answer of the oldest command that has none.

        Raises:
            AssertionError: it raised, ended, or took too long.
        """
        assert self.process.stdout is not None  # noqa: S101 - it is a pipe
        if not select.select([self.process.stdout], [], [], self._patience)[0]:
            raise AssertionError(f"another process said nothing for {self._patience:g} s")
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError("another process ended; what it said is in the output above")
        answer: dict[str, Any] = json.loads(line)
        self.unanswered -= 1
        if "error" in answer:
            raise AssertionError(f"in another process: {answer['error']}: {answer['message']}")
        return answer

    @property
    def is_free(self) -> bool:
        """False once it was killed, or when a test that failed has left it at work."""
        return self.process.poll() is None and not self.unanswered

    def has_answered(self) -> bool:
        assert self.process.stdout is not None  # noqa: S101 - it is a pipe
        return bool(select.select([self.process.stdout], [], [], 0)[0])

    def call(self, do: str, **arguments: Any) -> dict[str, Any]:
        self.start(do, **arguments)
        return self.answer()

    def kill(self) -> None:
        """End it as a crash would."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


class Peers:
    """Processes that are kept for the next test."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._idle: list[Peer] = []

    @contextlib.contextmanager
    def take(self, count: int) -> Iterator[list[Peer]]:
        """Other processes; one that didn't answer, or was killed, isn't used again."""
        fresh = [Peer(self._patience) for _ in range(count - len(self._idle))]
        peers = [*self._idle[:count], *fresh]
        del self._idle[:count]
        try:
            for peer in fresh:
                peer.unanswered += 1  # that it is up
            for peer in fresh:
                peer.answer()
            yield peers
            for peer in peers:
                if peer.is_free:
                    peer.call("close")
        except BaseException:
            for peer in peers:
                peer.kill()
            raise
        for peer in peers:
            if peer.is_free:
                self._idle.append(peer)
            else:
                peer.kill()

    def close(self) -> None:
        for peer in self._idle:
            peer.kill()


class StoresPlugin:
    """One run over the stores that were named; writes its results as JSON where asked.

    Raises:
        pytest.UsageError: a URL is malformed.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.urls: list[str] = list(dict.fromkeys(config.getoption("--weightwire-store")))
        self.patience: float = config.getoption("--weightwire-patience")
        self._json: str | None = config.getoption("--weightwire-json")
        self._results: dict[str, dict[str, dict[str, Any]]] = {}
        for url in self.urls:
            if "://" not in url:
                raise pytest.UsageError(
                    f"--weightwire-store {url!r} is no URL: give one that sessions can be made "
                    "below, such as file:///tmp/stores"
                )
            try:
                registry().session_scheme(url.partition(":")[0])
            except ConfigError as error:
                raise pytest.UsageError(str(error)) from None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties = dict(report.user_properties)
        if "weightwire_promise" not in properties or (report.when != "call" and report.passed):
            return
        promises = self._results.setdefault(str(properties["weightwire_store"]), {})
        name = str(properties["weightwire_promise"])
        failed = report.failed or promises.get(name, {}).get("outcome") == "FAILED"
        promises[name] = {
            "outcome": "FAILED" if failed else "passed",
            "seconds": round(report.duration, 3),
            **({"detail": report.longreprtext} if report.failed else {}),
        }

    def pytest_sessionfinish(self) -> None:
        if self._json is None:
            return
        outcomes = [r["outcome"] for found in self._results.values() for r in found.values()]
        Path(self._json).write_text(
            json.dumps(
                {
                    "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                    "counts": {kind: outcomes.count(kind) for kind in ("passed", "FAILED")},
                    "stores": self._results,
                },
                indent=2,
            )
        )


def store_id(url: str) -> str:
    """A store in a test's name: its scheme and place, without credentials."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"
