"""The roll call: those who come are the members that the sender names, each once."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import msgspec
import pytest

from weightwire.contract import Policy
from weightwire.deadline import Deadline, Watch
from weightwire.errors import TableMismatch
from weightwire_nccl.epoch import Epoch
from weightwire_nccl.meeting import Server
from weightwire_nccl.records import Member, Opening

SENDER = Member("sender", True, 0, "a" * 16, "")
READER = Member("replica-0", False, 0, "b" * 16, "c" * 32)


@dataclass
class Comer:
    """A process's end of the group, on a thread of its own."""

    epoch: Epoch
    me: Member
    errors: list[BaseException] = field(default_factory=list)

    def enter(self, opening: Opening) -> threading.Thread:
        def run() -> None:
            try:
                self.epoch.wait(
                    self.epoch.submit(lambda: self.epoch.enter(opening, self.me)), "group"
                )
            except BaseException as error:
                self.errors.append(error)
                self.epoch.give_up(error)

        thread = threading.Thread(target=run)
        thread.start()
        return thread


@pytest.fixture
def meet():
    """Make members come; returns how each of them fared."""
    server = Server("127.0.0.1")
    epochs: list[Epoch] = []

    def meet(*coming: tuple[Opening, Member]) -> list[Comer]:
        comers = []
        for _, member in coming:
            watch = Watch()
            watch.start(Deadline(10))
            epochs.append(Epoch(watch, "127.0.0.1", (server.host, server.port), None))
            comers.append(Comer(epochs[-1], member))
        for thread in [
            comer.enter(opening) for comer, (opening, _) in zip(comers, coming, strict=True)
        ]:
            thread.join(20)
            assert not thread.is_alive()
        return comers

    yield meet
    for epoch in epochs:
        epoch.close()
    server.close()


def opening(*members: Member) -> Opening:
    return Opening(Policy(1, 1), epoch="group", generation=1, members=members)


def test_the_members_form_the_group(meet) -> None:
    both = opening(SENDER, READER)
    comers = meet((both, SENDER), (both, READER))
    assert [(comer.errors, comer.epoch.rank) for comer in comers] == [([], 0), ([], 1)]


def test_two_processes_cant_be_one_member(meet) -> None:
    """A copy of a process that holds the same rank, and came second."""
    both = opening(SENDER, READER)
    comers = meet((both, SENDER), (both, READER), (both, READER))
    errors = [error for comer in comers for error in comer.errors]
    assert [type(error) for error in errors] == [TableMismatch]
    assert "two processes say that they are receiver 'replica-0' rank 0" in str(errors[0])


def test_who_isnt_among_the_members_is_refused(meet) -> None:
    other = msgspec.structs.replace(READER, nonce="d" * 16)
    (comer,) = meet((opening(SENDER, READER), other))
    with pytest.raises(TableMismatch, match="0 times among the 2 members"):
        raise comer.errors[0]


def test_a_member_that_is_named_twice_is_refused(meet) -> None:
    (comer,) = meet((opening(SENDER, READER, READER), READER))
    with pytest.raises(TableMismatch, match="2 times among the 3 members"):
        raise comer.errors[0]


def test_who_comes_to_another_version_is_told(meet) -> None:
    members = (SENDER, READER)
    other = msgspec.structs.replace(opening(*members), table="another")
    comers = meet((opening(*members), SENDER), (other, READER))
    errors = [error for comer in comers for error in comer.errors]
    assert any("or to another version" in str(error) for error in errors), errors
    assert len(errors) == 2
