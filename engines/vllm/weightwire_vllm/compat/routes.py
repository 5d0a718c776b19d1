"""What a vLLM API server would serve: its routes in development mode, and its defaults."""

from __future__ import annotations

import contextlib
from typing import Any

__all__ = ["dp_sync_interval", "is_registered", "load_plugins", "routes", "serves_rl_routes"]


def routes() -> list[str]:
    """Paths that ``VLLM_SERVER_DEV_MODE=1`` adds, as vLLM's own functions register them."""
    from fastapi import FastAPI

    app: Any = FastAPI(openapi_url=None)
    with contextlib.suppress(ImportError):
        from vllm.entrypoints.serve import register_vllm_dev_api_routers

        register_vllm_dev_api_routers(app)
    with contextlib.suppress(ImportError):  # one with the others before 0.32
        from vllm.entrypoints.rl.factories import register_rl_api_routers

        register_rl_api_routers(app)
    return sorted(set(_paths(app.routes)))


def _paths(routes: Any) -> list[str]:
    found: list[str] = []
    for route in routes:
        if isinstance(path := getattr(route, "path", None), str):
            found.append(path)
        # Recent FastAPI keeps an included router whole.
        router = getattr(route, "original_router", None) or getattr(route, "router", None)
        found += _paths(getattr(router, "routes", ()))
    return found


def serves_rl_routes() -> bool:
    """Whether a server started in this environment would have them."""
    from vllm import envs

    return bool(envs.VLLM_SERVER_DEV_MODE)


def dp_sync_interval() -> int | None:
    """Steps between the looks at which data-parallel ranks agree to pause; by default."""
    from vllm.config import ParallelConfig

    value = getattr(ParallelConfig, "dp_sync_interval", None)
    if value is None:
        field = getattr(ParallelConfig, "__dataclass_fields__", {}).get("dp_sync_interval")
        value = getattr(field, "default", None)
    value = getattr(value, "default", value)  # pydantic's field
    return value if isinstance(value, int) else None


def load_plugins() -> None:
    """Load general plug-ins as each of vLLM's processes does."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()


def is_registered(name: str) -> bool:
    """Whether ``weight_transfer_config`` may name this backend."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    return name in WeightTransferEngineFactory._registry
