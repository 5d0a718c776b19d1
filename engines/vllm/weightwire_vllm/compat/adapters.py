"""LoRA adapters that an engine serves: what they are made of, and how one is replaced.

vLLM loads adapters from disk alone.  What it makes of the files is made here of tensors, by
its own functions, so that the engine can't tell the two apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weightwire.errors import ConfigError, UnsupportedOperation

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

__all__ = ["Adapters"]

Part = tuple[str, bool]
"""A module, and whether its matrix A is meant rather than B."""


class Adapters:
    """A worker's LoRA manager.

    Raises:
        UnsupportedOperation: the engine serves no adapters.
    """

    def __init__(self, model: nn.Module, vllm_config: Any) -> None:
        manager = getattr(model, "lora_manager", None)
        if manager is None:
            raise UnsupportedOperation(
                "target='adapter', and the engine serves none: start it with enable_lora=True "
                "(--enable-lora)"
            )
        self._manager: Any = manager
        self._model = model
        self._config = vllm_config

    def served(self, number: int) -> dict[Part, tuple[int, ...]]:
        """The parts of an adapter that is served, with the shapes that its checkpoint had.

        Raises:
            ConfigError: there is none.
            UnsupportedOperation: it is of a kind whose parts can't be told (experts).
        """
        adapter = self._manager.list_adapters().get(number)
        if adapter is None:
            raise ConfigError(
                f"the engine serves no adapter with id {number}: load one first, which is then "
                "replaced (--lora-modules NAME=PATH, LLM.llm_engine.add_lora)"
            )
        parts: dict[Part, tuple[int, ...]] = {}
        for module, weights in adapter.loras.items():
            names, pairs = [module], [(weights.lora_a, weights.lora_b)]
            if weights.is_packed:
                names = list(self._manager.packed_modules.get(module, ()))
                pairs = list(zip(weights.lora_a, weights.lora_b, strict=True))
            if len(names) != len(pairs) or any(getattr(a, "ndim", 2) != 2 for a, _ in pairs):
                raise UnsupportedOperation(
                    f"adapter {number} has experts ({module!r}): its parts can't be told; load it "
                    "from disk (load_inplace=True)"
                )
            for name, (a, b) in zip(names, pairs, strict=True):
                if a is not None:
                    parts[name, True], parts[name, False] = tuple(a.shape), tuple(b.shape)
        return parts

    def part(self, name: str) -> Part:
        """Which part a tensor of an adapter's checkpoint is.

        Raises:
            ConfigError: none.
        """
        from vllm.lora.utils import parse_fine_tuned_lora_name

        try:
            module, is_a = parse_fine_tuned_lora_name(name, self._mapper)
        except ValueError as error:
            raise ConfigError(
                f"tensor {name!r} is of no adapter: send weightwire.LoraAdapter(model)"
            ) from error
        return module, is_a

    def make(self, number: int, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Any:
        """What vLLM makes of a checkpoint with these tensors, which are its own from here on.

        Args:
            config: PEFT's, as in ``adapter_config.json``.

        Raises:
            ConfigError: vLLM refuses the config.
        """
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        settings = self._manager.lora_config
        try:
            helper = PEFTHelper.from_dict(dict(config))
            helper.validate_legal(settings)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"init_info.adapter.config: {error}") from error
        adapter = LoRAModel.from_lora_tensors(
            number,
            dict(tensors),
            helper,
            device="cpu",
            dtype=settings.lora_dtype,
            model_vocab_size=self._config.model_config.get_vocab_size(),
            weights_mapper=self._mapper,
            skip_prefixes=getattr(self._model, "lora_skip_prefixes", None),
        )
        self._manager._validate_moe_lora_format(adapter)
        return adapter

    def replace(self, number: int, adapter: Any) -> None:
        """Serve this one under that id: the next step computes with it."""
        self._manager.remove_adapter(number)
        self._manager.add_adapter(adapter)
        self._manager.activate_adapter(number)
        if hasattr(self._manager, "_pin_lora_in_cpu_cache"):
            # Evicted, it would be loaded from the path that requests name: an older one.
            self._manager._pin_lora_in_cpu_cache(number)

    def held(self, number: int) -> dict[str, Tensor]:
        """What the kernels read for an adapter, by layer."""
        slot = self._manager.lora_index_to_id.index(number)
        found: dict[str, Tensor] = {}
        for name, module in self._manager.modules.items():
            for matrix in ("lora_a_stacked", "lora_b_stacked"):
                for place, stacked in enumerate(getattr(module, matrix, ())):
                    found[f"{name}.{matrix}.{place}"] = stacked[slot]
        return found

    @property
    def _mapper(self) -> Any:
        mapper = getattr(self._model, "hf_to_vllm_mapper", None)
        return None if mapper is None else mapper.get_rename_mapper()
