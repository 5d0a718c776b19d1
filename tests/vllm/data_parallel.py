"""Data-parallel ranks that are engines of their own: what vLLM's environment tells each of them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["answers_of_ranks", "data_parallel", "leave_together"]


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


def answers_of_ranks(
    command: Sequence[str], size: int, environment: Mapping[str, str], word: str
) -> list[Any]:
    """What each data-parallel rank, a process of its own, says on its line that begins so."""
    ranks = [
        subprocess.Popen(
            command,
            env={**environment, **of_rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for of_rank in data_parallel(size)
    ]
    try:
        outputs = [rank.communicate(timeout=200) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    answers = []
    for stdout, stderr in outputs:
        lines = [line for line in stdout.splitlines() if line.startswith(f"{word} ")]
        assert lines, stderr[-4000:]
        answers.append(json.loads(lines[0].removeprefix(f"{word} ")))
    return answers


def leave_together(directory: Path, name: str) -> None:
    """End this rank's process once all ranks have come here."""
    (directory / f"{name}{os.environ['VLLM_DP_RANK']}").touch()
    deadline = time.monotonic() + 60
    size = int(os.environ["VLLM_DP_SIZE"])
    while len(list(directory.glob(f"{name}*"))) < size and time.monotonic() < deadline:
        time.sleep(0.05)
    os._exit(0)  # vLLM's data-parallel shutdown waits for a coordinator that isn't there
