"""Groups of Gloo in one process."""

from __future__ import annotations

import threading

from torch.distributed import HashStore

from weightwire_nccl.gloo import GlooWire
from weightwire_nccl.wire import Wire

__all__ = ["end", "form"]


def form(size: int, seconds: float) -> dict[int, Wire]:
    """All ends of a group, in one process."""
    store = HashStore()
    wires: dict[int, Wire] = {}

    def come(rank: int) -> None:
        wires[rank] = GlooWire(store, rank, size, "127.0.0.1", seconds)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wires


def end(wires: dict[int, Wire]) -> None:
    for wire in wires.values():
        wire.abort()
        wire.close()
