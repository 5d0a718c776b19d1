"""What runs in every worker of an engine that has several: its weights can be seen and compared."""

from __future__ import annotations

from typing import Any

from weightwire_vllm import compat
from weightwire_vllm.compare import snapshot

# Workers import this before they build their model; packed weights can't be read back.
compat.set_packing(enabled=False)


class Watched:
    """An engine's ``worker_extension_cls``."""

    vllm_config: Any
    get_model: Any

    def digest(self) -> str:
        """Every tensor that can be reached from this worker's model."""
        return snapshot(self.get_model()).encode().decode()

    def break_one(self, data_parallel_index: str = "0") -> None:
        """Make rank 0 fail once, in the middle of its next update."""
        parallel = self.vllm_config.parallel_config
        if parallel.rank or parallel.data_parallel_index != int(data_parallel_index):
            return
        method = self.get_model().get_submodule("model.layers.1.self_attn.o_proj").quant_method

        def fails(_layer: Any) -> None:
            del method.process_weights_after_loading
            raise RuntimeError("no memory for packing")

        method.process_weights_after_loading = fails
