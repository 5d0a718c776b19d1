"""A whole RL loop with weightwire, to be read in one go.

The trainer below holds a tiny Qwen3 in float32.  ``Actor`` is a vLLM engine in
another process that samples with the policy it was last sent.  Each step:
sample, score, REINFORCE, send.  Run it with ``python examples/rl_loop.py``.
"""

import random
import tempfile
from pathlib import Path

import weightwire
from weightwire_vllm.demo import Actor, Policy
from weightwire_vllm.models import save_checkpoint, tiny_model

STEPS, BATCH = 12, 64


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        session = f"file://{directory}/session"

        # What vLLM starts from: any Hugging Face checkpoint.
        checkpoint = save_checkpoint(tiny_model("qwen3", seed=0), Path(directory) / "initial")
        policy = Policy("qwen3", seed=0)

        with (
            Actor(checkpoint, Path(directory), session=session, backend="filesystem") as actor,
            weightwire.open_sender(
                {"backend": "filesystem", "checkpoint_files": str(checkpoint), "keep": 2},
                session=session,
                source=policy.model,
                wire_dtype="bfloat16",
            ) as sender,
        ):
            actor.ready()
            for step in range(1, STEPS + 1):
                prompts = [[random.randrange(2, 320) for _ in range(4)] for _ in range(BATCH)]
                completions = actor.generate(prompts, max_tokens=12, seed=step)
                reward = policy.step(prompts, completions)  # one REINFORCE update

                actor.update(step)  # vLLM pauses and waits for the version ...
                report = sender.send(step)  # ... which is published here ...
                paused = actor.answer()["paused_seconds"]  # ... and generates again.
                print(
                    f"step {step:2d}  reward {reward:.3f}  sent {report.nbytes / 1e6:.2f} MB "
                    f"in {report.seconds:.3f} s  vLLM paused {paused:.3f} s"
                )


if __name__ == "__main__":
    main()
