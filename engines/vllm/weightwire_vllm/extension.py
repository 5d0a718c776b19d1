"""A worker extension, for engines that are started without ``weight_transfer_config``.

``--worker-extension-cls weightwire_vllm.extension.WeightWireExtension`` adds to each worker
what ``collective_rpc`` (of ``LLM`` and ``AsyncLLM``, and the route of that name) can call::

    weightwire_attach(info)     open the receivers
    weightwire_update(info)     begin, fetch and commit, in one call
    weightwire_version()        what this worker holds
    weightwire_detach()         leave the session

Arguments are those of ``init_info`` and ``update_info``, as mappings or as JSON: the HTTP
route passes strings only.  Pause the engine before ``weightwire_update``, and reset its
prefix cache after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from weightwire.errors import ConfigError

if TYPE_CHECKING:
    from weightwire_vllm.engine import WeightWireEngine

__all__ = ["WeightWireExtension"]


class WeightWireExtension:
    """Mixed into vLLM's worker class by vLLM."""

    vllm_config: Any
    device: Any
    get_model: Any
    _weightwire: WeightWireEngine | None = None

    def weightwire_attach(self, info: str | Mapping[str, Any]) -> None:
        """Open this worker's receiver.

        Raises:
            WeightWireError: on the last worker; a wrong field is named.
        """
        engine = self._weightwire
        if engine is None:
            from weightwire_vllm.engine import WeightWireEngine

            engine = WeightWireEngine(None, self.vllm_config, self.device, self.get_model())
            self._weightwire = engine
        engine.init_transfer_engine(engine.parse_init_info(_mapping("init_info", info)))

    def weightwire_update(self, info: str | Mapping[str, Any] = "{}") -> None:
        """Take the newest version, and put it in place.

        Raises:
            WeightWireError: on the last worker; the message says what the engine holds.
        """
        engine = self._weightwire
        if engine is None:
            raise ConfigError("no session: call weightwire_attach first")
        # The other workers of a failed update raise nothing: they learn of it here.
        if engine.fetch(_mapping("update_info", info)):
            engine.finish_weight_update()

    def weightwire_version(self) -> int | None:
        """Version that this worker wholly holds, or None."""
        return None if self._weightwire is None else self._weightwire.version

    def weightwire_detach(self) -> None:
        """Leave the session; the engine keeps its weights.  Idempotent."""
        if self._weightwire is not None:
            self._weightwire.shutdown()


def _mapping(name: str, info: str | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(info, Mapping):
        return dict(info)
    try:
        return msgspec.json.decode(info, type=dict[str, Any])
    except (msgspec.DecodeError, TypeError) as error:
        raise ConfigError(f"{name} is no JSON object: {error}") from None
