"""What is read from whom: checked against plain slicing, and at the size of large models."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
import torch

from weightwire.contract import Policy
from weightwire.errors import ConfigError, TransferError
from weightwire.layout import slot_layout
from weightwire.table import Group, Region, Shard, TensorEntry, TensorTable
from weightwire_nixl.agent import Agent
from weightwire_nixl.backlog import Backlog
from weightwire_nixl.delivery import Writes, plan_parts
from weightwire_nixl.live import located, split_by_place
from weightwire_nixl.route import Endpoint, choose, path_between
from weightwire_nixl.runs import extents, plan_groups, rebased
from weightwire_nixl.wire import Announced, Arena, ReaderInfo


def random_table(rng: random.Random, owners: int) -> tuple[TensorTable, dict[int, torch.Tensor]]:
    entries, values = [], {}
    for i in range(12):
        shape = tuple(rng.randrange(0, 7) for _ in range(rng.randrange(0, 4)))
        shards = []
        if shape and shape[0]:
            cuts = sorted(rng.randrange(shape[0] + 1) for _ in range(owners - 1))
            bounds = [0, *cuts, shape[0]]
            for owner in range(owners):
                size = bounds[owner + 1] - bounds[owner]
                rest = (0,) * (len(shape) - 1)
                shards.append(Shard(owner, (bounds[owner], *rest), (size, *shape[1:])))
        else:
            shards.append(Shard(rng.randrange(owners), (0,) * len(shape), shape))
        dtype = rng.choice(["uint8", "bfloat16", "float32"])
        entries.append(TensorEntry(f"t{i}", shape, dtype, tuple(shards)))
        values[i] = torch.randint(0, 100, shape).to(getattr(torch, dtype))
    groups = (Group(tuple(range(7))), Group(tuple(range(7, 12))))
    table = TensorTable(owners, tuple(entries), groups)
    table.validate()
    return table, values


def random_regions(rng: random.Random, table: TensorTable) -> list[Region]:
    regions = []
    for i, entry in enumerate(table.tensors):
        if rng.random() < 0.4:
            regions.append(Region.whole(i, entry))
            continue
        begins = tuple(rng.randrange(n + 1) for n in entry.shape)
        ends = tuple(rng.randrange(b, n + 1) for b, n in zip(begins, entry.shape, strict=True))
        sizes = tuple(e - b for b, e in zip(begins, ends, strict=True))
        regions.append(Region(i, begins, sizes))
    return regions


def filled_slot(
    table: TensorTable, group: int, owner: int, values: dict[int, torch.Tensor]
) -> torch.Tensor:
    layout = slot_layout(table, group, owner)
    slot = torch.full((layout.nbytes,), 0xEE, dtype=torch.uint8)
    for i, place in layout.places.items():
        shard = layout.shards[i]
        cut = tuple(slice(o, o + n) for o, n in zip(shard.offsets, shard.sizes, strict=True))
        place.view(slot).copy_(values[i][cut] if cut else values[i])
    return slot


@pytest.mark.parametrize("seed", range(40))
def test_runs_bring_what_slicing_brings(seed: int) -> None:
    rng = random.Random(seed)
    owners = rng.randrange(1, 4)
    table, values = random_table(rng, owners)
    regions = random_regions(rng, table)
    for group, plan in plan_groups(table, regions).items():
        arrived = torch.full((plan.nbytes,), 0xCC, dtype=torch.uint8)
        apart = arrived.clone()
        for owner, runs in plan.owners.items():
            slot = filled_slot(table, group, owner, values)
            assert (np.diff(runs.source.astype(np.int64)) >= 0).all(), "not sorted by address"
            for s, t, n in zip(runs.source, runs.target, runs.nbytes, strict=True):
                arrived[int(t) : int(t + n)] = slot[int(s) : int(s + n)]
            # The same from tensors that lie apart.
            begins, nbytes = extents(table, group, owner)
            cut, places = split_by_place(runs, begins, nbytes)
            bases = begins + np.uint64(1000) * np.arange(1, len(begins) + 1, dtype=np.uint64)
            found = located(cut, places, begins, bases)
            for a, p, t, n in zip(found, places, cut.target, cut.nbytes, strict=True):
                s = int(a) - 1000 * (int(p) + 1)
                apart[int(t) : int(t + n)] = slot[s : s + int(n)]
        for position, place in zip(plan.positions, plan.places, strict=True):
            region = regions[position]
            cut_ = tuple(slice(o, o + n) for o, n in zip(region.offsets, region.sizes, strict=True))
            wanted = values[region.tensor][cut_] if cut_ else values[region.tensor]
            assert torch.equal(place.view(arrived), wanted), region
            assert torch.equal(place.view(apart), wanted), region


COUNT = 72_000


def test_routes_at_the_size_of_a_large_model_are_made_in_seconds_and_read_bit_for_bit() -> None:
    """72,000 tensors in 79 groups; half of each is left out, so that nothing merges."""
    shape = (2, 16)
    entries = tuple(
        TensorEntry(f"t{i}", shape, "float32", (Shard(0, (0, 0), shape),)) for i in range(COUNT)
    )
    size = -(-COUNT // 79)
    groups = tuple(
        Group(tuple(range(begin, min(begin + size, COUNT)))) for begin in range(0, COUNT, size)
    )
    table = TensorTable(1, entries, groups)
    regions = [Region(i, (0, 0), (1, 16)) for i in range(COUNT)]
    began = time.perf_counter()
    plans = plan_groups(table, regions)
    assert time.perf_counter() - began < 20
    assert len(plans) == len(groups)
    assert sum(len(plan.owners[0]) for plan in plans.values()) == COUNT

    owner, reader = Agent("owner"), Agent("reader")
    try:
        slot_nbytes = slot_layout(table, 0, 0).nbytes
        source = torch.randint(0, 256, (slot_nbytes,), dtype=torch.uint8)
        target = torch.zeros(max(plan.nbytes for plan in plans.values()), dtype=torch.uint8)
        owner.register(source, "slot")
        reader.register(target, "slot")
        reader.add(owner.name, owner.metadata(), "the owner")
        plan = plans[0]
        runs = plan.owners[0]
        transfer = reader.prepare(
            "READ",
            owner.name,
            rebased(runs.target, runs.nbytes, target.data_ptr(), 0),
            rebased(runs.source, runs.nbytes, source.data_ptr(), 0),
            devices=("cpu", "cpu"),
            who="the owner",
        )
        for _ in range(2):
            target.zero_()
            done = transfer.post(b"read")
            end = time.monotonic() + 30
            while not done:
                assert time.monotonic() < end
                done = transfer.done()
            for index in (0, 1, len(plan.places) - 1):
                place = slot_layout(table, 0, 0).places[index]
                row = source[place.begin : place.begin + 64]
                assert torch.equal(plan.places[index].view(target).view(torch.uint8)[0], row)
    finally:
        reader.close()
        owner.close()


def endpoint(**changed: object) -> Endpoint:
    known: dict[str, object] = {
        "host": "boot/pid",
        "user": 1,
        "cma": True,
        "cuda_ipc": True,
        "rdma": False,
        "gpu": "",
    }
    return Endpoint(**{**known, **changed})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sender", "reader", "path", "push"),
    [
        ({}, {}, "CMA", False),
        ({}, {"user": 2}, "TCP", True),
        ({"cma": False}, {}, "TCP", True),
        ({}, {"host": "other/pid"}, "TCP", True),
        ({"rdma": True}, {"host": "other/pid", "rdma": True}, "RDMA", False),
        ({"gpu": "a"}, {"gpu": "b"}, "NVLink or PCIe", False),
        ({"gpu": "a"}, {"gpu": "a"}, "one GPU", True),
        ({"gpu": "a"}, {"gpu": "b", "cuda_ipc": False}, "TCP", True),
        ({"gpu": "a", "rdma": True}, {"gpu": "a", "rdma": True, "host": "other"}, "RDMA", False),
    ],
)
def test_direction_follows_the_path(
    sender: dict[str, object], reader: dict[str, object], path: str, push: bool
) -> None:
    ours, theirs = endpoint(**sender), endpoint(**reader)
    route = choose(ours, theirs, "auto", unsafe_pull=False, who="receiver 'r' rank 0")
    assert (route.path, route.push) == (path, push)
    assert path_between(ours, theirs) == path
    assert route.between_gpus is (path == "NVLink or PCIe")
    if path == "TCP":
        with pytest.raises(ConfigError, match="unsafe_pull"):
            choose(ours, theirs, "pull", unsafe_pull=False, who="receiver 'r' rank 0")


def announced(version: int, group: int) -> Announced:
    return Announced(Policy(1, version), group, 0, 7, b"", None)


def test_a_signal_is_used_once_whatever_the_order() -> None:
    backlog = Backlog()
    backlog.begin(Policy(1, 5))
    for version, group in [(6, 0), (5, 1), (4, 0), (5, 0), (5, 1)]:
        backlog.add("agent", announced(version, group), "who")
    first = backlog.take("agent", Announced, 0)
    assert first is not None
    assert first.policy.version == 5
    assert backlog.take("agent", Announced, 1) is not None
    backlog.add("agent", announced(5, 1), "who")  # once more
    assert backlog.take("agent", Announced, 1) is None
    assert backlog.take("other", Announced, 0) is None
    backlog.begin(Policy(1, 6))
    assert backlog.take("agent", Announced, 0) is not None
    assert len(backlog) == 0


def test_the_backlog_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightwire_nixl.backlog._MOST_MESSAGES", 10)
    backlog = Backlog()
    backlog.begin(Policy(1, 1))
    for group in range(10):
        backlog.add("agent", announced(1, group), "receiver 'r' rank 0")
    with pytest.raises(TransferError, match="receiver 'r' rank 0"):
        backlog.add("agent", announced(1, 10), "receiver 'r' rank 0")


def test_a_plan_that_leaves_the_slots_is_refused() -> None:
    table, _ = random_table(random.Random(1), 1)
    regions = [Region.whole(i, entry) for i, entry in enumerate(table.tensors)]
    plans = plan_groups(table, regions)
    runs = {group: plan.owners[0] for group, plan in plans.items() if 0 in plan.owners}
    nbytes = {group: slot_layout(table, group, 0).nbytes for group in runs}
    arena = Arena(4096, max(plan.nbytes for plan in plans.values()), 1, "cpu", 0)
    info = ReaderInfo("s", "a", b"", "", endpoint(), "auto", False, arena, {})
    groups = frozenset(runs)

    def planned(**changed: int) -> Writes:
        writes = Writes("receiver 'r' rank 0", info, None, None, nbytes | changed)  # type: ignore[arg-type]
        for part in plan_parts(runs, Policy(1, 1)):
            writes.add(part, groups)
        return writes

    assert planned().is_planned
    first = min(nbytes)
    nbytes[first] -= 64
    with pytest.raises(TransferError, match="doesn't fit the table"):
        planned()
