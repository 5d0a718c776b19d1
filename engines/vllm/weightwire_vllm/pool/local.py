"""vLLM engines of this process: ``LLM`` and ``AsyncLLM``."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any

from weightwire.errors import (
    ConfigError,
    TransferError,
    TransferTimeout,
    UnsupportedOperation,
    WeightWireError,
)
from weightwire_vllm.outcome import asleep
from weightwire_vllm.pool.engines import EngineControl, PauseMode

__all__ = ["AsyncEngine", "OfflineEngine", "local_engine"]


def local_engine(engine: Any) -> EngineControl:
    """Wrap an ``LLM`` or an ``AsyncLLM``.

    Raises:
        ConfigError: it is neither.
    """
    if hasattr(engine, "pause_generation"):
        return AsyncEngine(engine)
    if hasattr(engine, "init_weight_transfer_engine") and hasattr(engine, "llm_engine"):
        return OfflineEngine(engine)
    raise ConfigError(
        f"a pool can't drive a {type(engine).__name__}: give an http:// URL, an LLM or an AsyncLLM"
    )


class OfflineEngine(EngineControl):
    """An ``LLM``: it generates only inside ``generate``, so that there is nothing to pause.

    Its calls run on the thread of the event loop, and hold it: the receiver's own timeout
    ends them.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._has_weights = False  # it sleeps, and its weights don't
        self.name = "LLM"

    async def check(self, timeout: float) -> None:
        if not hasattr(self._llm, "update_weight_version"):
            raise UnsupportedOperation("this vLLM's LLM knows no weight versions: use vLLM 0.32")

    async def pause(self, mode: PauseMode, timeout: float) -> None:
        if self._llm.llm_engine.has_unfinished_requests():
            raise UnsupportedOperation("an LLM can't be paused while it generates: update it after")

    async def resume(self, timeout: float) -> None:
        if self._sleeps:
            raise TransferError(f"{self.name}: {asleep('resume', ['kv_cache'])}")

    async def is_paused(self, timeout: float) -> bool:
        return self._sleeps

    async def wake(self, tags: Sequence[str], timeout: float) -> None:
        _run(self.name, lambda: self._llm.wake_up(tags=list(tags)))
        self._has_weights = self._sleeps and "weights" in tags

    @property
    def _sleeps(self) -> bool:
        return bool(self._llm.llm_engine.is_sleeping())

    async def attach(self, info: dict[str, Any], timeout: float) -> None:
        _run(self.name, lambda: self._llm.init_weight_transfer_engine({"init_info": info}))

    async def detach(self, timeout: float) -> None:
        from weightwire_vllm.compat import leave_session

        _run(self.name, lambda: leave_session(self._llm))

    async def start(self, timeout: float) -> None:
        if self._sleeps and not self._has_weights:
            raise TransferError(f"{self.name}: {asleep('start_weight_update', ['weights'])}")
        _run(self.name, self._llm.start_weight_update)

    async def update(self, info: dict[str, Any], timeout: float) -> None:
        _run(self.name, lambda: self._llm.update_weights({"update_info": info}))

    async def finish(self, timeout: float) -> None:
        _run(self.name, self._llm.finish_weight_update)

    async def name_version(self, version: str, timeout: float) -> str:
        self._llm.update_weight_version(version)
        return str(self._llm.get_weight_version())

    async def reset_caches(self, timeout: float) -> None:
        if not self._llm.reset_prefix_cache():
            raise TransferError("LLM could not reset its prefix cache")


class AsyncEngine(EngineControl):
    """An ``AsyncLLM``, driven on its own event loop."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.name = "AsyncLLM"

    async def check(self, timeout: float) -> None:
        if not hasattr(self._engine, "update_weight_version"):
            raise UnsupportedOperation(
                "this vLLM's AsyncLLM knows no weight versions: use vLLM 0.32"
            )

    async def pause(self, mode: PauseMode, timeout: float) -> None:
        await self._run(self._engine.pause_generation(mode=mode, clear_cache=False), timeout)

    async def resume(self, timeout: float) -> None:
        await self._run(self._engine.resume_generation(), timeout)

    async def is_paused(self, timeout: float) -> bool:
        return bool(await self._run(self._engine.is_paused(), timeout))

    async def wake(self, tags: Sequence[str], timeout: float) -> None:
        await self._run(self._engine.wake_up(list(tags)), timeout)

    async def attach(self, info: dict[str, Any], timeout: float) -> None:
        from weightwire_vllm.compat import init_request

        request = init_request(info)
        await self._run(self._engine.init_weight_transfer_engine(request), timeout)

    async def detach(self, timeout: float) -> None:
        await self._run(self._engine.shutdown_weight_transfer_engine(), timeout)

    async def start(self, timeout: float) -> None:
        await self._run(self._engine.start_weight_update(), timeout)

    async def update(self, info: dict[str, Any], timeout: float) -> None:
        from weightwire_vllm.compat import update_request

        await self._run(self._engine.update_weights(update_request(info)), timeout)

    async def finish(self, timeout: float) -> None:
        await self._run(self._engine.finish_weight_update(), timeout)

    async def name_version(self, version: str, timeout: float) -> str:
        await self._run(self._engine.update_weight_version(version), timeout)
        return str(await self._run(self._engine.get_weight_version(), timeout))

    async def reset_caches(self, timeout: float) -> None:
        if not await self._run(self._engine.reset_prefix_cache(True, True), timeout):
            raise TransferError("AsyncLLM could not reset its prefix cache")
        await self._run(self._engine.reset_mm_cache(), timeout)
        await self._run(self._engine.reset_encoder_cache(), timeout)

    async def _run(self, call: Awaitable[Any], timeout: float) -> Any:
        try:
            async with asyncio.timeout(timeout):
                return await call
        except TimeoutError:
            raise TransferTimeout(f"{self.name} didn't answer within {timeout:.1f} s") from None
        except WeightWireError:
            raise
        except Exception as error:
            raise TransferError(f"{self.name}: {error}") from error


def _run(name: str, call: Any) -> None:
    try:
        call()
    except WeightWireError:
        raise
    except Exception as error:
        raise TransferError(f"{name}: {error}") from error
