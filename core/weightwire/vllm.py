"""vLLM, from the trainer's side: pools of engines, and the trainer's half of vLLM's own API.

``Pool``, ``AsyncPool``, ``PoolReport``, ``ReplicaReport`` and ``UpdateFailed`` drive engines
(``weightwire_vllm.pool``); ``TrainerInfo``, ``WeightWireTrainer``, ``from_vllm`` and ``to_vllm``
are for frameworks that drive vLLM's weight transfer API themselves.
"""

from __future__ import annotations

import importlib
from typing import Any

from weightwire.errors import BackendUnavailable

__all__ = [  # noqa: F822 - looked up when they are asked for: core imports no engine
    "AsyncPool",
    "Pool",
    "PoolReport",
    "ReplicaReport",
    "TrainerInfo",
    "UpdateFailed",
    "WeightWireTrainer",
    "from_vllm",
    "to_vllm",
]

_WHERE = {
    "AsyncPool": "weightwire_vllm.pool",
    "Pool": "weightwire_vllm.pool",
    "PoolReport": "weightwire_vllm.pool",
    "ReplicaReport": "weightwire_vllm.pool",
    "UpdateFailed": "weightwire_vllm.pool",
    "TrainerInfo": "weightwire_vllm.trainer",
    "WeightWireTrainer": "weightwire_vllm.trainer",
    "from_vllm": "weightwire_vllm.sources",
    "to_vllm": "weightwire_vllm.sources",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_WHERE[name]), name)
    except ImportError as error:
        raise BackendUnavailable(
            f"weightwire.vllm.{name} needs {error.name or error}: pip install 'weightwire[vllm]'"
            + (" and vLLM" if _WHERE[name] != "weightwire_vllm.pool" else "")
        ) from error
