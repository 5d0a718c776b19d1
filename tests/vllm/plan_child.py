"""A running engine's plans, for comparison: each worker's, for the table of a topology."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from data_parallel import leave_together

from weightwire.planning import PlanRequest, rank_plan
from weightwire.routes import Served
from weightwire.topology import parse_inference, parse_trainer
from weightwire_vllm import inprocess
from weightwire_vllm.planning import model_table


class Probe:
    """Runs in every worker of the engine."""

    weight_transfer_engine: Any

    def planned(self, model: str, trainer: str, group_bytes: int) -> str:
        request = PlanRequest(
            Path(model), parse_trainer(trainer), parse_inference(""), (), group_bytes=group_bytes
        )
        target = self.weight_transfer_engine._target
        table = model_table(request, target.column_slices)
        regions = target.plan(table)
        batches = target._plan.program.batches
        replayed = {group: len(batch) for group, batch in batches.items()}
        plan = rank_plan(0, Served(table), regions, replayed)
        return json.dumps(
            [
                plan.nbytes,
                plan.descriptors,
                plan.replayed,
                {str(o): n for o, n in plan.owners.items()},
            ]
        )


def main(directory: str, trainer: str, group_bytes: int, options: dict[str, Any]) -> None:
    llm = inprocess.build_engine(
        Path(directory), dtype="bfloat16", worker_extension_cls="plan_child.Probe", **options
    )
    plans = llm.collective_rpc("planned", args=(directory, trainer, group_bytes))
    print("PLANS " + json.dumps([json.loads(plan) for plan in plans]), flush=True)
    if "VLLM_DP_RANK" in os.environ:
        leave_together(Path(sys.argv[5]), "planned")
    inprocess.stop_engine(llm)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4]))
