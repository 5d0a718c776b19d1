"""One of two data-parallel ranks, each an engine of its own: parameters before and after an update.

Arguments: directory, kind.  The rank comes from vLLM's own environment variables.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from data_parallel import leave_together

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
            backend="memory",
            receiver_id="r",
            timeout=60,
        )
        inprocess.update(llm, version=1)
        (seen["after"],) = llm.collective_rpc("digest")
    print("STATE " + json.dumps(seen), flush=True)
    leave_together(directory, f"done{which}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
