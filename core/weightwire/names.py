"""Checkpoint names: what is left of a name when training wrappers are stripped."""

from __future__ import annotations

from collections.abc import Iterable

from weightwire.errors import ConfigError

__all__ = ["WRAPPERS", "checkpoint_names", "strip_wrappers"]

WRAPPERS = frozenset({"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module", "module"})
"""Name components that torch's wrappers add: FSDP, ``torch.compile``, activation
checkpointing, ``DataParallel`` and ``DistributedDataParallel``."""


def strip_wrappers(name: str) -> str:
    """``name`` without wrapper components, at any depth."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def checkpoint_names(names: Iterable[str]) -> dict[str, str]:
    """Checkpoint name by original name.

    Raises:
        ConfigError: two names are the same once wrappers are stripped.
    """
    taken: dict[str, str] = {}
    result = {}
    for name in names:
        stripped = strip_wrappers(name)
        if stripped in taken:
            raise ConfigError(
                f"tensors {taken[stripped]!r} and {name!r} are both {stripped!r} without their "
                "wrappers: rename one"
            )
        taken[stripped] = name
        result[name] = stripped
    return result
