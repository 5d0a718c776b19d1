"""A worker in its engine: its place, its weight transfer engine, its update sessions."""

from __future__ import annotations

import functools
import inspect
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "ENGINE_NAME",
    "ReplicaLayout",
    "close_session",
    "config_context",
    "end_update",
    "init_request",
    "keep_adapters",
    "leave_session",
    "module_of",
    "register_engine",
    "register_trainer",
    "replica_layout",
    "update_request",
    "watch_sleep",
]

_WATCHED = "_weightwire_watched"

ENGINE_NAME = "weightwire"
"""The backend's name in ``weight_transfer_config``."""


@dataclass(frozen=True)
class ReplicaLayout:
    """Where a worker stands in its replica.

    Attributes:
        rank: rank among the workers that share one copy of the model.
        world_size: number of those workers (tensor times pipeline parallel).
        suffix: tells data-parallel replicas of one engine apart; empty for one alone, and
            for the first of a dense model.
        speaks: whether this worker raises the replica's errors.
    """

    rank: int
    world_size: int
    suffix: str
    speaks: bool


def replica_layout(vllm_config: Any) -> ReplicaLayout:
    """A worker's place, from its own parallel config."""
    parallel = vllm_config.parallel_config
    index = int(parallel.data_parallel_index)
    # Of a dense model each data-parallel rank is an engine by itself, which says that it is
    # one of one: the first can't tell that there are others, and the others have an index.
    suffix = f"-dp{index}" if index or parallel.data_parallel_size > 1 else ""
    rank, world_size = int(parallel.rank), int(parallel.world_size)
    # MultiprocExecutor leaves the replies behind the first failing rank unread.
    # Under an external launcher every rank answers to a caller of its own.
    alone = parallel.distributed_executor_backend == "external_launcher"
    return ReplicaLayout(rank, world_size, suffix, alone or rank == world_size - 1)


def register_engine(module: str, name: str) -> None:
    """Register our weight transfer engine; a second call changes nothing."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    # register_engine raises on duplicates, and plug-ins load once per process
    # and again in every test that calls the entry point.
    if ENGINE_NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(ENGINE_NAME, module, name)


def register_trainer(module: str, name: str) -> None:
    """Register our trainer engine; a second call changes nothing."""
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

    if ENGINE_NAME not in WeightTransferTrainerFactory._registry:
        WeightTransferTrainerFactory.register_engine(ENGINE_NAME, module, name)


def module_of(source: Any) -> nn.Module | None:
    """The module behind vLLM's own source over one, or None."""
    from vllm.distributed.weight_transfer import ModuleSource

    # A subclass may yield anything.
    module = source._module if type(source) is ModuleSource else None
    return module if isinstance(module, nn.Module) else None


def end_update(engine: Any) -> None:
    """Close the update session that the calling vLLM worker holds open.

    The worker closes it itself only where ``update_weights`` raises, and not at
    all where ``finish_weight_update`` does; it refuses the next one while open.
    """
    worker = _calling_worker(engine)
    if worker is not None:
        worker._weight_update_active = False


def keep_adapters(engine: Any, wanted: Callable[[], bool]) -> None:
    """Keep the calling vLLM worker from dropping its adapters after an update.

    It takes any update for one of base weights: requests would then load from disk again
    what has just been replaced in memory.

    Args:
        wanted: whether an update that ends now has left the base weights as they were.
    """
    worker = _calling_worker(engine)
    runner = getattr(worker, "model_runner", None)
    drop = getattr(runner, "reset_lora_state", None)  # not in vLLM before 0.32
    if drop is None or hasattr(drop, _WATCHED):
        return

    def reset_lora_state() -> None:
        if not wanted():
            drop()

    setattr(reset_lora_state, _WATCHED, True)
    runner.reset_lora_state = reset_lora_state  # type: ignore[union-attr]


def _calling_worker(engine: Any) -> Any:
    """The engine isn't given its worker, so that it is found among the callers."""
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if caller is not None and getattr(caller, "weight_transfer_engine", None) is engine:
            return caller
        frame = frame.f_back
    return None


def watch_sleep(told: Callable[[Any, int], None]) -> None:
    """Have ``told(worker, level)`` called before a worker of this process goes to sleep.

    A second call changes nothing.
    """
    for name in ("gpu_worker", "cpu_worker", "xpu_worker"):
        module = sys.modules.get(f"vllm.v1.worker.{name}")
        for kind in list(vars(module).values()) if module is not None else ():
            sleep = vars(kind).get("sleep") if isinstance(kind, type) else None
            if sleep is not None and not hasattr(sleep, _WATCHED):
                kind.sleep = _telling(sleep, told)


def _telling(sleep: Callable[..., Any], told: Callable[[Any, int], None]) -> Callable[..., Any]:
    @functools.wraps(sleep)
    def telling(self: Any, level: int = 1) -> Any:
        told(self, level)
        return sleep(self, level)

    setattr(telling, _WATCHED, True)
    return telling


def close_session(llm: Any, version: int | None) -> None:
    """Finish an ``LLM``'s update and tell it the version, if it knows any."""
    if version is not None and inspect.signature(llm.finish_weight_update).parameters:
        llm.finish_weight_update(str(version))
    else:
        llm.finish_weight_update()


def leave_session(llm: Any) -> None:
    """Shut down an in-process ``LLM``'s weight transfer engine, and nothing else."""
    if hasattr(llm, "shutdown_weight_transfer_engine"):
        llm.shutdown_weight_transfer_engine()
    else:
        llm.collective_rpc(lambda worker: worker.weight_transfer_engine.shutdown())


@contextmanager
def config_context(vllm_config: Any) -> Iterator[None]:
    """vLLM's own context for code that reads the current config while loading."""
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(vllm_config), torch.no_grad():
        yield


def init_request(info: dict[str, Any]) -> Any:
    """What ``AsyncLLM.init_weight_transfer_engine`` takes."""
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

    return WeightTransferInitRequest(init_info=info)


def update_request(info: dict[str, Any]) -> Any:
    """What ``AsyncLLM.update_weights`` takes."""
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    return WeightTransferUpdateRequest(update_info=info)
