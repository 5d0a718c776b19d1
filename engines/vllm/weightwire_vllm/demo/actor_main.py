"""The engine process that ``Actor`` drives: one JSON command a line, one reply a line."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from weightwire import Report, VersionRecord, hookimpl
from weightwire.plugins import registry
from weightwire.session.records import ErrorInfo
from weightwire_vllm import compare, inprocess

__all__ = ["main"]


class _Engine:
    """The commands; each takes the line's arguments and returns the reply."""

    def __init__(self) -> None:
        self._llm: Any = None
        self._when_applied: Callable[[Report], None] = lambda _: None
        self._comparable = contextlib.ExitStack()

    @hookimpl
    def weightwire_applied(self, record: VersionRecord) -> None:
        if record.report is not None:
            self._when_applied(record.report)

    def open(
        self, checkpoint: str, session: str | None, backend: Any, receiver_id: str
    ) -> dict[str, Any]:
        registry().register(self, "demo-engine")
        # For the process's life: each update processes weights as the start did.
        self._comparable.enter_context(compare.comparable_engines())
        self._llm = inprocess.build_engine(Path(checkpoint))
        if session is not None:
            inprocess.attach(
                self._llm, session=session, backend=backend, receiver_id=receiver_id, timeout=120
            )
        return {}

    def generate(self, prompts: list[list[int]], max_tokens: int, seed: int) -> dict[str, Any]:
        from vllm import SamplingParams

        parameters = [
            SamplingParams(
                max_tokens=max_tokens,
                temperature=1.0,
                seed=seed * len(prompts) + i,
                ignore_eos=True,
                detokenize=False,
            )
            for i in range(len(prompts))
        ]
        outputs = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], parameters, use_tqdm=False
        )
        return {"tokens": [list(output.outputs[0].token_ids) for output in outputs]}

    def score(self, sequences: list[list[int]]) -> dict[str, Any]:
        return {"logprobs": inprocess.token_logprobs(self._llm, sequences)}

    def update(self, version: int) -> dict[str, Any]:
        applied: list[Report] = []
        self._when_applied = applied.append
        began = time.perf_counter()
        inprocess.pause(self._llm)
        inprocess.update(self._llm, version=version)
        inprocess.resume(self._llm)  # not after a failure: then the engine stays out of service
        paused = time.perf_counter() - began
        if not applied:
            raise RuntimeError(f"no version was applied when {version} was asked for")
        return {"paused_seconds": paused, "report": applied[-1].to_dict()}

    def snapshot(self) -> dict[str, Any]:
        found = inprocess.on_model(self._llm, compare.snapshot)
        result: dict[str, Any] = msgspec.to_builtins(found)
        return result

    def flip_bit(self) -> dict[str, Any]:
        return {"tensor": str(inprocess.on_model(self._llm, compare.flip_bit))}


def main() -> None:
    """Serve commands until standard input ends."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever prints to standard output doesn't reach the reply channel
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    engine = _Engine()
    for line in sys.stdin:
        arguments = json.loads(line)
        command: Callable[..., dict[str, Any]] = getattr(engine, arguments.pop("command"))
        try:
            reply = command(**arguments)
        except Exception as error:
            logging.getLogger("weightwire.demo").exception("command failed")
            info = ErrorInfo.of(error)
            reply = {"error": info.type, "message": info.message}
        replies.write(json.dumps(reply) + "\n")
    # Interpreter shutdown would run vLLM's and torch's destructors; nothing of ours is owed.
    replies.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
