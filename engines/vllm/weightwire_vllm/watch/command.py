"""The command line of ``weightwire watch``."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

import typer

from weightwire.config import select
from weightwire.errors import ConfigError
from weightwire_vllm.pool.engines import PauseMode
from weightwire_vllm.pool.pool import receiver_id_of
from weightwire_vllm.pool.replica import CachePolicy
from weightwire_vllm.watch.loop import Watcher, WatchOptions

__all__ = ["watch"]


def watch(
    session: Annotated[str, typer.Option(help="Session URL, as the engines reach it, too.")],
    engine: Annotated[
        list[str],
        typer.Option(help="URL of a vLLM server, or NAME=URL with its receiver id. Repeatable."),
    ],
    backend: Annotated[
        str, typer.Option(help="The trainer's backend: a name, or a JSON object with options.")
    ] = "filesystem",
    mode: Annotated[
        str, typer.Option(help="Requests in flight: keep (frozen), wait (they end), abort.")
    ] = "keep",
    caches: Annotated[
        str, typer.Option(help="reset: nothing computed with old weights is used; keep: it is.")
    ] = "reset",
    timeout: Annotated[float, typer.Option(help="Seconds for an update.", min=0.1)] = 600.0,
    grace: Annotated[
        float, typer.Option(help="Seconds that SIGTERM leaves to an update.", min=0.0)
    ] = 30.0,
    on_failure: Annotated[
        str,
        typer.Option(
            help="pause: an engine that fails stays paused; restore: it serves its old version "
            "if it holds that wholly."
        ),
    ] = "pause",
    catch_up: Annotated[
        str | None, typer.Option(help="The trainer's catch_up backend, for late engines.")
    ] = None,
    overlap: Annotated[
        bool, typer.Option("--overlap", help="Engines replay a group while the next arrives.")
    ] = False,
    release_buffers: Annotated[
        bool,
        typer.Option(
            "--release-buffers", help="Engines give receive buffers back after each update."
        ),
    ] = False,
    adapter: Annotated[
        str | None,
        typer.Option(
            metavar="ID=FILE",
            help="Update one LoRA adapter, not the model: vLLM's number of it (from 1, in the "
            "order of --lora-modules), and its adapter_config.json.",
        ),
    ] = None,
    api_key_env: Annotated[
        str | None, typer.Option(help="Environment variable with the servers' API key.")
    ] = None,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Take engines from another session.")
    ] = False,
    metrics_port: Annotated[
        int | None, typer.Option(help="Serve Prometheus /metrics here; 0: any.", min=0, max=65535)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Follow a session, and bring its versions to vLLM servers: pause, update, resume.

    Servers and trainer may restart. SIGTERM ends it: an update that runs is finished.
    Exit codes: 0 stopped; 1 an engine can't be driven, or is left paused.
    """
    chosen = _backend(backend, "--backend")
    receiver: dict[str, Any] = {"overlap": overlap, "release_buffers": release_buffers}
    if catch_up is not None:
        receiver["catch_up"] = _backend(catch_up, "--catch-up")
    if adapter is not None:
        receiver |= {"target": "adapter", "adapter": _adapter(adapter)}
    options = WatchOptions(
        session=session,
        engines=_engines(engine),
        backend=chosen,
        mode=cast("PauseMode", _one_of(mode, "--mode", get_args(PauseMode))),
        caches=cast("CachePolicy", _one_of(caches, "--caches", get_args(CachePolicy))),
        timeout=timeout,
        grace=grace,
        on_failure=cast(
            Literal["pause", "restore"], _one_of(on_failure, "--on-failure", ("pause", "restore"))
        ),
        api_key=_api_key(api_key_env),
        take_over=take_over,
        as_json=as_json,
        metrics_port=metrics_port,
        receiver=receiver,
    )
    raise typer.Exit(asyncio.run(_run(options)))


async def _run(options: WatchOptions) -> int:
    watcher = Watcher(options)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, watcher.stop)
    return await watcher.run()


def _backend(text: str, option: str) -> str | dict[str, Any]:
    chosen: Any = text
    if text.lstrip().startswith("{"):
        try:
            chosen = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{option}: no JSON object: {error}") from None
    select(chosen)  # the engines have the same plug-ins, or say so
    return cast("str | dict[str, Any]", chosen)


def _adapter(text: str) -> dict[str, Any]:
    number, equals, name = text.partition("=")
    if not equals or not number.isdecimal():
        raise ConfigError(f"--adapter {text}: write ID=FILE, as 1=adapter/adapter_config.json")
    try:
        config = json.loads(Path(name).read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--adapter {text}: {name} can't be read: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"--adapter {text}: {name} holds no JSON object")
    return {"id": int(number), "config": config}


def _engines(given: list[str]) -> dict[str, str]:
    engines: dict[str, str] = {}
    for text in given:
        before, equals, after = text.partition("=")
        name, url = (before, after) if equals and "/" not in before else (None, text)
        name = name or receiver_id_of(url)
        if name in engines or url in engines.values():
            raise ConfigError(f"--engine {text}: it is given twice")
        engines[name] = url
    return engines


def _one_of(value: str, option: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ConfigError(f"{option} {value}: use one of {', '.join(allowed)}")
    return value


def _api_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise ConfigError(f"--api-key-env {variable}: the variable is not set")
    return key
