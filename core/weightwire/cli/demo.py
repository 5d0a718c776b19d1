"""``weightwire demo``: a REINFORCE loop that feeds a running vLLM."""

from __future__ import annotations

from typing import Annotated

import typer

from weightwire.config import select
from weightwire.errors import BackendUnavailable, ConfigError

__all__ = ["demo"]

_INSTALL = "install vLLM and weightwire[vllm] (`make setup` does both for CPU)"


def demo(
    backend: Annotated[str, typer.Option(help="Backend that moves the weights.")] = "filesystem",
    model: Annotated[str, typer.Option(help="qwen3 or qwen3_moe.")] = "qwen3",
    steps: Annotated[int, typer.Option(help="Optimizer steps, each sent.", min=1)] = 12,
    seed: Annotated[int, typer.Option(help="Seed of weights, sampling and data.")] = 0,
    freeze: Annotated[bool, typer.Option("--freeze", help="Train, but never sync.")] = False,
    corrupt: Annotated[
        bool, typer.Option("--corrupt", help="Flip one bit before the final comparison.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Train a tiny policy whose samples come from vLLM, syncing the weights after each step."""
    try:
        from weightwire_vllm.demo import DemoOptions, run_demo
    except ImportError as error:
        raise BackendUnavailable(f"the demo needs {error.name}: {_INSTALL}") from error
    if model not in ("qwen3", "qwen3_moe"):
        raise ConfigError(f"model {model!r}: the demo has qwen3 and qwen3_moe")
    select(backend)  # before an engine is started for nothing
    options = DemoOptions(
        backend=backend, model=model, steps=steps, seed=seed, freeze=freeze, corrupt=corrupt
    )
    raise typer.Exit(run_demo(options, as_json=as_json))
