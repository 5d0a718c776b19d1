"""A vLLM engine in this process: build it, attach it, update it, score tokens.

With ``VLLM_ENABLE_V1_MULTIPROCESSING=0`` and one rank the worker lives in the
calling process: functions reach the model through ``llm.apply_model`` as they
are, nothing is serialised, and no insecure-serialisation switch is needed.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from weightwire.errors import ConfigError
from weightwire_vllm import compat

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import nn

__all__ = [
    "attach",
    "build_engine",
    "detach",
    "on_model",
    "stop_engine",
    "token_logprobs",
    "update",
    "vllm_config",
]


def build_engine(checkpoint: Path, *, max_model_len: int = 128, **options: Any) -> Any:
    """Start an in-process ``LLM`` that takes token ids and needs no tokenizer.

    Sets ``VLLM_ENABLE_V1_MULTIPROCESSING=0`` and, unless they are set, one GiB of
    KV cache for CPU engines and Hugging Face's offline mode, for this process.

    Args:
        checkpoint: a Hugging Face directory.
        max_model_len: in tokens.
        options: further arguments of ``LLM``.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from vllm import LLM

    # Editable installs and plain source trees alike: don't depend on the entry point.
    from weightwire_vllm.plugin import register

    register()
    return LLM(
        model=str(checkpoint),
        skip_tokenizer_init=True,
        max_model_len=max_model_len,
        **{
            "enforce_eager": True,
            "weight_transfer_config": {"backend": compat.ENGINE_NAME},
            **options,
        },
    )


def stop_engine(llm: Any) -> None:
    """Stop an in-process engine, so that this process can build another.

    Dropping the last reference does the same, but anything that still holds
    the model (a traceback is enough) would leave its process groups behind,
    and a mixture of experts can't start on those of a dense model.
    """
    llm.llm_engine.engine_core.shutdown()


def on_model(llm: Any, function: Callable[[nn.Module], Any]) -> Any:
    """Run ``function`` on the engine's model and return its result."""
    results = llm.apply_model(function)
    if len(results) != 1:
        raise ConfigError(f"the engine has {len(results)} ranks: in-process engines have one")
    return results[0]


def vllm_config(llm: Any) -> Any:
    """The engine's config, as ``VllmTarget`` wants it."""
    return llm.llm_engine.vllm_config


def attach(
    llm: Any,
    *,
    session: str,
    backend: str | Mapping[str, Any],
    receiver_id: str,
    timeout: float | None = None,
) -> None:
    """Open the engine's receiver."""
    llm.init_weight_transfer_engine(
        {
            "init_info": {
                "session": session,
                "backend": backend if isinstance(backend, str) else dict(backend),
                "receiver_id": receiver_id,
                "timeout": timeout,
            }
        }
    )


def detach(llm: Any) -> None:
    """Close the engine's receiver; it keeps its weights."""
    compat.leave_session(llm)


def update(llm: Any, *, version: int | None = None, timeout: float | None = None) -> None:
    """Bring the engine to the newest offer, and drop what it cached of the old one.

    Not while ``generate`` runs on another thread: an in-process engine has no
    pause of its own.

    Args:
        version: expected version, or None for the newest.
        timeout: seconds.
    """
    llm.start_weight_update()
    llm.update_weights({"update_info": {"version": version, "timeout": timeout}})
    compat.close_session(llm, version)
    llm.reset_prefix_cache()


def token_logprobs(llm: Any, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
    """Log-probability of each prompt's tokens after its first, under the engine's policy."""
    from vllm import SamplingParams

    parameters = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate(
        [{"prompt_token_ids": list(tokens)} for tokens in prompts], parameters, use_tqdm=False
    )
    return [
        [
            float(step[token].logprob)
            for token, step in zip(tokens[1:], output.prompt_logprobs[1:], strict=True)
        ]
        for tokens, output in zip(prompts, outputs, strict=True)
    ]


def pause(llm: Any) -> None:
    """Stop generating; requests in flight are kept.  Caches are cleared once they are stale."""
    llm.llm_engine.engine_core.engine_core.pause_scheduler(mode="keep", clear_cache=False)


def resume(llm: Any) -> None:
    """Generate again, after ``pause``."""
    llm.llm_engine.engine_core.engine_core.resume_scheduler()
