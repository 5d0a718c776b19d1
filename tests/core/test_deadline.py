from __future__ import annotations

import threading
import time

import pytest

from weightwire.deadline import Deadline, Watch
from weightwire.errors import Cancelled, ConfigError, PeerLost, TransferTimeout


def watch(seconds: float = 10) -> Watch:
    running = Watch()
    running.start(Deadline(seconds))
    return running


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), -float("inf")])
def test_a_timeout_must_be_above_zero_and_finite(seconds):
    with pytest.raises(ConfigError, match=r"timeout .* is not above zero: give the seconds"):
        Deadline(seconds)


def test_a_timeout_is_one_that_a_clock_can_count():
    with pytest.raises(ConfigError, match=r"timeout is beyond 1e\+09 s"):
        Deadline(10**400)


@pytest.mark.parametrize("seconds", [True, "5", None])
def test_a_timeout_must_be_a_number(seconds):
    with pytest.raises(ConfigError, match=r"isn't a number: give seconds above zero"):
        Deadline(seconds)


def test_a_deadline_counts_down_to_zero_and_stays_there():
    deadline = Deadline(0.01)
    assert 0 < deadline.remaining() <= 0.01
    while not deadline.passed():
        pass
    assert deadline.remaining() == 0.0


def test_a_wait_ends_with_what_its_condition_returns():
    answers = iter([None, 0, "", "here"])
    assert watch().until(lambda: next(answers), "an answer") == "here"


def test_a_wait_ends_at_its_deadline_naming_who_is_missing():
    began = time.monotonic()
    with pytest.raises(TransferTimeout) as caught:
        watch(0.2).until(lambda: None, "credit for group 3", lambda: ["receiver 'a'", "rank 1"])
    assert 0.2 <= time.monotonic() - began < 0.2 * 1.1 + 0.5
    assert str(caught.value) == (
        "no credit for group 3 from receiver 'a', rank 1 within 0.2 s: check that it is alive "
        "(`weightwire inspect`), or raise the timeout"
    )
    assert isinstance(caught.value, TimeoutError)


def test_what_holds_at_the_deadline_is_still_taken():
    running = watch(0.01)
    assert running.until(lambda: running.deadline.passed(), "the end") is True


def test_a_failure_reported_on_another_thread_wakes_the_wait_at_once():
    running, error = watch(60), PeerLost("receiver 'a' is gone")
    reporter = threading.Timer(0.05, lambda: running.fail(error))
    reporter.start()
    began = time.monotonic()
    with pytest.raises(PeerLost) as caught:
        running.until(lambda: None, "anything")
    reporter.join()
    assert caught.value is error
    assert time.monotonic() - began < 10


def test_the_first_failure_is_the_one_that_is_raised_until_the_next_call():
    running = watch()
    running.fail(PeerLost("first"))
    running.fail(PeerLost("second"))
    for _ in range(2):
        with pytest.raises(PeerLost, match="first"):
            running.check()
    running.start(Deadline(1))
    running.check()


def test_cancelling_outweighs_an_earlier_failure():
    running = watch()
    running.fail(PeerLost("first"))
    running.cancel("the sender was closed")
    with pytest.raises(Cancelled, match="the sender was closed"):
        running.check()


def test_a_pause_never_outlasts_the_deadline_nor_a_failure():
    running = watch(0.05)
    began = time.monotonic()
    running.pause(30)
    assert time.monotonic() - began < 5
    running = watch(60)
    running.fail(PeerLost("gone"))
    running.pause(30)
    assert time.monotonic() - began < 10


def test_a_watch_that_was_never_started_is_a_programming_error():
    with pytest.raises(RuntimeError, match=r"Watch.start\(\) comes before any wait"):
        Watch().pause(1)
