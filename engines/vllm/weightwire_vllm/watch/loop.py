"""The watcher: one task an engine, from its start until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import Any, Literal

from weightwire.deadline import Deadline
from weightwire.errors import (
    AuthenticationError,
    ConfigError,
    PeerLost,
    SessionError,
    TransferTimeout,
    WeightWireError,
)
from weightwire_vllm.pool import AsyncPool
from weightwire_vllm.pool.engines import PauseMode
from weightwire_vllm.pool.replica import CachePolicy, Replica
from weightwire_vllm.pool.sight import ReplicaSight
from weightwire_vllm.watch.claim import Claims
from weightwire_vllm.watch.metrics import Metrics
from weightwire_vllm.watch.voice import Voice

__all__ = ["WatchOptions", "Watcher"]

_MOST_REST = 10.0
_RESTORE_SECONDS = 10.0


@dataclass(frozen=True)
class WatchOptions:
    """See ``weightwire watch --help``."""

    session: str
    engines: dict[str, str]
    backend: str | dict[str, Any]
    mode: PauseMode = "keep"
    caches: CachePolicy = "reset"
    timeout: float = 600.0
    grace: float = 30.0
    poll: float = 0.2
    on_failure: Literal["pause", "restore"] = "pause"
    api_key: str | None = None
    take_over: bool = False
    as_json: bool = False
    metrics_port: int | None = None
    receiver: dict[str, Any] = field(default_factory=dict)


class Watcher:
    """Follows a session until ``stop``.

    Servers may come, go and come again, and so may the trainer and its session.  A server
    that joins a session with finished versions is paused until it has one.
    """

    def __init__(self, options: WatchOptions) -> None:
        self._options = options
        self._pool = AsyncPool(
            options.engines,
            session=options.session,
            backend=options.backend,
            api_key=options.api_key,
            mode=options.mode,
            caches=options.caches,
            timeout=options.timeout,
            take_over=options.take_over,
            **options.receiver,
        )
        self._claims = Claims(options.session, list(options.engines))
        self._voice = Voice(len(options.engines), as_json=options.as_json)
        self._metrics = Metrics(options.metrics_port)
        self._stopping = asyncio.Event()
        self._paused_out: set[str] = set()

    def stop(self) -> None:
        """End: updates that run have ``grace`` seconds."""
        self._stopping.set()

    async def run(self) -> int:
        """Returns the exit code: 0, or 1 if an engine is left paused.

        Raises:
            AuthenticationError, UnsupportedOperation, ConfigError: an engine can't be driven,
                or is watched by another process.
        """
        replicas = list(self._pool.replicas.values())
        try:
            await self._claim()
            await self._check(replicas)
            if self._metrics.port is not None:
                self._voice.says("metrics", f"http://127.0.0.1:{self._metrics.port}/metrics")
            tasks = [asyncio.create_task(self._follow(replica)) for replica in replicas]
            stopped = asyncio.create_task(self._stopping.wait())
            await asyncio.wait([stopped, *tasks], return_when=asyncio.FIRST_COMPLETED)
            self._stopping.set()
            await self._end(tasks)
            return await self._leave(replicas)
        finally:
            self._voice.finish()
            self._metrics.close()
            await asyncio.to_thread(self._claims.release)
            await self._pool.aclose()

    # ---------------------------------------------------------------------- beginning

    async def _claim(self) -> None:
        """Claim the engines; a session that isn't there yet is waited for."""
        told = False
        while not self._stopping.is_set():
            try:
                await self._claims.hold(self._options.timeout)
            except AuthenticationError:
                raise
            except (SessionError, TransferTimeout) as error:
                if not told:
                    self._voice.says("waiting", f"for the session: {error}")
                told = True
                await self._rest(1.0)
            else:
                return

    async def _check(self, replicas: list[Replica]) -> None:
        """Refuse engines that can't be driven; those that aren't up yet are waited for later."""
        for replica in replicas:
            with contextlib.suppress(PeerLost, TransferTimeout):
                await replica.engine.check(min(10.0, self._options.timeout))

    # ---------------------------------------------------------------------- following

    async def _follow(self, replica: Replica) -> None:
        rest, tries, tried, last = self._options.poll, 0, None, ""
        try_again = 0.0
        while not self._stopping.is_set():
            try:
                await self._claims.hold(self._options.timeout, replica.receiver_id)
                seen = await self._joined(replica)
                if last:
                    self._voice.says("back", replica.name, engine=replica.name)
                last, rest = "", self._options.poll
                if await self._rests(replica, seen):
                    await self._rest(rest)
                    continue
                if seen.attempt != tried:
                    tried, tries, try_again = seen.attempt, 0, 0.0
                goal = seen.serving if replica.unfinished and not seen.behind else None
                goal = goal if seen.wanted is None else seen.wanted
                if goal is not None and time.monotonic() >= try_again:
                    if await self._update(replica, goal, brings=seen.wanted is not None):
                        tried = None
                    else:
                        tries += 1
                        try_again = time.monotonic() + min(2.0**tries, _MOST_REST)
            except ConfigError:
                raise  # somebody else drives it
            except WeightWireError as error:
                self._metrics.state(replica.name, None, in_service=False)
                if str(error) != last:
                    last = str(error)
                    self._voice.says("waiting", last, engine=replica.name)
                rest = min(max(2 * rest, 0.5), _MOST_REST)
            await self._rest(rest)

    async def _joined(self, replica: Replica) -> ReplicaSight:
        """Look; an engine that isn't in the session is attached, and kept out until current."""
        seen = await replica.look()
        if not seen.joined:
            replica.state = "new"
            await replica.attach(Deadline(self._options.timeout))
            self._voice.says("attached", replica.name, engine=replica.name)
            seen = await replica.look()
        if await self._rests(replica, seen):
            self._metrics.state(replica.name, None, in_service=False)
            return seen
        if seen.serving is None and seen.behind and replica.state == "serving":
            await replica.pause(self._options.mode, Deadline(self._options.timeout))
            replica.state, replica.reason = "out", "it holds no version of this session yet"
            self._voice.says("out", f"{replica.name}: {replica.reason}", engine=replica.name)
        replica.version = seen.serving
        self._metrics.state(replica.name, seen.serving, in_service=replica.state == "serving")
        return seen

    async def _rests(self, replica: Replica, seen: ReplicaSight) -> bool:
        """Whether it was put to sleep with what is there for it: the next version wakes it."""
        if seen.serving is not None or seen.attempt is None or seen.attempt != replica.applied:
            return False
        return replica.state == "serving" and await replica.engine.is_paused(10.0)

    async def _update(self, replica: Replica, version: int, *, brings: bool) -> bool:
        """Bring a version; or, where the engine holds it, do what failed after that."""
        options = self._options
        deadline = Deadline(options.timeout)
        try:
            if brings:
                report = await replica.update(version, options.mode, options.caches, deadline)
            else:
                report = await replica.conclude(options.mode, options.caches, deadline)
        except WeightWireError as error:
            self._metrics.failed(replica.name)
            self._metrics.state(replica.name, None, in_service=False)
            self._voice.heard(version, replica.name, str(error), self._missing(replica))
            await self._after_failure(replica)
            return False
        self._metrics.updated(replica.name, report)
        self._metrics.state(replica.name, report.version, in_service=True)
        self._voice.heard(report.version, replica.name, report, self._missing(replica))
        return True

    async def _after_failure(self, replica: Replica) -> None:
        if self._options.on_failure == "restore" and await self._restored(replica):
            return
        whole = "it holds what it held before" if replica.whole else "it may hold a mixture"
        whole = "it has the version, and the rest is tried again" if replica.unfinished else whole
        self._voice.says(
            "out", f"{replica.name} stays paused: {whole}", engine=replica.name, whole=replica.whole
        )

    async def _restored(self, replica: Replica) -> bool:
        try:
            restored = await replica.restore(Deadline(_RESTORE_SECONDS))
        except WeightWireError:
            return False
        if restored:
            self._voice.says(
                "restored", f"{replica.name} serves what it held before", engine=replica.name
            )
        return restored

    def _missing(self, but: Replica) -> int:
        others = [r for r in self._pool.replicas.values() if r is not but]
        return sum(replica.state in ("new", "out") for replica in others)

    async def _rest(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    # ---------------------------------------------------------------------- ending

    async def _end(self, tasks: list[asyncio.Task[None]]) -> None:
        """Let updates end; raise what ended a task on its own."""
        _, running = await asyncio.wait(tasks, timeout=self._options.grace)
        for task in running:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result

    async def _leave(self, replicas: list[Replica]) -> int:
        """Restore what is whole; name what is left paused."""
        left = []
        for replica in replicas:
            if replica.state == "out" and not await self._restored(replica):
                left.append(replica)
        for replica in left:
            reason = replica.reason.splitlines()[0]
            self._voice.says(
                "left", f"{replica.name} is left paused: {reason}", engine=replica.name
            )
        return 1 if left else 0
