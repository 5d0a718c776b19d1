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
from weightwire_vllm.compare import comparable_engines, snapshot


def main(directory: Path) -> None:
    with comparable_engines():
        seen = {}
        which = sys.argv[2]
        llm = inprocess.build_engine(
            directory / which, dtype="bfloat16", enable_expert_parallel=True
        )
        seen["before"] = digest(llm)
        if which == "A":
            inprocess.attach(
                llm,
                session=f"file://{directory / 'run'}",
                backend="filesystem",
                receiver_id="r",
                timeout=60,
            )
            inprocess.update(llm, version=1)
            seen["after"] = digest(llm)
        print("STATE " + json.dumps(seen), flush=True)
        # The ranks of an engine leave together.
        mine = directory / f"done{which}{os.environ['VLLM_DP_RANK']}"
        mine.touch()
        deadline = time.monotonic() + 60
        while len(list(directory.glob(f"done{which}*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
    os._exit(0)  # vLLM's data-parallel shutdown waits for a coordinator that isn't there


def digest(llm) -> str:
    return inprocess.on_model(llm, snapshot).encode().decode()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
