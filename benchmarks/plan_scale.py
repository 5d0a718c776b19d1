"""How planning scales: one inference rank of a 753B mixture of experts, on tensors without data.

The trainer has 64 ranks, FSDP with EP=8; the engine is vLLM's DeepSeek-V3 class with
32 ranks, data-parallel attention and EP=32.  The table of a quarter, a half and all of
its 78 layers is planned, each in a process of its own: tracing (vLLM's loader on meta
tensors) and planning (reads, schedule, routes) apart, and what planning adds to
resident memory at its peak.

    python benchmarks/plan_scale.py [--json] [--repeats 3]
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

LAYERS = 78
RANK = 13
CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "torch_dtype": "bfloat16",
    "vocab_size": 154880,
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}


class Peak:
    """Resident memory: what it is now, and the most that a thread has seen since."""

    def __init__(self) -> None:
        self.begin = self.most = self._now()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def growth(self) -> int:
        self._done.set()
        self._thread.join()
        return max(self.most, self._now()) - self.begin

    def _watch(self) -> None:
        while not self._done.wait(0.01):
            self.most = max(self.most, self._now())

    @staticmethod
    def _now() -> int:
        fields = Path("/proc/self/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGESIZE")


def measure(layers: int, repeats: int) -> dict[str, float]:
    """Plan one rank of a model with this many layers."""
    from weightwire.planning import PlanRequest
    from weightwire.routes import Served, route
    from weightwire.topology import parse_inference, parse_trainer
    from weightwire.trace import compile_tape
    from weightwire_vllm import compat
    from weightwire_vllm.planning import model_table
    from weightwire_vllm.verdict import check_table

    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory)
        (model / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
        inference = parse_inference("dp=32,ep=32")
        request = PlanRequest(
            model, parse_trainer("fsdp=64,ep=8"), inference, (RANK,), group_bytes=20 << 30
        )
        config = compat.planning_config(model, tp=1, pp=1, dp=32, expert_parallel=True)
        table = model_table(request, compat.column_slices(config))
        with compat.model_of_rank(config, RANK) as built:
            began = time.perf_counter()
            trace = check_table(built, config, table, None, ranks=32)
            traced = time.perf_counter() - began
    seconds, busy = [], []
    growth = 0
    for turn in range(repeats + 1):  # the first warms numpy up, and is the one whose memory counts
        gc.collect()
        _trim()
        peak = Peak()
        began, busy_before = time.perf_counter(), time.thread_time()
        program = compile_tape(trace.tape, table)
        routes = route(Served(table), program.regions)
        elapsed = time.perf_counter() - began
        used = time.thread_time() - busy_before
        if turn == 0:
            growth = peak.growth()
        else:
            peak.growth()
            seconds.append(elapsed)
            busy.append(used)
    nbytes = int(routes.nbytes.sum())
    needed = sum(int(region_bytes) for region_bytes in _destination_bytes(program, table))
    assert nbytes == needed, "every region is served, once"
    return {
        "layers": layers,
        "tensors": len(table.tensors),
        "shards": sum(len(entry.shards) for entry in table.tensors),
        "views": len(table.views),
        "groups": len({*routes.group.tolist()}),
        "regions": len(program.regions),
        "descriptors": len(routes),
        "nbytes": nbytes,
        "trace_seconds": round(traced, 3),
        "plan_seconds": round(statistics.median(seconds), 3),
        "plan_cpu_seconds": round(statistics.median(busy), 3),
        "plan_growth_mb": round(growth / 1e6, 1),
    }


def _trim() -> None:
    """Give freed memory back, so that what planning takes shows as growth."""
    with contextlib.suppress(AttributeError, OSError):  # glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def _destination_bytes(program, table):  # noqa: ANN001, ANN202
    import math

    for region in program.regions:
        yield math.prod(region.sizes) * table.tensors[region.tensor].torch_dtype.itemsize


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, help="measure one size, in this process")
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if arguments.layers:
        print("RESULT " + json.dumps(measure(arguments.layers, arguments.repeats)))
        return
    results = []
    for layers in (LAYERS // 4, LAYERS // 2, LAYERS):
        command = [sys.executable, __file__, "--layers", str(layers)]
        command += ["--repeats", str(arguments.repeats)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if not lines:
            sys.exit(done.stderr[-3000:])
        results.append(json.loads(lines[0].removeprefix("RESULT ")))
        if not arguments.json:
            print(results[-1], flush=True)
    if arguments.json:
        print(json.dumps(results))
        return
    whole = results[-1]
    # Of processor time: on a busy machine the clock says something else.
    each = [1e6 * part["plan_cpu_seconds"] / part["descriptors"] for part in results]
    for part, cost in zip(results, each, strict=True):
        print(f"{part['layers']:3} layers: {cost:.1f} us of processor time a descriptor")
    assert each[-1] < 1.5 * each[0], "linear in descriptors"
    assert whole["descriptors"] <= 80_000, "one run for each tensor and each owner's shard of it"
    assert whole["plan_seconds"] < 10, "planning under 10 s"
    assert whole["plan_growth_mb"] < 500, "500 MB of resident growth"
    assert whole["trace_seconds"] < 60, "tracing under 60 s"


if __name__ == "__main__":
    main()
