"""Large reads out of shared memory: threads of NIXL share them."""

from __future__ import annotations

import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from nixl_transports import Transports, offer, stage

from weightwire.grouping import make_groups
from weightwire.table import Shard, TensorEntry, TensorTable
from weightwire_nixl.owner import LARGE, PIECES
from weightwire_nixl.runs import in_pieces

CPU = torch.device("cpu")
UNMAPS = """
import ctypes, sys, torch
from weightwire_nixl.agent import Agent
nbytes = int(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t] + [
    ctypes.c_int] * 3 + [ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
address = libc.mmap(None, nbytes, 3, 0x22, -1, 0)
memory = torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8)
memory.fill_(7)
agent = Agent("unmaps")
agent.register(memory, "memory")
print(agent.name, agent.metadata().hex(), address, sep="\\n", flush=True)
sys.stdin.readline()
assert libc.munmap(address + nbytes // 2, nbytes // 2) == 0
print("unmapped", flush=True)
sys.stdin.readline()
"""


def test_pieces_cover_what_they_were_cut_from() -> None:
    lengths = np.array([5, 4096, 1, 100_000, 70_001], np.uint64)
    begins = np.array([0, 10, 5000, 6000, 200_000], np.uint64)
    here = np.stack([begins + np.uint64(7), lengths, np.full(5, 3, np.uint64)], axis=1)
    there = np.stack([begins + np.uint64(9), lengths, np.full(5, 4, np.uint64)], axis=1)
    cut = in_pieces(here, there, 40)
    assert len(cut[0]) >= 40
    assert int(cut[0][:, 1].max()) <= -(-int(lengths.sum()) // 40)
    for whole, pieces in zip((here, there), cut, strict=True):
        assert _bytes_of(pieces) == _bytes_of(whole)
        assert set(pieces[:, 2].tolist()) == set(whole[:, 2].tolist())
    assert (cut[1][:, 0] - cut[0][:, 0] == 2).all()
    assert (cut[0][:, 1] == cut[1][:, 1]).all()


def _bytes_of(rows: np.ndarray) -> list[int]:
    return [
        address for begin, nbytes, _ in rows.tolist() for address in range(begin, begin + nbytes)
    ]


@pytest.mark.parametrize("threads", [0, 1, 3])
@pytest.mark.parametrize("zero_copy", [False, True], ids=["staged", "live"])
def test_large_groups_arrive_whole_each_time(
    transports: Transports, threads: int, zero_copy: bool
) -> None:
    size = LARGE // 4 + 1001
    shards = (Shard(0, (0,), (size,)),)
    entry = TensorEntry("w", (size,), "float32", shards)
    table = TensorTable(1, (entry,), make_groups([entry], 2 * LARGE))
    sender = transports.sender(table, zero_copy=zero_copy)
    receiver = transports.receiver(table, copy_threads=threads)
    assert ("threads copy" in str(receiver._fabric)) == bool(threads)
    prepared = None
    for version in (1, 2, 3):
        values = torch.randn(size)
        made = offer(table, sender.describe(), version=version)
        described = receiver.describe()
        sender.begin(made, {"r0": [described]})
        receiver.begin(made)
        stage(sender, values)
        landed = receiver.slot(0, 4 * size).view(torch.float32)
        receiver.fetch(0, {0: landed})
        assert torch.equal(landed, values)
        sender.finish()
        receiver.finish()
        counts = receiver.counters.prepared()
        assert zero_copy or prepared in (None, counts)
        prepared = counts
    assert receiver.counters.descriptors >= PIECES * threads


READS = """
import sys
import numpy as np, torch
from weightwire.deadline import Deadline
from weightwire.errors import TransferError
from weightwire_nixl.agent import Agent
from weightwire_nixl.arena import Slots
from weightwire_nixl.fabric import Fabric
from weightwire_nixl.owner import LARGE, PIECES
from weightwire_nixl.runs import in_pieces
name, metadata, address = sys.argv[1:]
agent = Agent("reader", Fabric().with_copiers(2).options)
slots = Slots(agent, 1, LARGE, torch.device("cpu"))
agent.add(name, bytes.fromhex(metadata), "the peer")
here = np.array([[slots.address, LARGE, 0]], np.uint64)
there = np.array([[int(address), LARGE, 0]], np.uint64)
transfer = agent.prepare(
    "READ", name, *in_pieces(here, there, 2 * PIECES), devices=("cpu", "cpu"), who="the peer",
    cut=True,
)
def until(condition):
    end = Deadline(20)
    while not condition():
        if end.passed():
            sys.exit("it takes more than 20 s")
done = transfer.post()
until(lambda: done or transfer.done())
assert (slots.slot(0, LARGE) == 7).all()
assert transfer.is_over()
print("read", flush=True)
sys.stdin.readline()
try:
    until(lambda: transfer.post() or transfer.done())
except TransferError as error:
    assert "the peer" in str(error), error
else:
    sys.exit("a read of memory that is gone is said to be done")
assert transfer.lingers
assert not transfer.is_over()
agent.close()
"""


def test_what_a_failed_read_left_with_threads_is_not_taken_for_over() -> None:
    # On a busy machine NIXL itself aborts now and then where two of its threads fail at once.
    assert any(_reads_what_is_unmapped() for _ in range(6))


def _reads_what_is_unmapped() -> bool:
    """Whether the reader came to its end, with everything as it should be there."""
    peer, reader = None, None
    try:
        peer = _child(UNMAPS, str(LARGE))
        reader = _child(READS, *(_line(peer) for _ in range(3)))
        assert _line(reader) == "read"
        _tell(peer)
        assert _line(peer) == "unmapped"
        _tell(reader)
        code = reader.wait(timeout=60)
    finally:
        for child in (peer, reader):
            if child is not None:
                child.kill()
                child.communicate()
    assert code in (0, -signal.SIGABRT)
    return code == 0


def _child(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def _tell(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    child.stdin.write("go on\n")
    child.stdin.flush()
