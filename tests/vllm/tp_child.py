"""One engine on two workers through updates and refusals; prints its log-probabilities as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import weightwire
from weightwire_vllm import inprocess
from weightwire_vllm.models import CheckpointSource, save_checkpoint, tiny_model

PROMPTS = [[5, 6, 7, 9], list(range(2, 30))]


def main(directory: Path) -> None:
    models = {which: tiny_model("qwen3-tied", seed) for which, seed in (("A", 1), ("B", 2))}
    models["other"] = tiny_model("qwen3-tied", 3, num_attention_heads=8)
    session = f"file://{directory / 'run'}"
    llm = inprocess.build_engine(
        save_checkpoint(models["A"], directory / "A"), dtype="bfloat16", tensor_parallel_size=2
    )
    steps = [["A", "cold", inprocess.token_logprobs(llm, PROMPTS)]]
    inprocess.attach(llm, session=session, backend="filesystem", receiver_id="r", timeout=30)
    for version, which in enumerate(("B", "other", "other", "B", "A")):
        with weightwire.open_sender(
            "filesystem", session=session, source=CheckpointSource(models[which])
        ) as sender:
            sender.send(version=version)
        outcome = "applied"
        try:
            inprocess.update(llm)
        except RuntimeError as error:  # vLLM's executor raises this for whatever a worker raised
            outcome = str(error)
        steps.append([which, outcome, inprocess.token_logprobs(llm, PROMPTS)])
    inprocess.stop_engine(llm)
    print("STEPS " + json.dumps(steps))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
