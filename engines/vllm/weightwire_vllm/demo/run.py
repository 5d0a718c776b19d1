"""The loop: sample with vLLM, step, send, compare; and at the end, a fresh engine beside it."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers
from rich.console import Console
from rich.table import Table

import weightwire
from weightwire import Report
from weightwire.sources import WireRules, as_source, resolve
from weightwire_vllm import compare
from weightwire_vllm.demo.actor import Actor
from weightwire_vllm.demo.policy import Policy
from weightwire_vllm.models import save_checkpoint

__all__ = ["DemoOptions", "run_demo"]

WIRE_DTYPE = "bfloat16"
BATCH, PROMPT_TOKENS, COMPLETION_TOKENS = 64, 4, 12
MIN_RISE = 0.2
_SENDER_PHASES = ("offer", "ready", "stage", "announce")
_RECEIVER_PHASES = ("wait", "fetch", "replay", "finalize", "commit")


@dataclass(frozen=True)
class DemoOptions:
    """See ``weightwire demo --help``."""

    backend: str = "filesystem"
    model: str = "qwen3"
    steps: int = 12
    seed: int = 0
    freeze: bool = False
    corrupt: bool = False


@dataclass
class Step:
    """One optimizer step and the sync after it.

    Attributes:
        reward: mean reward of the samples that the step was taken on, 0 to 1.
        seconds: from the call of ``send`` until the engine generates again.
        paused_seconds: how long the engine was paused.
        phases: the sender's ``offer`` to ``announce`` and the receiver's ``wait`` to
            ``commit``; ``verify`` of both.
        mismatch_before, mismatch_after: mean absolute difference between the trainer's
            new log-probabilities and the engine's, before and after the sync.
    """

    version: int
    reward: float
    nbytes: int = 0
    seconds: float = 0.0
    paused_seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    mismatch_before: float = 0.0
    mismatch_after: float = 0.0


def run_demo(options: DemoOptions, *, as_json: bool = False) -> int:
    """Run the demo; returns its exit code: 0 if the policy improved and the weights are equal."""
    console = Console(stderr=as_json, highlight=False, soft_wrap=True)
    with tempfile.TemporaryDirectory(prefix="weightwire-demo-") as directory:
        outcome = _run(options, Path(directory), console)
    if as_json:
        print(json.dumps(outcome))
    return _verdict(options, outcome, console)


def _run(options: DemoOptions, workdir: Path, console: Console) -> dict[str, Any]:
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(options.seed)
    policy = Policy(options.model, options.seed)
    source = as_source(policy.model)
    initial = save_checkpoint(_as_sent(policy), workdir / "initial")
    session = f"file://{workdir / 'session'}"
    backend: dict[str, Any] = {"backend": options.backend}
    if options.backend == "filesystem":
        backend["checkpoint_files"] = str(initial)
    steps: list[Step] = []
    with contextlib.ExitStack() as stack:
        with console.status(f"starting vLLM with a random {options.model}"):
            actor = stack.enter_context(
                Actor(initial, workdir, session=session, backend=options.backend)
            )
            actor.ready()
        sender = stack.enter_context(
            weightwire.open_sender(
                backend,
                session=session,
                source=source,
                wire_dtype=WIRE_DTYPE,
                timeout=120,
            )
        )
        console.print(f"[dim]session {session}, which `weightwire inspect` shows meanwhile[/]")
        random_ids = random.Random(options.seed)  # noqa: S311 - prompts, not secrets
        for number in range(1, options.steps + 1):
            prompts = [
                [random_ids.randrange(2, 320) for _ in range(PROMPT_TOKENS)] for _ in range(BATCH)
            ]
            step = _step(options, policy, actor, sender, number, prompts)
            steps.append(step)
            _print_step(console, step, options)
        last = initial if options.freeze else _last_version(policy, options, workdir)
        if options.corrupt:
            console.print(f"flipped one bit of {actor.flip_bit()} in the running engine")
        running = msgspec.convert(actor.snapshot(), compare.Snapshot)
        table_bytes = sum(
            entry.nbytes for entry in resolve(source, WireRules(WIRE_DTYPE)).spec.entries
        )
        actor.close()
        with console.status("loading the last version in a fresh engine"):
            fresh_actor = stack.enter_context(Actor(last, workdir, name="fresh"))
            fresh_actor.ready()
        fresh = msgspec.convert(fresh_actor.snapshot(), compare.Snapshot)
    difference = compare.compare(running, fresh)
    for path in (*difference.differing, *difference.missing, *difference.retied)[:5]:
        console.print(f"differs: {path}", style="red", markup=False)
    return {
        "backend": options.backend,
        "model": options.model,
        "steps": [asdict(step) for step in steps],
        "final_equal": difference.equal and difference.compared_bytes >= table_bytes,
        "compared_tensors": difference.compared_tensors,
        "compared_bytes": difference.compared_bytes,
    }


def _step(
    options: DemoOptions,
    policy: Policy,
    actor: Actor,
    sender: weightwire.WeightSender,
    version: int,
    prompts: list[list[int]],
) -> Step:
    completions = actor.generate(
        prompts, max_tokens=COMPLETION_TOKENS, seed=options.seed * 1_000_003 + version
    )
    step = Step(version, reward=policy.step(prompts, completions))
    sequences = [[*p, *c] for p, c in zip(prompts, completions, strict=True)]
    with torch.no_grad():
        ours = policy.logprobs(prompts, completions)
    step.mismatch_before = _mismatch(ours, actor.score(sequences))
    if options.freeze:
        step.mismatch_after = step.mismatch_before
        return step
    began = time.perf_counter()
    actor.update(version)  # a backend may need the receiver there while it sends
    sent = sender.send(version)
    answer = actor.answer()
    step.seconds = time.perf_counter() - began
    step.paused_seconds = answer["paused_seconds"]
    step.nbytes = sent.nbytes
    step.phases = _phases(sent, answer["report"]["phases"])
    step.mismatch_after = _mismatch(ours, actor.score(sequences))
    return step


def _as_sent(policy: Policy) -> Any:
    """A copy of the policy's model in the wire dtype."""
    return copy.deepcopy(policy.model).to(getattr(torch, WIRE_DTYPE))


