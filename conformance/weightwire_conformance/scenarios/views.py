"""Trainers whose tensors aren't those of their checkpoints: experts fused, sent as they lie."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

from weightwire_conformance.rig import Fleet
from weightwire_conformance.rig.placements import PRELOAD
from weightwire_conformance.scenario import scenario

__all__: list[str] = []

_ENGINE_SECONDS = 300.0


@scenario(
    imports=PRELOAD,
    cases={
        "one-trainer-rank": {"trainers": 1, "placement": None},
        "experts-over-three-ranks": {"trainers": 3, "placement": "rows"},
        "experts-cut-over-two-ranks": {"trainers": 2, "placement": "columns"},
    },
)
def fused_experts_arrive_one_by_one(fleet: Fleet, trainers: int, placement: str | None) -> None:
    """The trainer's own conversion, recorded: each checkpoint tensor arrives, byte for byte."""
    sender = fleet.sender("fused", ranks=trainers, placement=placement, group_bytes=512)
    replica = fleet.receiver(model="unfused")
    for version in (1, 2):
        fleet.exchange(sender, version, replica)


@scenario(imports=PRELOAD)
def fused_experts_reach_every_rank_of_a_replica(fleet: Fleet) -> None:
    sender = fleet.sender("fused", group_bytes=512)
    fleet.exchange(sender, 1, fleet.receiver(model="unfused", ranks=2))


if importlib.util.find_spec("vllm") is not None:

    @scenario(long=True)
    def a_vllm_engine_follows_by_its_traced_loader(fleet: Fleet) -> None:
        """A tiny mixture of experts; the updated engine is a cold one, in every tensor."""
        fleet.patient(_ENGINE_SECONDS)
        backend = json.dumps({"backend": fleet.backend, **fleet.options})
        ran = subprocess.run(
            [sys.executable, "-m", "weightwire_conformance.rig.engine", fleet.url, backend],
            cwd=fleet.directory,
            env={**os.environ, **fleet.pool.environment, "VLLM_LOGGING_LEVEL": "ERROR"},
            capture_output=True,
            text=True,
            timeout=_ENGINE_SECONDS,
            check=False,
        )
        last = ran.stdout.strip().splitlines()[-1:] or [""]
        said = ran.stderr.strip().splitlines()[-30:] or [""]
        errors = [line for line in said if "Error" in line]  # libraries may have the last word
        assert ran.returncode == 0, "\n".join([(errors or said)[-1], *said])
        assert last[0].startswith("equal: "), last[0]
        assert "traced: " in last[0], last[0]
