"""A pool of vLLM engines that gets new versions together."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar, get_args

from weightwire.deadline import Deadline
from weightwire.errors import (
    ConfigError,
    HandleError,
    SessionError,
    TransferError,
    TransferTimeout,
    WeightWireError,
)
from weightwire.session import keys
from weightwire_vllm.info import InitInfo, parse
from weightwire_vllm.pool.engines import EngineControl, PauseMode
from weightwire_vllm.pool.http import HttpEngine
from weightwire_vllm.pool.local import local_engine
from weightwire_vllm.pool.replica import CachePolicy, Replica, ReplicaReport
from weightwire_vllm.pool.sight import ReplicaSight, Sight

__all__ = ["AsyncPool", "Pool", "PoolReport", "UpdateFailed", "receiver_id_of"]

_POLL = 0.1

T = TypeVar("T")


@dataclass(frozen=True)
class PoolReport:
    """What an update did.

    Attributes:
        updated: by engine's name.
        held: engines that held the version already.
        failed: by engine's name, why it is out: it stays paused.
    """

    updated: dict[str, ReplicaReport] = field(default_factory=dict)
    held: tuple[str, ...] = ()
    failed: dict[str, str] = field(default_factory=dict)


class UpdateFailed(TransferError):
    """Some engines didn't get the version; they are paused, and out of the pool.

    Attributes:
        report: who did, and why the others didn't.
    """

    def __init__(self, message: str, report: PoolReport) -> None:
        super().__init__(message)
        self.report = report


def receiver_id_of(url: str) -> str:
    """A receiver id made of an engine's URL: host and port."""
    host = re.sub(r"^[a-z]+://", "", url).strip("/")
    return re.sub(r"[^A-Za-z0-9._-]", "-", host).strip(".-")[:100] or "engine"


