"""Memory that somebody may still touch: kept from use, within bounds, and given back."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from nixl_transports import Transports, landing, offer, read, stage, table_of
from process_rig import until

from weightwire.deadline import Deadline
from weightwire.errors import PeerLost, TransferError, TransferTimeout

TABLE = table_of()
VALUES = torch.arange(64, dtype=torch.float32)
GIVEN_UP = PeerLost("given up by the test")


def test_a_group_whose_memory_changed_while_it_was_read_is_discarded(
    transports: Transports,
) -> None:
    """The trainer gave the version up, and may change its tensors, before a late reader comes."""
    sender, receiver = transports.sender(TABLE, zero_copy=True), transports.receiver(TABLE)
    for version, gives_up in ((1, False), (2, True), (3, False)):
        offered = offer(TABLE, sender.describe(), version=version)
        sender.begin(offered, {"r0": [receiver.describe()]})
        receiver.begin(offered)
        stage(sender, VALUES)
        if gives_up:
            until(lambda: receiver._poll() or len(receiver._backlog) > 0, "it is announced", 20)
            sender.abort(GIVEN_UP)
            with pytest.raises(PeerLost, match=r"^sender rank 0 filled the slot of group 0 again"):
                read(receiver)
            receiver.abort(GIVEN_UP)
        else:
            assert torch.equal(read(receiver), VALUES)
            sender.finish()
            receiver.finish()


def test_slots_that_late_readers_may_read_arent_filled_again(transports: Transports) -> None:
    """One is retired for each; when there are no more, the readers are named."""
    sender = transports.sender(TABLE, max_retired_slots=1, seconds=20.0)
    receivers = {name: transports.receiver(TABLE, name) for name in ("r0", "r1", "r2")}
    for version, name in ((1, "r0"), (2, "r1")):
        offered = offer(TABLE, sender.describe(), version=version, roster=(name,))
        sender.begin(offered, {name: [receivers[name].describe()]})
        stage(sender, VALUES + version)
        sender.abort(GIVEN_UP)
    offered = offer(TABLE, sender.describe(), version=3, roster=("r2",))
    sender.begin(offered, {"r2": [receivers["r2"].describe()]})
    receivers["r2"].begin(offered)
    sender._context.watch.start(Deadline(0.5))
    with pytest.raises(TransferTimeout, match=r"max_retired_slots=1.*'r0' rank 0.*'r1' rank 0"):
        sender.slot(0, VALUES.nbytes)
    # What they were announced is still there, and whole.
    receivers["r0"].begin(offer(TABLE, sender.describe(), version=1))
    until(lambda: receivers["r0"]._poll() or len(receivers["r0"]._backlog) > 0, "announced", 20)
    assert torch.equal(read(receivers["r0"]), VALUES + 1)
    # That was r0's credit: its slot is free.
    sender._context.watch.start(Deadline(20.0))
    stage(sender, VALUES + 3)
    assert torch.equal(read(receivers["r2"]), VALUES + 3)


def test_receive_slots_that_a_trainer_may_still_write_arent_used_again(
    transports: Transports,
) -> None:
    """They are set aside until the trainer says that it won't; at most so many of them."""
    options = {"direction": "push", "max_retired_slots": 1}
    sender = transports.sender(TABLE, **options)
    receiver = transports.receiver(TABLE, **options)
    described = []
    for version in (1, 2):
        offered = offer(TABLE, sender.describe(), version=version)
        described.append(receiver.describe())
        receiver.begin(offered)
        receiver.post(0, {0: landing(receiver)})  # grants its slot
        receiver.abort(GIVEN_UP)
        assert len(receiver._aside) == version
    assert described[0] != described[1], "the agent was used again"
    with pytest.raises(TransferError, match=r"^2 sets of receive slots .*: restart this process"):
        receiver.describe()

    def is_free() -> bool:
        sender._poll()  # it says that nothing will be written there
        receiver._aside.sweep()
        return not len(receiver._aside)

    until(is_free, "all is given back", 20)
    assert receiver.describe() not in described


_LEFT_BEHIND = """
from weightwire_nixl.agent import Agent
from weightwire_nixl.aside import leave_behind

agent = Agent("sender-0")


def is_over():
    for _ in range(20_000):
        agent.drain()
    return False


leave_behind(is_over, agent.close)
"""


def test_a_process_that_ends_beside_what_it_left_behind_ends_in_good_order() -> None:
    """The interpreter ends its threads where they take its lock again: inside NIXL, too."""
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", _LEFT_BEHIND], timeout=60, check=False)
        assert done.returncode == 0
