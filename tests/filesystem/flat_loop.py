"""Fifty versions in a process of its own: what it holds after ten and after fifty, as JSON.

Run by itself, since memory that earlier tests of a process gave back comes and goes.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
import warnings
from pathlib import Path

import filesystem_rig as rig
import torch

from weightwire.contract import Policy
from weightwire.errors import TransferError
from weightwire_filesystem import FilesystemBackend


def usage() -> dict[str, int]:
    gc.collect()
    status = Path("/proc/self/status").read_text().splitlines()
    (resident,) = (line.split()[1] for line in status if line.startswith("VmRSS"))
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", FutureWarning
        )  # some of torch's objects warn when looked at
        tensors = sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "tensors": tensors,
        "resident": int(resident) * 1024,
    }


def until_swept(versions: Path) -> None:
    """Dropped versions are deleted by a thread that comes and goes."""
    late = time.monotonic() + 20
    while time.monotonic() < late:
        busy = any("sweeper" in thread.name for thread in threading.enumerate())
        if not busy and not any(name.startswith(".") for name in os.listdir(versions)):
            return
        time.sleep(0.01)
    raise AssertionError("a dropped version is still there")


def main(versions: Path) -> None:
    tensors = rig.weights()
    table = rig.make_table(tensors)
    regions = rig.whole(table)
    backend = FilesystemBackend()
    sender = backend.open_sender(rig.context(versions))
    receiver = backend.open_receiver(rig.context(versions, member="replica-0"))
    sender.set_table(table)
    receiver.set_plan(table, regions)
    for version in range(1, 51):
        offer = rig.send(sender, table, tensors, version)
        receiver.begin(offer)
        rig.fetch_all(receiver, table, regions)
        receiver.finish()
        if version > 2:
            sender.drop(Policy(1, version - 2))
        if version % 10 == 5:  # failures leave nothing behind either
            sender.begin(rig.offer_of(table, version + 100, [sender]), {})
            sender.abort(TransferError("a receiver failed"))
            receiver.begin(offer)
            receiver.abort(TransferError("the target failed"))
        if version in (10, 50):
            until_swept(versions)
            print(json.dumps(usage()))
    receiver.close()
    sender.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
