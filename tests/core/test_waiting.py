"""Running protocols: waits, acts, and where errors are raised."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from weightwire.deadline import Deadline, Watch
from weightwire.errors import PeerLost, TransferTimeout
from weightwire.waiting import Act, Run, Waiting, drive


@dataclass(frozen=True)
class Move(Act):
    number: int


@dataclass(frozen=True)
class Stop(Act):
    pass


def watch(seconds: float = 10) -> Watch:
    running = Watch()
    running.start(Deadline(seconds))
    return running


def test_acts_are_performed_in_order_and_their_results_come_back():
    def steps():
        first = yield Move(1)
        yield Waiting("nothing", ())
        second = yield Move(2)
        return first, second

    assert drive(steps(), watch(), lambda act: act.number * 10) == (10, 20)


def test_a_wait_looks_again_until_the_protocol_goes_on():
    looks = []

    def steps():
        while len(looks) < 4:
            looks.append(True)
            yield Waiting("looks", ())
        return len(looks)

    assert drive(steps(), watch()) == 4


def test_a_passed_deadline_is_raised_inside_the_protocol_so_that_it_can_abort():
    seen = []

    def steps():
        try:
            while True:
                yield Waiting("receiver_ready", ("receiver 'a'",))
        except TransferTimeout as error:
            seen.append(str(error))
            raise

    with pytest.raises(TransferTimeout):
        drive(steps(), watch(0.05))
    assert seen[0].startswith("no receiver_ready from receiver 'a' within 0.05 s: ")


def test_an_act_that_fails_is_raised_inside_the_protocol():
    def steps():
        try:
            yield Move(1)
        except PeerLost:
            return "aborted in good order"

    def perform(act):
        raise PeerLost("gone")

    assert drive(steps(), watch(), perform) == "aborted in good order"


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_act_reaches_the_protocol_and_then_the_caller(error):
    seen = []

    def steps():
        try:
            yield Move(1)
        except BaseException as caught:
            seen.append(type(caught))
            raise

    def perform(act):
        raise error

    with pytest.raises(error):
        drive(steps(), watch(), perform)
    assert seen == [error]


def test_a_protocol_may_perform_acts_while_it_aborts():
    performed = []

    def steps():
        try:
            yield Move(1)
        except PeerLost:
            yield Move(2)
            raise

    def perform(act):
        performed.append(act.number)
        if act.number == 1:
            raise PeerLost("gone")

    with pytest.raises(PeerLost):
        drive(steps(), watch(), perform)
    assert performed == [1, 2]


def test_a_run_stops_before_an_act_and_performs_it_when_it_goes_on():
    performed = []

    def steps():
        yield Move(1)
        yield Stop()
        yield Move(2)
        return "done"

    run = Run(steps(), watch(), performed.append)
    assert run.until(Stop) == Stop()
    assert performed == [Move(1)]
    assert run.finish() == "done"
    assert performed == [Move(1), Stop(), Move(2)]


def test_a_stopped_run_can_be_failed_instead():
    seen = []

    def steps():
        try:
            yield Stop()
        except PeerLost as error:
            seen.append(str(error))
            raise

    run = Run(steps(), watch(), lambda act: pytest.fail("performed"))
    run.until(Stop)
    with pytest.raises(PeerLost):
        run.fail(PeerLost("the caller gave up"))
    assert seen == ["the caller gave up"]


def test_a_protocol_that_ends_before_the_act_is_a_programming_error():
    def steps():
        yield Move(1)

    with pytest.raises(TypeError, match="the protocol ended before Stop"):
        Run(steps(), watch(), lambda act: None).until(Stop)


def test_an_act_that_nobody_performs_is_a_programming_error():
    def steps():
        yield Move(1)

    with pytest.raises(TypeError, match=r"nobody performs Move\(number=1\)"):
        drive(steps(), watch())