def _last_version(policy: Policy, options: DemoOptions, workdir: Path) -> Path:
    """A checkpoint of the last version: the backend's own directory where it keeps one."""
    if options.backend == "filesystem":
        versions = workdir / "session" / "versions"
        return max(path for path in versions.iterdir() if not path.name.startswith("."))
    return save_checkpoint(_as_sent(policy), workdir / "last")


def _mismatch(ours: torch.Tensor, theirs: list[list[float]]) -> float:
    length = ours.shape[1]
    engine = torch.tensor([row[-length:] for row in theirs], dtype=torch.float32)
    return float((ours - engine).abs().mean())


def _phases(sent: Report, received: dict[str, float]) -> dict[str, float]:
    phases = {name: sent.phases.get(name, 0.0) for name in _SENDER_PHASES}
    phases |= {name: received.get(name, 0.0) for name in _RECEIVER_PHASES}
    phases["verify"] = sent.phases.get("verify", 0.0) + received.get("verify", 0.0)
    return phases


def _print_step(console: Console, step: Step, options: DemoOptions) -> None:
    console.print(
        f"step {step.version:3d}  reward [bold]{step.reward:.3f}[/]  "
        + (
            "not synced"
            if options.freeze
            else f"{step.nbytes / 1e6:.2f} MB in {step.seconds:.3f} s "
            f"({step.nbytes / step.seconds / 1e9:.3f} GB/s, paused {step.paused_seconds:.3f} s)"
        )
        + f"  mismatch {step.mismatch_before:.4f} -> [bold]{step.mismatch_after:.4f}[/]"
    )
    if step.phases:
        shown = "  ".join(f"{name} {1e3 * s:.1f}" for name, s in step.phases.items() if s > 5e-5)
        console.print(f"          [dim]ms: {shown}[/]")


def _verdict(options: DemoOptions, outcome: dict[str, Any], console: Console) -> int:
    rewards = [step["reward"] for step in outcome["steps"]]
    first, last = statistics.mean(rewards[:3]), statistics.mean(rewards[-3:])
    judged = options.steps >= 6
    improved = last - first >= MIN_RISE or not judged
    table = Table(show_header=False, box=None)
    table.add_row(
        "reward", f"{first:.3f} -> {last:.3f}" + ("" if judged else " (too few steps to judge)")
    )
    table.add_row(
        "running engine equals a fresh one",
        f"{'yes' if outcome['final_equal'] else 'NO'} ({outcome['compared_tensors']} tensors, "
        f"{outcome['compared_bytes']:,} bytes)",
    )
    console.print(table)
    if not improved:
        console.print(
            f"[red]reward rose by {last - first:.3f}, less than {MIN_RISE}[/]"
            + (": the engine was frozen" if options.freeze else "")
        )
    return 0 if improved and outcome["final_equal"] else 1
