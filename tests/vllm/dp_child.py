"""One of two data-parallel ranks, each an engine of its own: parameters before and after an update.

Arguments: directory, kind.  The rank comes from vLLM's own environment variables.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from weightwire_vllm import inprocess


def main(directory: Path) -> None:
    seen = {}
    which = sys.argv[2]
    # Data-parallel ranks have worker processes of their own.
    llm = inprocess.build_engine(
        directory / which,
        dtype="bfloat16",
        enable_expert_parallel=True,
        worker_extension_cls="watched_worker.Watched",
    )
    (seen["before"],) = llm.collective_rpc("digest")
    if which == "A":
        inprocess.attach(
            llm,
            session=f"file://{directory / 'run'}",
            backend="filesystem",
            receiver_id="r",
            timeout=60,
        )
        inprocess.update(llm, version=1)
        (seen["after"],) = llm.collective_rpc("digest")
    print("STATE " + json.dumps(seen), flush=True)
    # The ranks of an engine leave together.
    mine = directory / f"done{which}{os.environ['VLLM_DP_RANK']}"
    mine.touch()
    deadline = time.monotonic() + 60
    while len(list(directory.glob(f"done{which}*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    os._exit(0)  # vLLM's data-parallel shutdown waits for a coordinator that isn't there


if __name__ == "__main__":
    main(Path(sys.argv[1]))
