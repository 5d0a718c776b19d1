"""The entry point of the group ``vllm.general_plugins``."""

from __future__ import annotations

from weightwire_vllm import compat

__all__ = ["register"]


def register() -> None:
    """Make ``weight_transfer_config={"backend": "weightwire"}`` known to vLLM, and guard its cores.

    vLLM calls it in each of its processes, some of them more than once.
    """
    compat.register_engine("weightwire_vllm.engine", "WeightWireEngine")
    compat.guard_engine_cores()
