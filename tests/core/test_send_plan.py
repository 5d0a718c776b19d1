"""Staged groups and the transport that sends them: memory is used again when nobody reads it."""

from __future__ import annotations

import pytest
import torch

from weightwire import copying
from weightwire.contract import SenderTransport
from weightwire.deadline import Deadline, Watch
from weightwire.materialise import CheckpointTensors
from weightwire.memory import MemoryBackend
from weightwire.phases import Phases
from weightwire.send_plan import SendPlan
from weightwire.staging import Stager
from weightwire.table import Group, Shard, TensorEntry, TensorTable

GROUPS = 5
TABLE = TensorTable(
    world_size=1,
    tensors=tuple(
        TensorEntry(f"w{i}", (64,), "bfloat16", (Shard(0, (0,), (64,)),)) for i in range(GROUPS)
    ),
    groups=tuple(Group((i,)) for i in range(GROUPS)),
)
MASTER = {f"w{i}": torch.arange(64, dtype=torch.float32) + 64 * i for i in range(GROUPS)}


class Slow(SenderTransport):
    """Each group travels until the next is put, or until it is waited for."""

    def __init__(self, frees_earlier: bool) -> None:
        self.put_frees_earlier = frees_earlier
        self.arrived: list[torch.Tensor] = []
        self.travelling: tuple[torch.Tensor, torch.Tensor] | None = None
        self.settled = 0

    def land(self) -> None:
        if self.travelling is not None:
            sent, as_it_was = self.travelling
            assert torch.equal(sent, as_it_was), "it was changed while it travelled"
            self.arrived.append(sent.clone())
            self.travelling = None

    def put(self, group, tensors, seal):
        if not self.put_frees_earlier:
            assert self.travelling is None
        self.land()
        self.travelling = (tensors[group], tensors[group].clone())

    def settle(self):
        self.settled += 1
        self.land()

    def finish(self):
        self.land()

    def set_table(self, table):
        raise NotImplementedError

    def begin(self, offer, readers):
        raise NotImplementedError

    def abort(self, error):
        raise NotImplementedError

    def close(self):
        raise NotImplementedError


def send(
    plan: SendPlan, transport: SenderTransport, master: dict[str, torch.Tensor], version: int
) -> None:
    watch = Watch()
    watch.start(Deadline(10))
    plan.send(
        CheckpointTensors(master, (), {}),
        transport,
        MemoryBackend.capabilities,
        None,  # type: ignore[arg-type]  # nothing is cut over ranks
        version=version,
        of=0,
        verify="sample",
        watch=watch,
        phases=Phases(),
    )


@pytest.mark.parametrize("frees_earlier", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_memory_isnt_staged_into_while_it_travels(frees_earlier: bool, overlap: bool) -> None:
    transport = Slow(frees_earlier)
    plan = SendPlan(TABLE, 0, overlap=overlap)
    for version in (1, 2):
        master = {name: value + version for name, value in MASTER.items()}
        transport.arrived.clear()
        transport.settled = 0
        send(plan, transport, master, version)
        assert len(transport.arrived) == GROUPS
        for arrived, value in zip(transport.arrived, master.values(), strict=True):
            assert torch.equal(arrived, value.bfloat16())
        # With two buffers, and a put that frees the one before, staging waits for nothing.
        assert transport.settled == (0 if frees_earlier and overlap else GROUPS)


@pytest.mark.parametrize("slowed", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_staging_leaves_bandwidth_to_a_group_that_it_would_slow_down(
    slowed: bool, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaves = []
    copy = Stager.copy

    def recording(self, *args, **kwargs):
        leaves.append(copying._leaves.get())
        copy(self, *args, **kwargs)

    monkeypatch.setattr(Stager, "copy", recording)
    transport = Slow(frees_earlier=True)
    transport.slowed_by_copies = slowed
    plan = SendPlan(TABLE, 0, overlap=overlap)
    for version in (1, 2):
        leaves.clear()
        send(plan, transport, MASTER, version)
        # Beside the first group, or one that only one buffer holds, nothing travels.
        assert leaves == [False] + [slowed and overlap] * (GROUPS - 1)
