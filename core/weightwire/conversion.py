"""How a ``transformers`` model's layout in memory becomes that of its checkpoints.

The conversion is transformers' own, the one with which ``save_pretrained`` writes:
it is run on tensors without data, once for a layout, and recorded.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from weightwire.names import WRAPPERS
from weightwire.views import View, record_views

__all__ = ["ModuleViews"]

Given = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


class ModuleViews:
    """The checkpoint views of a module; none for one that isn't transformers'.

    Args:
        module: may be wrapped by FSDP, ``DistributedDataParallel``, ``torch.compile``.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._given: Given | None = None
        self._views: tuple[View, ...] = ()

    def of(self, given: Given) -> tuple[View, ...]:
        """The views for these tensors, recorded when they differ from the last ones.

        Raises:
            TraceError: the model's conversion can't be recorded; names the tensor.
        """
        if given != self._given:
            model = _pretrained(self._module)
            self._views = () if model is None else _recorded(model, given)
            self._given = dict(given)
        return self._views


def _pretrained(module: nn.Module) -> Any | None:
    """The transformers model inside a module's wrappers."""
    # Without the import: whoever has such a model has imported it.
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None:
        return None
    inner: Any = module
    while not isinstance(inner, modeling.PreTrainedModel):
        wrapped = [inner._modules[name] for name in sorted(WRAPPERS) if name in inner._modules]
        if len(wrapped) != 1 or wrapped[0] is None:
            return None
        inner = wrapped[0]
    return inner


def _recorded(model: Any, given: Given) -> tuple[View, ...]:
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return ()  # before transformers 5 both layouts were one
    skeleton = _as_declared(model)

    def convert(tensors: dict[str, Tensor]) -> Mapping[str, Tensor]:
        return dict(revert_weight_conversion(skeleton, tensors))

    return record_views(given, convert)


def _as_declared(model: Any) -> Any:
    """The model, or one without data whose classes have their own names.

    ``fully_shard`` puts modules into classes of other names, by which transformers
    doesn't find their conversions.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not any(isinstance(m, fsdp.FSDPModule) for m in model.modules()):
        return model
    base = next(cls for cls in type(model).__mro__ if not issubclass(cls, fsdp.FSDPModule))
    with torch.device("meta"):
        skeleton = base(model.config)
    # What from_pretrained found in the checkpoint, which it keeps for save_pretrained.
    skeleton._weight_conversions = getattr(model, "_weight_conversions", None)
    return skeleton
