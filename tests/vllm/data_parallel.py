"""Data-parallel ranks that are engines of their own: what vLLM's environment tells each of them."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

__all__ = ["data_parallel", "leave_together"]


def data_parallel(size: int) -> list[dict[str, str]]:
    """Environment variables of each rank; of one rank alone there are none."""
    if size == 1:
        return [{}]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return [
        {
            "VLLM_DP_SIZE": str(size),
            "VLLM_DP_RANK": str(rank),
            "VLLM_DP_RANK_LOCAL": str(rank),
            "VLLM_DP_MASTER_IP": "127.0.0.1",
            "VLLM_DP_MASTER_PORT": str(port),
        }
        for rank in range(size)
    ]


def leave_together(directory: Path, name: str) -> None:
    """End this rank's process once all ranks have come here."""
    (directory / f"{name}{os.environ['VLLM_DP_RANK']}").touch()
    deadline = time.monotonic() + 60
    size = int(os.environ["VLLM_DP_SIZE"])
    while len(list(directory.glob(f"{name}*"))) < size and time.monotonic() < deadline:
        time.sleep(0.05)
    os._exit(0)  # vLLM's data-parallel shutdown waits for a coordinator that isn't there
