"""One rank of a trainer whose mixture of experts ``fully_shard`` has cut up; run as a process.

Arguments: rank, world size, directory, backend.
"""

import sys
from pathlib import Path

import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import weightwire
from weightwire_vllm.families import family_model


def main() -> None:
    rank, world, directory = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    dist.init_process_group(
        "gloo", init_method=f"file://{directory / 'trainer'}", rank=rank, world_size=world
    )
    for kind in ("qwen3_moe", "mixtral"):
        model = family_model(kind, 5)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        with weightwire.open_sender(
            sys.argv[4],
            session=f"file://{directory / kind}",
            source=model,
            group=dist.group.WORLD,
            verify="full",
            group_bytes=1 << 14,
            timeout=60,
        ) as sender:
            sender.send(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
