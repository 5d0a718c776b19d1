"""vLLM as a target of weightwire, and as a host of its plug-in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightwire_vllm.target import VllmTarget

__all__ = ["VllmTarget"]


def __getattr__(name: str) -> Any:
    # vLLM loads the plug-in in every one of its processes; torch-heavy modules
    # wait until they are used.
    if name == "VllmTarget":
        from weightwire_vllm.target import VllmTarget

        return VllmTarget
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
