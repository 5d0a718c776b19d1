"""Nothing grows: descriptors, threads, memory and directories after 50 versions."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from pathlib import Path

import filesystem_rig as rig
import pytest
import torch

from weightwire.contract import Policy
from weightwire.errors import TransferError


def resident() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


def held() -> tuple[int, int, int]:
    gc.collect()
    tensors = sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())
    return len(os.listdir("/proc/self/fd")), threading.active_count(), tensors


def until_swept(versions: Path) -> None:
    """Dropped versions are deleted by a thread that comes and goes."""
    late = time.monotonic() + 20
    while time.monotonic() < late:
        busy = any("sweeper" in thread.name for thread in threading.enumerate())
        if not busy and not any(name.startswith(".") for name in os.listdir(versions)):
            return
        time.sleep(0.01)
    raise AssertionError("a dropped version is still there")


@pytest.mark.skipif(sys.platform != "linux", reason="counts with /proc/self")
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_fifty_versions(open_sender, open_receiver, versions):
    tensors = rig.weights()
    table = rig.make_table(tensors)
    sender, receiver = open_sender(table), open_receiver(table)
    regions = rig.whole(table)
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
        if version == 10:
            first, memory = held(), resident()
    assert held() == first
    assert resident() - memory < 8 << 20
    assert len(os.listdir(versions)) == 2
