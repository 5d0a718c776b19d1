"""One replica's way through an update: pause, update, verify, reset caches, resume."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from weightwire.deadline import Deadline
from weightwire.errors import (
    PeerLost,
    SessionError,
    TransferError,
    TransferTimeout,
    WeightWireError,
)
from weightwire_vllm.outcome import is_asleep, is_whole
from weightwire_vllm.pool.engines import EngineControl, PauseMode
from weightwire_vllm.pool.sight import ReplicaSight, Sight

if TYPE_CHECKING:
    from weightwire.contract import Policy

__all__ = ["CachePolicy", "Replica", "ReplicaReport", "State"]

CachePolicy = Literal["reset", "keep"]
State = Literal["new", "serving", "updating", "out"]

_CALL_SECONDS = 30.0
"""For calls that move no weights, unless the deadline is nearer."""
_POLL = 0.1


@dataclass(frozen=True)
class ReplicaReport:
    """One replica's update.

    Attributes:
        version: what it serves now.
        paused_seconds: from asking it to pause until it generates again.
        seconds: by step: ``pause``, ``update``, ``verify``, ``caches``, ``resume``; and
            ``wake``, if it slept: its weights before the update, and the rest after it.
    """

    name: str
    receiver_id: str
    version: int
    paused_seconds: float
    seconds: dict[str, float] = field(default_factory=dict)


class Replica:
    """An engine in a pool.

    Attributes:
        state: ``new`` until it is attached; ``out`` after a failure: it is paused, and no
            requests should be sent to it until an update succeeds.
        version: what it was last seen to serve.
        applied: what the last update here brought to it.
        reason: why it is out.
        whole: whether one that is out holds what it held before.
        unfinished: whether one that is out holds the new version, and what comes after that
            (its name, caches, resume) failed: ``conclude`` tries again.
    """

    def __init__(
        self, engine: EngineControl, receiver_id: str, sight: Sight, info: dict[str, Any]
    ) -> None:
        self.engine = engine
        self.receiver_id = receiver_id
        self.state: State = "new"
        self.version: int | None = None
        self.applied: Policy | None = None
        self.reason = ""
        self.whole = False
        self.unfinished = False
        self._sight = sight
        self._info = {**info, "receiver_id": receiver_id}

    @property
    def name(self) -> str:
        return self.engine.name

    async def look(self) -> ReplicaSight:
        """What the session says of it."""
        return await self._sight.look(self.receiver_id)

    async def attach(self, deadline: Deadline) -> None:
        """Check the engine, and open its receivers; it stays as it is if it has them."""
        try:
            await self.engine.check(_brief(deadline))
            await self.engine.attach(self._info, max(deadline.remaining(), 0.1))
        except (PeerLost, TransferTimeout) as error:
            if self.state == "serving":
                self.state, self.version, self.reason = "out", None, str(error)
            raise
        seen = await self.look()
        if not seen.joined:
            raise SessionError(
                f"{self.name} says that it is attached, and {self.receiver_id!r} isn't in the "
                "session: let it reach the same one under this URL"
            )
        self.version = seen.serving
        if self.state == "new":
            self.state = "serving"

    async def pause(self, mode: PauseMode, deadline: Deadline) -> None:
        # "wait" lasts as long as its longest request.
        await self.engine.pause(mode, max(deadline.remaining(), 0.1))

    async def restore(self, deadline: Deadline) -> bool:
        """Let one that failed serve what it held before; False if it isn't whole."""
        if not self.whole:
            return False
        try:
            await self._resume({}, deadline)
        except WeightWireError:
            # Of several data-parallel ranks some may generate by now.
            with contextlib.suppress(WeightWireError):
                await self.engine.pause("keep", _brief(deadline))
            raise
        self.state, self.reason = "serving", ""
        return True

    async def update(
        self, minimum: int | None, mode: PauseMode, caches: CachePolicy, deadline: Deadline
    ) -> ReplicaReport:
        """Take what is on offer.

        Args:
            minimum: the version that has to come, or a later one; None for the newest.

        Raises:
            WeightWireError: the engine is paused and out; the message has its reason.
        """
        return await self._through(minimum, mode, caches, deadline, brings=True)

    async def conclude(
        self, mode: PauseMode, caches: CachePolicy, deadline: Deadline
    ) -> ReplicaReport:
        """``update`` of one that is out and holds its version already."""
        return await self._through(None, mode, caches, deadline, brings=False)

    async def _through(
        self,
        minimum: int | None,
        mode: PauseMode,
        caches: CachePolicy,
        deadline: Deadline,
        *,
        brings: bool,
    ) -> ReplicaReport:
        steps: dict[str, float] = {}
        self.state, self.whole, self.unfinished = "updating", False, not brings
        began = time.perf_counter()
        is_untouched = brings
        try:
            with _timed(steps, "pause"):
                await self.pause(mode, deadline)
            is_untouched = False
            if brings:
                await self._wake_weights(steps, mode, deadline)
                with _timed(steps, "update"):
                    await self._bring(minimum, deadline)
            with _timed(steps, "verify"):
                version = await self._verified(minimum, deadline)
            if caches == "reset":
                with _timed(steps, "caches"):
                    await self.engine.reset_caches(_brief(deadline))
            await self._resume(steps, deadline)
        except BaseException as error:
            self.state, self.version = "out", None
            self.reason = str(error) or type(error).__name__
            self.whole = is_untouched or is_whole(self.reason)
            raise
        self.state, self.version, self.reason = "serving", version, ""
        self.unfinished = False
        paused = time.perf_counter() - began
        return ReplicaReport(self.name, self.receiver_id, version, paused, steps)

    async def _wake_weights(
        self, steps: dict[str, float], mode: PauseMode, deadline: Deadline
    ) -> None:
        """Start the update; an engine that sleeps gets the memory of its weights first."""
        try:
            await self._start(deadline)
        except TransferError as error:
            if not is_asleep(str(error)):
                raise
        else:
            return
        with _timed(steps, "wake"):
            with contextlib.suppress(TransferError):
                # If nothing else slept it goes on by itself, unless its weights are no version's.
                await self.engine.wake(["weights"], max(deadline.remaining(), 0.1))
            await self.pause(mode, deadline)
            await self._start(deadline)

    async def _resume(self, steps: dict[str, float], deadline: Deadline) -> None:
        try:
            with _timed(steps, "resume"):
                await self.engine.resume(_brief(deadline))
        except TransferError as error:
            if not is_asleep(str(error)):
                raise
            with _timed(steps, "wake"):
                await self.engine.wake(["kv_cache"], max(deadline.remaining(), 0.1))
            with _timed(steps, "resume"):
                await self.engine.resume(_brief(deadline))

    async def _bring(self, minimum: int | None, deadline: Deadline) -> None:
        """The rest of vLLM's calls; where an answer is lost, the session knows what came of it."""
        before = (await self.look()).holding
        try:
            left = max(deadline.remaining(), 0.1)
            # A little less for the receiver, so that its own error arrives.
            info = {"version": minimum, "timeout": max(left * 0.95 - 0.2, 0.1)}
            await self.engine.update(info, left)
            await self.engine.finish(max(deadline.remaining(), 0.1))
        except (PeerLost, TransferTimeout) as error:
            with contextlib.suppress(WeightWireError):
                now = (await self.look()).holding
                if now is not None and now != before and now.version >= (minimum or 0):
                    return
            raise error

    async def _start(self, deadline: Deadline) -> None:
        try:
            await self.engine.start(_brief(deadline))
        except TransferError as error:
            if "already" not in str(error):
                raise
            # Whoever drove it before was lost in the middle of an update: end that one.
            # What it had fetched is committed, or put back.
            with contextlib.suppress(TransferError):
                await self.engine.finish(max(deadline.remaining(), 0.1))
            await self.engine.start(_brief(deadline))

    async def _verified(self, minimum: int | None, deadline: Deadline) -> int:
        """Which version all of its ranks hold, by their own word; tokens are named after it."""
        seen = await self.look()
        while seen.serving is None and not seen.tainted and not deadline.passed():
            await asyncio.sleep(_POLL)
            seen = await self.look()
        version = seen.serving
        if version is None or (minimum is not None and version < minimum):
            raise TransferError(
                f"{self.name} serves {'no version' if version is None else f'version {version}'} "
                f"after an update: {seen.tainted or 'its ranks disagree'}"
            )
        self.unfinished = True
        said = await self.engine.name_version(str(version), _brief(deadline))
        if said != str(version):
            raise TransferError(
                f"{self.name} names its tokens after version {said!r} and holds {version}: "
                "is something else updating it?"
            )
        self.applied = seen.holding
        return version


def _brief(deadline: Deadline) -> float:
    return max(0.1, min(_CALL_SECONDS, deadline.remaining()))


@contextlib.contextmanager
def _timed(steps: dict[str, float], step: str) -> Any:
    began = time.perf_counter()
    try:
        yield
    finally:
        steps[step] = steps.get(step, 0.0) + time.perf_counter() - began
