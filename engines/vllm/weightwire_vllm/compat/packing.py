"""A switch for CPU packing, which hides weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "set_packing",
]


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
