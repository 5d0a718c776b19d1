"""One engine on two workers through updates and refusals; prints what it is after each as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import weightwire
from weightwire_vllm import inprocess
from weightwire_vllm.families import family_model
from weightwire_vllm.models import save_checkpoint, tiny_model

PROMPTS = [[5, 6, 7, 9], list(range(2, 30))]


def main(directory: Path, kind: str, cold_b: bool) -> None:
    models = {which: family_model(kind, seed) for which, seed in (("A", 1), ("B", 2))}
    models["other"] = tiny_model("qwen3", 3, num_attention_heads=8)
    session = f"file://{directory / 'run'}"
    paths = {which: save_checkpoint(models[which], directory / which) for which in "AB"}
    steps = []
    if cold_b:
        llm = build(paths["B"])
        steps.append(["cold B", "cold", state(llm)])
        inprocess.stop_engine(llm)
    llm = build(paths["A"])
    steps.append(["cold A", "cold", state(llm)])
    inprocess.attach(llm, session=session, backend="filesystem", receiver_id="r", timeout=60)
    for version, which in enumerate(("B", "other", "other", "B", "A")):
        with weightwire.open_sender("filesystem", session=session, source=models[which]) as sender:
            sender.send(version=version)
        outcome = "applied"
        try:
            inprocess.update(llm)
        except RuntimeError as error:  # vLLM's executor raises this for whatever a worker raised
            outcome = str(error)
        steps.append([which, outcome, state(llm)])
    inprocess.stop_engine(llm)
    print("STEPS " + json.dumps(steps))


def build(path: Path):
    return inprocess.build_engine(path, dtype="bfloat16", tensor_parallel_size=2)


def state(llm):
    """Log-probabilities, and each worker's digest of every parameter and buffer."""
    return [
        inprocess.token_logprobs(llm, PROMPTS),
        llm.collective_rpc("compute_weight_checksums"),
    ]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "cold")
