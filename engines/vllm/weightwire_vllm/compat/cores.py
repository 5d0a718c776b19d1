"""vLLM's engine cores (the processes with the scheduler), kept from generating with mixed weights.

vLLM lets anybody resume an engine in the middle of an update, and its own HTTP client
doesn't pause it at all.  The core sees each call that goes to its workers, and so it knows
when their weights are between two versions.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

from weightwire_vllm.compat.workers import ENGINE_NAME
from weightwire_vllm.outcome import MIXED, asleep, is_whole

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["guard_engine_cores"]

_log = logging.getLogger("weightwire.vllm")
_MARK = "_weightwire_between"
_EXTENSION = "weightwire_update"
_OPENS = ("update_weights", _EXTENSION)
_CLOSES = ("finish_weight_update", _EXTENSION)
_WRITES = ("start_weight_update", *_OPENS)
_RELOADS = "reload_weights"
_OPEN = "an update is open: finish it first"
_DISCARDED = "its weights were discarded by sleep(level=2): update it"


def guard_engine_cores() -> None:
    """Make engine cores in processes of their own refuse to generate between two versions.

    While an update is open, and after one that left a mixture, ``resume`` is an error and
    requests to an engine that isn't paused are answered with one; an update of an engine
    with requests in flight that isn't paused is refused.  So is one of an engine whose weights
    sleep, and to resume one that sleeps in part, or whose weights a sleep has discarded.
    A second call changes nothing.
    """
    from vllm.v1.engine import core

    kind = core.EngineCoreProc
    if hasattr(kind, _MARK):
        return
    needed = ("collective_rpc", "resume_scheduler", "_reject_add_in_shutdown", "sleep")
    missing = [name for name in needed if not hasattr(kind, name)]
    if missing:
        _log.warning(
            "this vLLM has no %s: nothing keeps its engines from generating in the middle of an "
            "update, so pause them",
            ", ".join(missing),
        )
        return
    setattr(kind, _MARK, "")
    kind.collective_rpc = _watched_rpc(kind.collective_rpc)
    kind.resume_scheduler = _refusing_resume(kind.resume_scheduler)
    kind.sleep = _watched_sleep(kind.sleep)
    kind._reject_add_in_shutdown = _refusing_add(kind._reject_add_in_shutdown)


def _watched_rpc(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def collective_rpc(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        opens, closes = method in _OPENS, method in _CLOSES
        ours = method == _EXTENSION or _is_ours(self)
        if ours and method in _WRITES and "weights" in _sleeping(self):
            raise RuntimeError(asleep(method, ["weights"]))
        if not (opens or closes) or not ours:
            result = original(self, method, *args, **kwargs)
            if method == _RELOADS and getattr(self, _MARK) == _DISCARDED:
                setattr(self, _MARK, "")
            return result
        before = getattr(self, _MARK)
        if opens:
            if not before:
                _refuse_running(self)
            setattr(self, _MARK, before or _OPEN)
        try:
            result = original(self, method, *args, **kwargs)
        except Exception as error:
            setattr(self, _MARK, _left_by(error, before))
            raise
        if closes:
            setattr(self, _MARK, "")
        return result

    return collective_rpc


def _watched_sleep(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def sleep(self: Any, level: int = 1, *args: Any, **kwargs: Any) -> Any:
        if level and getattr(self, _MARK) == _OPEN:
            raise RuntimeError(f"sleep refused: {_OPEN}")
        # One whose weights sleep already keeps what it has of them.
        if level >= 2 and _is_ours(self) and "weights" not in _sleeping(self):
            setattr(self, _MARK, _DISCARDED)
        return original(self, level, *args, **kwargs)

    return sleep


def _refusing_resume(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def resume_scheduler(self: Any) -> Any:
        if _is_ours(self) and (tags := _sleeping(self)):
            raise RuntimeError(asleep("resume", tags))
        between = getattr(self, _MARK)
        if between and not _spans_cores(self):
            raise RuntimeError(f"resume refused: {between}")
        if between:
            # The cores of a data-parallel engine meet in their resume: one that stays
            # away would stop the others.  It goes along, without requests.
            self._send_abort_outputs(_finish_all(self))
        return original(self)

    return resume_scheduler


def _refusing_add(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def reject_add(self: Any, request: Any) -> bool:
        if original(self, request):
            return True
        between = getattr(self, _MARK)
        if not between or _is_paused(self):
            return False
        _log.error("request %s refused: %s", request.request_id, between)
        self._send_error_outputs_to_client([request.request_id], request.client_index)
        return True

    return reject_add


def _refuse_running(core: Any) -> None:
    if not _is_paused(core) and core.scheduler.has_unfinished_requests():
        raise RuntimeError(
            "update_weights refused: requests are running: pause the engine first "
            "(POST /pause?mode=keep, AsyncLLM.pause_generation)"
        )


def _left_by(error: Exception, before: str) -> str:
    text = str(error)
    if is_whole(text):
        return ""
    if MIXED not in text and "start_weight_update" in text:
        return before  # vLLM's own refusal of a call out of turn: no worker did anything
    reason = " ".join(text.split())[:400]
    return f"the last update failed and left weights of two versions ({reason}): update it again"


def _is_ours(core: Any) -> bool:
    config = core.vllm_config.weight_transfer_config
    return config is not None and config.backend == ENGINE_NAME


def _sleeping(core: Any) -> set[str]:
    """Which parts of the workers' memory sleep: ``weights``, ``kv_cache``."""
    executor = core.model_executor
    tags = getattr(executor, "sleeping_tags", None)
    if tags is None:  # before 0.32 there is only the whole
        tags = {"weights", "kv_cache"} if getattr(executor, "is_sleeping", False) else set()
    return set(tags)


def _is_paused(core: Any) -> bool:
    return bool(core.is_scheduler_paused())


def _spans_cores(core: Any) -> bool:
    return int(core.vllm_config.parallel_config.data_parallel_size) > 1


def _finish_all(core: Any) -> Any:
    from vllm.v1.request import RequestStatus

    return core.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
