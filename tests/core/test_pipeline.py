"""In which order an inference rank takes groups, and that none is written unverified."""

from __future__ import annotations

import pytest
import torch
from fetching import BareTarget, BareTransport, fetch

from weightwire import copying
from weightwire.contract import Policy, Seal
from weightwire.digest import box_digest, tensor_key
from weightwire.errors import VerificationError
from weightwire.pipeline import FetchPlan
from weightwire.stamp import stamp
from weightwire.table import Group, Region, Shard, TensorEntry, TensorTable

NAMES = ["a", "b", "c", "d"]
TENSORS = [torch.arange(i, i + 6, dtype=torch.float32) for i in range(4)]
TABLE = TensorTable(
    world_size=1,
    tensors=tuple(TensorEntry(name, (6,), "float32", (Shard(0, (0,), (6,)),)) for name in NAMES),
    groups=tuple(Group((i,)) for i in range(4)),
)


class Scripted(BareTransport):
    """Brings a group when it is fetched; says beforehand which ones have landed."""

    def __init__(self, events, landed, damaged=None):
        self.events, self.there, self.damaged = events, landed, damaged

    def post(self, group, regions):
        self.events.append(("post", group))

    def landed(self, group):
        return group in self.there

    def fetch(self, group, regions):
        self.events.append(("fetch", group))
        (memory,) = regions.values()
        memory.copy_(TENSORS[group])
        if group == self.damaged:
            memory[2] += 1
        key, shape = tensor_key(NAMES[group]), (6,)
        sealed = box_digest(
            TENSORS[group], key=key, shape=shape, offsets=(0,), verify="sample", version=1
        )
        return [Seal({group: sealed}, 0)]

    def finish(self):
        self.events.append(("finish", None))


class Recording(BareTarget):
    def __init__(self, events):
        super().__init__()
        self.events = events

    def write(self, group, tensors):
        self.events.append(("write", group))
        self.held[group] = next(iter(tensors.values())).clone()


def taken(landed=(), damaged=None, overlap=True):
    """What happened, and what the target holds."""
    events = []
    target = Recording(events)
    plan = FetchPlan(
        TABLE, [Region.whole(i, e) for i, e in enumerate(TABLE.tensors)], overlap=overlap
    )
    try:
        fetch(plan, Scripted(events, landed, damaged), target, version=1, verify="sample")
    except VerificationError as error:
        return events, target.held, error
    for group, tensor in enumerate(TENSORS):
        assert torch.equal(target.held[group], tensor)
    return events, target.held, None


def steps(text):
    kinds = {"p": "post", "f": "fetch", "w": "write"}
    return [(kinds[step[0]], int(step[1])) for step in text.split()]


def test_without_overlap_a_group_is_written_before_the_next_is_posted():
    events, _, _ = taken(landed=range(4), overlap=False)
    assert events[:-1] == steps("p0 f0 w0 p1 f1 w1 p2 f2 w2 p3 f3 w3")


def test_with_overlap_the_next_one_is_on_its_way():
    events, _, _ = taken()
    assert events[:-1] == steps("p0 p1 f0 w0 p2 f1 w1 p3 f2 w2 f3 w3")


def test_a_group_that_has_landed_is_looked_at_before_more_is_posted():
    events, _, _ = taken(landed=range(4))
    assert events[:-1] == steps("p0 p1 f0 w0 f1 p2 w1 f2 p3 w2 f3 w3")
    events, _, _ = taken(landed={2})
    assert events[:-1] == steps("p0 p1 f0 w0 p2 f1 w1 f2 p3 w2 f3 w3")


@pytest.mark.parametrize("landed", [(), range(4)], ids=["late", "landed"])
@pytest.mark.parametrize("damaged", range(4))
def test_what_arrived_wrong_is_never_written(landed, damaged):
    _, held, error = taken(landed, damaged)
    assert error is not None
    assert f"'{NAMES[damaged]}'" in str(error)
    assert sorted(held) == list(range(damaged))


@pytest.mark.parametrize("slowed", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_writing_leaves_bandwidth_to_a_group_that_it_would_slow_down(slowed, overlap):
    leaves = []

    class Leaving(Recording):
        def write(self, group, tensors):
            leaves.append(copying._leaves.get())
            super().write(group, tensors)

    regions = [Region.whole(i, entry) for i, entry in enumerate(TABLE.tensors)]
    plan = FetchPlan(TABLE, regions, overlap=overlap)
    transport = Scripted([], landed=())
    transport.slowed_by_copies = slowed
    fetch(plan, transport, Leaving([]), version=1, verify="sample")
    assert leaves == [slowed and overlap] * 3 + [False]  # beside the last one nothing arrives


@pytest.mark.parametrize("verify", ["off", "sample", "full"])
def test_a_seal_of_another_version_is_refused_before_anything_is_written(verify):
    events = []
    target = Recording(events)
    plan = FetchPlan(TABLE, [Region.whole(i, e) for i, e in enumerate(TABLE.tensors)])
    of = stamp("0123456789abcdef", Policy(1, 2, 1))
    with pytest.raises(VerificationError, match="group 0 of version 2 came with the seal of anoth"):
        fetch(plan, Scripted(events, ()), target, version=2, verify=verify, of=of)
    assert not target.held


def test_every_attempt_of_every_version_has_a_stamp_of_its_own():
    policies = [Policy(i, v, a) for i in (1, 2, 11) for v in (1, 11, 111) for a in (1, 2, 11)]
    stamps = {stamp(session, policy) for session in ("ab", "abc") for policy in policies}
    assert len(stamps) == 2 * len(policies)
