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


def main(directory: Path, kind: str, cold_b: bool, expert_parallel: bool) -> None:
    models = {which: family_model(kind, seed) for which, seed in (("A", 1), ("B", 2))}
    models["other"] = tiny_model("qwen3", 3, num_attention_heads=8)
    session = f"file://{directory / 'run'}"
    paths = {which: save_checkpoint(models[which], directory / which) for which in "AB"}
    steps = []
    if cold_b:
        llm = build(paths["B"], expert_parallel)
        steps.append(["cold B", "cold", state(llm, expert_parallel)])
        inprocess.stop_engine(llm)
    llm = build(paths["A"], expert_parallel)
    steps.append(["cold A", "cold", state(llm, expert_parallel)])
    inprocess.attach(llm, session=session, backend="filesystem", receiver_id="r", timeout=60)
    for version, which in enumerate(("B", "other", "other", "B", "A", "broken", "B")):
        if which == "broken":
            llm.collective_rpc("break_one")
        source = models["B" if which == "broken" else which]
        with weightwire.open_sender("filesystem", session=session, source=source) as sender:
            sender.send(version=version)
        outcome = "applied"
        try:
            inprocess.update(llm)
        except RuntimeError as error:  # vLLM's executor raises this for whatever a worker raised
            outcome = str(error)
        steps.append([which, outcome, state(llm, expert_parallel)])
    inprocess.stop_engine(llm)
    print("STEPS " + json.dumps(steps))


def build(path: Path, expert_parallel: bool):
    return inprocess.build_engine(
        path,
        dtype="bfloat16",
        tensor_parallel_size=2,
        enable_expert_parallel=expert_parallel,
        worker_extension_cls="watched_worker.Watched",
    )


def state(llm, expert_parallel):
    """Log-probabilities, and what each worker holds."""
    return [
        # With expert parallelism vLLM's CPU engine starts and can't generate.
        [] if expert_parallel else inprocess.token_logprobs(llm, PROMPTS),
        llm.collective_rpc("digest"),
    ]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], "cold" in sys.argv[3], "ep" in sys.argv[3])
