"""A LoRA adapter that a vLLM worker serves, as a weight target: replaced in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from weightwire.errors import TableMismatch
from weightwire.fingerprint import Fingerprint
from weightwire.fingerprinting import Fingerprinter
from weightwire.targets import MappingTarget, WeightTarget
from weightwire_vllm import compat

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor, nn

    from weightwire.table import Region, TensorTable
    from weightwire_vllm.info import AdapterInfo

__all__ = ["AdapterTarget"]


class AdapterTarget(WeightTarget):
    """One adapter of one worker; base weights stay as they are.

    Every rank reads the whole adapter into host memory, as it would from disk; vLLM cuts it.
    Nothing of the engine changes before ``commit``, which puts it in the place of the one
    that was served under its id.

    Args:
        model: the worker's model.
        vllm_config: the worker's config.
        info: the adapter's id, and PEFT's config of it.

    Raises:
        UnsupportedOperation: the engine serves no adapters.
        ConfigError: it serves none with this id.
    """

    def __init__(self, model: nn.Module, vllm_config: Any, info: AdapterInfo) -> None:
        self._adapters = compat.Adapters(model, vllm_config)
        self._info = info
        self._adapters.served(info.id)
        self._fingerprinter = Fingerprinter()
        self._inner: MappingTarget | None = None
        self._arrived: dict[str, Tensor] = {}
        self._replacing = False

    @property
    def column_slices(self) -> int:
        return 1

    def plan(self, table: TensorTable) -> Sequence[Region]:
        """All of the table.

        Raises:
            TableMismatch: it isn't an adapter of just the layers, ranks and sizes that the
                one has that is served.
        """
        served = self._adapters.served(self._info.id)
        sent = {self._adapters.part(name): entry.shape for name, entry in table.named().items()}
        wrong = [
            f"{module!r} {'A' if is_a else 'B'}: {shape or 'nothing'} is sent, "
            f"{served.get((module, is_a)) or 'nothing'} is served"
            for module, is_a in sorted(sent.keys() | served.keys())
            if (shape := sent.get((module, is_a))) != served.get((module, is_a))
        ]
        if wrong:
            raise TableMismatch(
                f"the adapter with id {self._info.id} is another one than is sent: load one like "
                f"the trainer's first; {'; '.join(wrong[:8])} ({len(wrong)} differences)"
            )
        self._arrived = {
            name: torch.empty(entry.shape, dtype=entry.torch_dtype)
            for name, entry in table.named().items()
        }
        # Made of what has the right shapes: a config that vLLM refuses is refused now.
        self._adapters.make(self._info.id, self._copies(), self._info.config)
        self._inner = MappingTarget(self._arrived)
        return self._inner.plan(table)

    def begin(self, version: int) -> None:
        self._replacing = False
        self._planned.begin(version)

    def landing(self, region: Region) -> Tensor | None:
        return self._planned.landing(region)

    @property
    def takes_pieces(self) -> bool:
        return True

    def write(self, group: int, tensors: Mapping[Region, Tensor]) -> None:
        self._planned.write(group, tensors)

    def commit(self) -> None:
        self._planned.commit()
        adapter = self._adapters.make(self._info.id, self._copies(), self._info.config)
        self._replacing = True
        self._adapters.replace(self._info.id, adapter)

    def fingerprint(self, version: int) -> Fingerprint:
        """Of what the kernels read."""
        return self._fingerprinter.of(self._adapters.held(self._info.id), version)

    @property
    def path(self) -> str:
        return f"adapter {self._info.id} replaced in memory"

    def rollback(self, error: BaseException) -> bool:
        return not self._replacing

    def release_buffers(self) -> None:
        self._inner, self._arrived = None, {}

    def _copies(self) -> dict[str, Tensor]:
        # vLLM scales B where it lies.
        return {name: tensor.clone() for name, tensor in self._arrived.items()}

    @property
    def _planned(self) -> MappingTarget:
        assert self._inner is not None  # noqa: S101 - core plans first
        return self._inner
