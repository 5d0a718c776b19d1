"""Models as an engine's ranks build them, without data and without an engine."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = [
    "column_slices",
    "model_of_rank",
    "planning_config",
]


def planning_config(model: Path, *, tp: int, pp: int, dp: int, expert_parallel: bool) -> Any:
    """The config of an engine that is never started; its rank is set by ``model_of_rank``.

    Raises:
        ValueError: vLLM doesn't know the architecture, or can't spread it like that.
    """
    from vllm.engine.arg_utils import EngineArgs

    # Ranks come from the environment under an external launcher, which starts nothing.
    with _environment({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(tp * pp * dp)}):
        return EngineArgs(
            model=str(model),
            tensor_parallel_size=tp,
            pipeline_parallel_size=pp,
            data_parallel_size=dp,
            enable_expert_parallel=expert_parallel,
            skip_tokenizer_init=True,
            load_format="dummy",
            enforce_eager=True,
            distributed_executor_backend="external_launcher",
        ).create_engine_config()


def column_slices(vllm_config: Any) -> int:
    """In how many slices of columns the engine's ranks read matrices.

    Without expert parallelism, experts are sliced over the data-parallel ranks too.
    """
    parallel = vllm_config.parallel_config
    slices = int(parallel.tensor_parallel_size)
    if vllm_config.model_config.get_num_experts() and not parallel.enable_expert_parallel:
        slices *= int(parallel.data_parallel_size)
    return slices


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def model_of_rank(vllm_config: Any, rank: int) -> Iterator[nn.Module]:
    """The model as one rank of an engine builds it, its weights on meta.

    Its process groups are torch's ``fake`` ones, which say rank and size and move
    nothing; they are gone at the end.  The process must have no groups of its own.

    Args:
        rank: among tensor times pipeline times data parallel ranks.
    """
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    parallel = vllm_config.parallel_config
    inner = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    parallel.rank, parallel.data_parallel_rank = rank % inner, rank // inner
    coordinator = parallel_state.GroupCoordinator
    real_group, real_init = dist.new_group, coordinator.__init__

    def group(ranks: Any = None, *_args: Any, **_kwargs: Any) -> Any:
        return real_group(ranks, backend="fake")

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        quiet = {"use_device_communicator": False, "use_message_queue_broadcaster": False}
        real_init(self, *args, **{**kwargs, **quiet})

    world = inner * parallel.data_parallel_size
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    count = parallel_state._node_count
    try:
        dist.new_group = group
        coordinator.__init__ = init
        parallel_state._node_count = lambda _group: 1
        with set_current_vllm_config(vllm_config):
            parallel_state.init_distributed_environment(world, rank, "env://", 0, "fake")
            parallel_state.initialize_model_parallel(
                parallel.tensor_parallel_size, parallel.pipeline_parallel_size, backend="fake"
            )
            with set_default_torch_dtype(vllm_config.model_config.dtype), _LargeOnMeta():
                model: nn.Module = initialize_model(vllm_config)
            yield model
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state._WORLD = None
        dist.new_group = real_group
        coordinator.__init__ = real_init
        parallel_state._node_count = count
        dist.destroy_process_group()
        # Layers are registered by name in the config, once.
        vllm_config.compilation_config.static_forward_context.clear()


class _LargeOnMeta(TorchFunctionMode):
    """Makes large tensors without data: models also compute on small ones as they are built."""

    _LARGE = 1 << 18

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _device_constructors() and kwargs.get("device") is None:
            made = func(*args, **{**kwargs, "device": "meta"})
            if isinstance(made, Tensor) and made.numel() >= self._LARGE:
                return made
        return func(*args, **kwargs)
