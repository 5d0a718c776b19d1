"""A tiny vLLM engine that follows a trainer in its own process; run as one, with URL and backend.

Prints ``equal:`` and the path that the update took once the engine, started on one
checkpoint and sent another, is what an engine that was started on that is: in every
tensor that can be reached from its model.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import weightwire

__all__: list[str] = []

_SECONDS = 280.0
"""The trainer waits while two engines are built, which on a busy machine takes minutes."""

_SMALL: dict[str, Any] = {
    "dtype": "bfloat16",
    # A GPU is shared with other scenarios' processes, whatever they take meanwhile.
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 256 << 20,
}


def main(session: str, backend: dict[str, object]) -> None:
    if len(sys.argv) > 3:
        _train(session, backend)
        return
    # It imports as much as an engine does, and waits for its receiver: meanwhile.
    trainer = subprocess.Popen([sys.executable, "-m", __spec__.name, *sys.argv[1:3], "train"])
    try:
        _follow(session, backend, trainer)
    finally:
        trainer.kill()
        trainer.wait()


def _follow(session: str, backend: dict[str, object], trainer: subprocess.Popen[bytes]) -> None:
    from weightwire_vllm import inprocess
    from weightwire_vllm.compare import comparable_engines, compare, snapshot
    from weightwire_vllm.models import save_checkpoint, tiny_model
    from weightwire_vllm.target import VllmTarget

    with tempfile.TemporaryDirectory() as directory, comparable_engines():
        for name, seed in (("a", 1), ("b", 2)):
            save_checkpoint(tiny_model("qwen3_moe", seed), Path(directory) / name)
        llm = inprocess.build_engine(Path(directory) / "b", **_SMALL)
        cold = inprocess.on_model(llm, snapshot)
        inprocess.stop_engine(llm)
        llm = inprocess.build_engine(Path(directory) / "a", **_SMALL)
        before = compare(inprocess.on_model(llm, snapshot), cold)
        target = VllmTarget(inprocess.on_model(llm, lambda m: m), inprocess.vllm_config(llm))
        with weightwire.open_receiver(
            backend, session=session, target=target, receiver_id="engine", timeout=_SECONDS
        ) as receiver:
            report = receiver.receive()
        code = trainer.wait(_SECONDS)
        after = compare(inprocess.on_model(llm, snapshot), cold)
        inprocess.stop_engine(llm)
    good = code == 0 and not before.equal and after.equal
    sys.stdout.write(f"{'equal' if good else 'different'}: {report.path} {after}\n")


def _train(session: str, backend: dict[str, object]) -> None:
    from weightwire_vllm.models import tiny_model

    with weightwire.open_sender(
        backend,
        session=session,
        source=tiny_model("qwen3_moe", 2),
        verify="full",
        timeout=_SECONDS,
        min_receivers=1,
    ) as sender:
        sender.send(1, wait="applied")


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
