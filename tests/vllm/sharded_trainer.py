"""One rank of a trainer that ``fully_shard`` has cut up; run as a process.

Arguments: rank, world size, directory, kind.  Publishes B, then A, each in a session of its own.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from kinds import SEEDS, make
from torch.distributed.fsdp import fully_shard

import weightwire


def main() -> None:
    rank, world, directory = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{directory / 'trainer'}", rank=rank, world_size=world
    )
    for which in ("B", "A"):
        model = make(sys.argv[4], SEEDS[which])
        fully_shard(model)
        with weightwire.open_sender(
            "filesystem",
            session=f"file://{directory / which}",
            source=model,
            group=dist.group.WORLD,
            group_bytes=1 << 14,
            timeout=60,
        ) as sender:
            sender.send(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
