"""What a replay costs beside the copies that it must make.

A dense bf16 model in a running vLLM is updated from tensors that lie in memory, as they
do once they have arrived: planned once, then replayed.  Beside it, on the same
tensors with the same threads, the copies that no replay can avoid: from where they
arrived into a layer in load-time layout, and from there into the memory that its
kernels know; one where the layer needs no processing.  These are made by two
``_foreach_copy_`` with memory for all layers allocated before.  Every repetition
alternates the two; a round is so many repetitions, and its ratio that of its medians.

    python benchmarks/replay.py [--json] [--rounds 7] [--repeats 9]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with tempfile.TemporaryDirectory() as directory:
        result = measure(
            Path(directory),
            arguments.hidden,
            arguments.layers,
            arguments.rounds,
            arguments.repeats,
        )
    print(
        json.dumps(result) if arguments.json else "\n".join(f"{k}: {v}" for k, v in result.items())
    )


def measure(
    directory: Path, hidden: int, layers: int, rounds: int, repeats: int
) -> dict[str, object]:
    import torch

    from weightwire.sources import WireRules, as_source, resolve
    from weightwire.tables import build_table
    from weightwire.trace import Run
    from weightwire_vllm import inprocess
    from weightwire_vllm.compare import comparable_engines
    from weightwire_vllm.models import save_checkpoint, tiny_model
    from weightwire_vllm.target import VllmTarget

    sizes = {
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 128,
        "head_dim": 64,
        "vocab_size": 32000,
    }
    model = tiny_model("qwen3", 1, **sizes)
    save_checkpoint(model, directory / "a")
    other = tiny_model("qwen3", 2, **sizes)
    with comparable_engines():  # oneDNN would pack, which is no copy
        llm = inprocess.build_engine(directory / "a", dtype="bfloat16")
        held = inprocess.on_model(llm, lambda model: model)
        target = VllmTarget(held, inprocess.vllm_config(llm))
        resolved = resolve(as_source(other), WireRules())
        table = build_table([resolved.spec], 64 << 20)
        regions = target.plan(table)
        arrived = {}
        for region in regions:
            box = tuple(slice(a, a + n) for a, n in zip(region.offsets, region.sizes, strict=True))
            arrived[region] = resolved.tensors[table.tensors[region.tensor].name][box].clone()
        from weightwire.cuts import Cuts

        cuts = Cuts(table)
        groups: dict[int, dict] = {}
        for region, tensor in arrived.items():
            groups.setdefault(cuts.group_of(region), {})[region] = tensor
        plan = target._plan
        live = {name: tensor.data for name, tensor in held.named_parameters()}
        # Where the layers are staged, memory for all of them; elsewhere their own.
        layouts = {
            key: torch.zeros_like(live[key]) if plan.unit_of[key].staged else live[key]
            for key in plan.trace.tape.written
        }
        run = Run(plan.program, layouts.__getitem__)
        run._arrived.update(arrived)
        copied = [
            [run._tensor(ref) for ref in instruction.args[:2]]
            for batch in plan.program.batches.values()
            for instruction in batch
            if instruction.is_copy
        ]
        into, arenas = ([pair[side] for pair in copied] for side in (0, 1))
        staged = [key for key in layouts if plan.unit_of[key].staged]

        def replay() -> None:
            target.begin(1)
            for group in sorted(groups):
                target.write(group, groups[group])
            target.commit()

        def copies() -> None:
            torch._foreach_copy_(into, arenas)
            torch._foreach_copy_([live[key] for key in staged], [layouts[key] for key in staged])

        replay()
        copies()
        medians: dict[str, list[float]] = {"replay": [], "copies": []}
        for _ in range(rounds):
            taken: dict[str, list[float]] = {"replay": [], "copies": []}
            for _ in range(repeats):
                for name, work in (("replay", replay), ("copies", copies)):
                    began = time.perf_counter()
                    work()
                    taken[name].append(time.perf_counter() - began)
            for name, times in taken.items():
                medians[name].append(statistics.median(times))
        for key in staged:
            live[key].zero_()
        replay()
        wrong = [
            name
            for name, tensor in dict(held.named_parameters()).items()
            if name.endswith("o_proj.weight")
            and not torch.equal(tensor.data, other.state_dict()[name])
        ]
        assert not wrong, wrong
        inprocess.stop_engine(llm)
    ratios = [a / b for a, b in zip(medians["replay"], medians["copies"], strict=True)]
    return {
        "nbytes": sum(tensor.nbytes for tensor in arrived.values()),
        "threads": torch.get_num_threads(),
        "replay_seconds": round(statistics.median(medians["replay"]), 4),
        "copies_seconds": round(statistics.median(medians["copies"]), 4),
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "replays": [round(seconds, 4) for seconds in medians["replay"]],
        "copies": [round(seconds, 4) for seconds in medians["copies"]],
    }


if __name__ == "__main__":
    main()