class AsyncPool:
    """Drives vLLM engines through updates: over HTTP, or in this process.

    An update pauses each engine, brings the version to all its ranks, checks by their own
    word in the session what they hold, names tokens after it, resets caches, and resumes.
    An engine that fails stays paused and out (``out``) until an update of it succeeds.

    Args:
        engines: URLs, ``AsyncLLM`` (or ``LLM``) objects; or a mapping from receiver ids.
        session: URL of the session; what engines and this process reach it by.
        backend: what ``open_receiver`` takes: a name, or a mapping with options.
        api_key: of the servers.
        mode: what happens to requests in flight: ``"keep"`` freezes them, ``"wait"`` lets
            them end first, ``"abort"`` ends them.
        caches: ``"reset"`` drops prefix, multi-modal and encoder caches; frozen requests
            are computed again.  With ``"keep"`` they go on with what the old version
            computed, and new requests may hit it.
        timeout: seconds for a call.
        receiver_options: further fields of ``init_info``: ``overlap``, ``catch_up``, ...

    Raises:
        ConfigError: an argument is wrong.
    """

    def __init__(
        self,
        engines: Sequence[Any] | Mapping[str, Any],
        *,
        session: str,
        backend: str | Mapping[str, Any],
        api_key: str | None = None,
        token: str | None = None,
        mode: PauseMode = "keep",
        caches: CachePolicy = "reset",
        timeout: float = 600.0,
        **receiver_options: Any,
    ) -> None:
        self._mode, self._caches = _checked(mode, caches)
        self._timeout = Deadline(timeout).seconds
        info = {
            "session": session,
            "backend": backend if isinstance(backend, str) else dict(backend),
            "timeout": timeout,
            **receiver_options,
        }
        named = _named(engines)
        for receiver_id in named:
            keys.validate_member_id(receiver_id)
            parse(InitInfo, "init_info", {**info, "receiver_id": receiver_id})
        catches_up = receiver_options.get("catch_up") is not None
        self._sight = Sight(session, token, catch_up=catches_up)
        self.replicas = {
            receiver_id: Replica(_engine(engine, api_key), receiver_id, self._sight, info)
            for receiver_id, engine in named.items()
        }

    @property
    def in_service(self) -> dict[str, int | None]:
        """Engines that requests may go to, with the version that each serves."""
        members = self.replicas.values()
        return {r.name: r.version for r in members if r.state == "serving"}

    @property
    def out(self) -> dict[str, str]:
        """Engines that failed, with the reason; they are paused."""
        return {r.name: r.reason for r in self.replicas.values() if r.state == "out"}

    async def attach(self, timeout: float | None = None) -> None:
        """Open every engine's receivers.  Engines that have them stay as they are.

        Raises:
            PeerLost, AuthenticationError, UnsupportedOperation: an engine can't be driven.
            ConfigError: it is attached to another session (``take_over=False``).
        """
        deadline = self._deadline(timeout)
        await _all(replica.attach(deadline) for replica in self.replicas.values())

    async def update(
        self,
        version: int | None = None,
        *,
        mode: PauseMode | None = None,
        caches: CachePolicy | None = None,
        timeout: float | None = None,
    ) -> PoolReport:
        """Bring every engine to a version.

        Engines serve on until the version is there for them.  With a backend whose sender
        waits for its receivers, call this beside ``send``.  Engines that restarted are
        attached again.

        Args:
            version: to wait for (a later one is taken too); by default the newest, as soon
                as there is one for each engine.

        Raises:
            UpdateFailed: not all engines got it; ``report`` says which did.
        """
        mode, caches = _checked(
            self._mode if mode is None else mode, self._caches if caches is None else caches
        )
        if version is not None:
            keys.validate_version(version)
        deadline = self._deadline(timeout)
        gate = _Gate()

        async def one(replica: Replica) -> ReplicaReport | None:
            seen = await self._await_offer(replica, version, deadline)
            if seen.wanted is None:
                # One that failed and holds what is asked for only has to serve it.
                concludes = replica.state == "out"
                return await replica.conclude(mode, caches, deadline) if concludes else None
            async with gate.at_most(seen.most_out if seen.stored else None):
                return await replica.update(seen.wanted, mode, caches, deadline)

        replicas = list(self.replicas.values())
        done = await asyncio.gather(*map(one, replicas), return_exceptions=True)
        updated, failed, held = {}, {}, []
        for replica, result in zip(replicas, done, strict=True):
            if isinstance(result, ReplicaReport):
                updated[replica.name] = result
            elif result is None:
                held.append(replica.name)
            elif isinstance(result, WeightWireError):
                failed[replica.name] = str(result)
            else:
                raise result
        report = PoolReport(updated, tuple(held), failed)
        if failed:
            first = next(iter(failed.values()))
            who = ", ".join(failed)
            raise UpdateFailed(
                f"{len(failed)} of {len(done)} engines failed ({who}): {first}", report
            )
        return report

    async def detach(self, timeout: float | None = None) -> None:
        """Make every engine leave the session; each keeps its weights."""
        deadline = self._deadline(timeout)
        await _all(r.engine.detach(deadline.remaining()) for r in self.replicas.values())

    async def aclose(self) -> None:
        """Forget the connections; engines stay attached, and as they are.  Idempotent."""
        for replica in self.replicas.values():
            await replica.engine.close()
        self._sight.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline(self._timeout if timeout is None else timeout)

    async def _await_offer(
        self, replica: Replica, version: int | None, deadline: Deadline
    ) -> ReplicaSight:
        """Wait until there is something for an engine, or it holds what is asked for."""
        last = ""
        while not deadline.passed():
            try:
                seen = await replica.look()
                if not seen.joined:
                    await replica.attach(deadline)
                    seen = await replica.look()
            except SessionError as error:
                last = f": {error}"
            else:
                last = ""
                if seen.wanted is not None and seen.wanted >= (version or 0):
                    return seen
                if seen.serving is not None and version is not None and seen.serving >= version:
                    return seen
                if seen.serving is not None and version is None and not seen.behind:
                    return seen
            await asyncio.sleep(_POLL)
        what = "a version" if version is None else f"version {version}"
        raise TransferTimeout(
            f"{replica.name}: the sender offered {what} to {replica.receiver_id!r} in "
            f"{deadline.seconds:g} s at no time{last}: it serves on"
        )


class Pool:
    """``AsyncPool`` without asyncio; the same arguments.

    An ``AsyncLLM`` belongs to an event loop: use ``AsyncPool`` there.
    """

    def __init__(self, engines: Sequence[Any] | Mapping[str, Any], **options: Any) -> None:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            raise HandleError("Pool inside an event loop: use AsyncPool there")
        self._runner = asyncio.Runner()
        try:
            self._pool = AsyncPool(engines, **options)
        except BaseException:
            self._runner.close()
            raise
        self._closed = False

    @property
    def replicas(self) -> dict[str, Replica]:
        return self._pool.replicas

    @property
    def in_service(self) -> dict[str, int | None]:
        """See ``AsyncPool.in_service``."""
        return self._pool.in_service

    @property
    def out(self) -> dict[str, str]:
        """See ``AsyncPool.out``."""
        return self._pool.out

    def attach(self, timeout: float | None = None) -> None:
        """See ``AsyncPool.attach``."""
        self._run(self._pool.attach(timeout))

    def update(
        self,
        version: int | None = None,
        *,
        mode: PauseMode | None = None,
        caches: CachePolicy | None = None,
        timeout: float | None = None,
    ) -> PoolReport:
        """See ``AsyncPool.update``."""
        return self._run(self._pool.update(version, mode=mode, caches=caches, timeout=timeout))

    def detach(self, timeout: float | None = None) -> None:
        """See ``AsyncPool.detach``."""
        self._run(self._pool.detach(timeout))

    def close(self) -> None:
        """Forget the connections; engines stay as they are.  Idempotent."""
        if not self._closed:
            self._run(self._pool.aclose())
            self._closed = True
            self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        if self._closed:
            call.close()
            raise HandleError("the pool is closed: open another")
        return self._runner.run(call)


class _Gate:
    """At most so many engines out of service at a time."""

    def __init__(self) -> None:
        self._out = 0
        self._changed = asyncio.Condition()
        self._most: int | None = None
        self._is_off = False

    def at_most(self, most: int | None) -> Self:
        self._most = most
        return self

    async def __aenter__(self) -> None:
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._is_off or self._most is None or self._out < self._most
            )
            self._out += 1

    async def __aexit__(self, *exc: object) -> None:
        async with self._changed:
            # One that failed stays out; its receiver keeps its turn, too.
            if exc[0] is None:
                self._out -= 1
            else:
                self._is_off = True  # the others hear the rest from their own receivers
            self._changed.notify_all()


async def _all(calls: Any) -> None:
    """Run all; raise the first error once all have ended."""
    for result in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


def _named(engines: Sequence[Any] | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(engines, Mapping):
        named = dict(engines)
    elif isinstance(engines, str):
        raise ConfigError(f"engines={engines!r}: give a list of URLs")
    else:
        named = {}
        for number, engine in enumerate(engines):
            key = receiver_id_of(engine) if isinstance(engine, str) else f"replica-{number}"
            if key in named:
                raise ConfigError(f"two engines are called {key!r}: give a mapping of receiver ids")
            named[key] = engine
    if not named:
        raise ConfigError("a pool needs engines: give URLs, or engines of this process")
    return named


def _engine(engine: Any, api_key: str | None) -> EngineControl:
    if isinstance(engine, EngineControl):
        return engine
    return HttpEngine(engine, api_key) if isinstance(engine, str) else local_engine(engine)


def _checked(mode: Any, caches: Any) -> tuple[PauseMode, CachePolicy]:
    if mode not in get_args(PauseMode):
        raise ConfigError(f"mode={mode!r}: use one of {', '.join(get_args(PauseMode))}")
    if caches not in get_args(CachePolicy):
        raise ConfigError(f"caches={caches!r}: use one of {', '.join(get_args(CachePolicy))}")
    return mode, caches
