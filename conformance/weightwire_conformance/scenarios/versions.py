"""Versions follow each other."""

from __future__ import annotations

import time

from weightwire_conformance.capabilities import FINISHED_ARE_SERVED
from weightwire_conformance.rig import Fleet
from weightwire_conformance.scenario import scenario

__all__: list[str] = []


@scenario(cases={"6": {"count": 6}, "20": {"count": 20}})
def versions_in_a_row_arrive_each_with_its_own_values(fleet: Fleet, count: int) -> None:
    sender, replica = fleet.sender(), fleet.receiver()
    for version in range(1, count + 1):
        fleet.exchange(sender, version, replica)


@scenario
def version_numbers_may_skip(fleet: Fleet) -> None:
    sender, replica = fleet.sender(), fleet.receiver()
    for version in (0, 1, 7, 10**9):
        fleet.exchange(sender, version, replica)


@scenario
def versions_must_rise(fleet: Fleet) -> None:
    """A version that doesn't rise is refused, and harms nothing."""
    sender, replica = fleet.sender(), fleet.receiver()
    fleet.exchange(sender, 5, replica)
    for version in (5, 4, -1):
        error = sender.start("send", version=version, fill=False).error()
        assert "ConfigError" in error.kinds, error
        replica.must_hold(5)
    fleet.exchange(sender, 6, replica)


@scenario
def a_version_is_applied_once(fleet: Fleet) -> None:
    sender, replica = fleet.sender(), fleet.receiver()
    fleet.exchange(sender, 1, replica)
    assert replica.ask("poll") is None, "an applied version is offered again"
    error = replica.start("receive", timeout=0.4).error()
    assert "TransferTimeout" in error.kinds, error
    replica.must_hold(1)
    fleet.exchange(sender, 2, replica)


@scenario(need=FINISHED_ARE_SERVED)
def a_receiver_that_is_behind_takes_the_newest(fleet: Fleet) -> None:
    """It skips what was sent meanwhile."""
    sender, replica = fleet.sender(min_receivers=0), fleet.receiver()
    fleet.exchange(sender, 1, replica)
    for version in (2, 3, 9):
        sender.send(version, wait="published")
    assert replica.receive()[0]["version"] == 9
    replica.must_hold(9)


@scenario
def the_source_may_change_once_send_has_returned(fleet: Fleet) -> None:
    """Whoever reads late, or slowly, still gets the version's own bytes."""
    sender, replica = fleet.sender("twins"), fleet.receiver(model="twins")
    for version in (1, 2):
        replica.arm("receiver.fetch", "slow")
        receiving = replica.start("receive")
        sender.send(version, wait="published", scribble=True)
        assert receiving.results()[0]["version"] == version
        replica.must_hold(version)


@scenario
def a_version_stays_until_the_next_one_begins(fleet: Fleet) -> None:
    """Nothing writes to the target behind its back."""
    sender, replica = fleet.sender(), fleet.receiver()
    fleet.exchange(sender, 1, replica)
    time.sleep(0.3)
    replica.must_hold(1)
    replica.arm("receiver.begin")
    sending = sender.start("send", version=2, wait="applied")
    receiving = replica.start("receive")
    replica.first.until_at("receiver.begin")
    difference = replica.ask("difference", now=True, version=1)
    assert difference is None, f"written to before it began: {difference}"
    replica.first.release("receiver.begin")
    receiving.results()
    sending.results()
    replica.must_hold(2)


@scenario
def a_version_counts_only_when_it_is_committed(fleet: Fleet) -> None:
    """``begin``, ``fetch`` and ``commit``, each called alone."""
    sender, replica = fleet.sender(), fleet.receiver()
    fleet.exchange(sender, 1, replica)
    sending = sender.start("send", version=2, wait="applied")
    assert replica.call("begin") == [2]
    replica.must_hold(1)
    replica.call("fetch")
    assert replica.version is None, "a version that isn't committed is claimed"
    replica.call("commit")
    sending.results()
    replica.must_hold(2)


@scenario
def an_aborted_version_is_sent_again_as_the_next_attempt(fleet: Fleet) -> None:
    sender, replica = fleet.sender(), fleet.receiver()
    fleet.exchange(sender, 1, replica)
    replica.arm("target.commit", "raise")
    sending = sender.start("send", version=2, wait="applied")
    replica.start("receive").error()
    sending.error()
    again = sender.start("send", version=2, wait="applied")
    report = replica.receive(minimum=2)[0]
    assert (report["version"], report["attempt"]) == (2, 2), report
    again.results()
    replica.must_hold(2)


@scenario
def tensors_that_moved_are_read_where_they_are(fleet: Fleet) -> None:
    """A trainer may give its tensors new memory between two versions."""
    sender, replica = fleet.sender(), fleet.receiver()
    fleet.exchange(sender, 1, replica)
    sender.call("move_tensors")
    fleet.exchange(sender, 2, replica)


@scenario
def another_grouping_is_planned_again(fleet: Fleet) -> None:
    """A receiver that has a plan makes another one when the table changes."""
    sender, replica = fleet.sender(), fleet.receiver()
    fleet.exchange(sender, 1, replica)
    sender.close()
    for group_bytes in (1 << 20, 1 << 10):
        sender = fleet.sender(workers=sender.workers, group_bytes=group_bytes)
        fleet.exchange(sender, 2, replica)
        sender.close()


@scenario(cases={"one-rank-each": {"ranks": 1}, "two-ranks-each": {"ranks": 2}})
def released_buffers_come_again_with_the_next_version(fleet: Fleet, ranks: int) -> None:
    """Either side gives them back alone, or both; before the first version, and twice in a row."""
    sender, replica = fleet.sender(ranks=ranks), fleet.receiver(ranks=ranks)
    sender.call("release_buffers")
    replica.call("release_buffers")
    fleet.exchange(sender, 1, replica)
    sender.call("release_buffers")
    fleet.exchange(sender, 2, replica)
    replica.call("release_buffers")
    fleet.exchange(sender, 3, replica)
    for _ in range(2):
        replica.call("release_buffers")
        sender.call("release_buffers")
    for version in (4, 5):
        fleet.exchange(sender, version, replica)


@scenario
def digests_are_those_of_every_other_backend(fleet: Fleet) -> None:
    """Every backend's are the oracle's own: what the sender's ranks sent, and what arrived."""
    sender, replica = fleet.sender("dtypes", ranks=2), fleet.receiver(model="dtypes")
    for version in (1, 2, 3):
        sending = sender.start("send", version=version, wait="applied")
        (received,) = (report["digest"] for report in replica.receive())
        sent = [report["digest"] for report in sending.results()]
        replica.must_hold(version)
        own = replica.ask("digest", version=version)
        assert received == own, f"version {version}: {received} isn't {own}"
        added = f"{sum(int(digest, 16) for digest in sent) % (1 << 64):016x}"
        assert added == own, f"version {version}: {' + '.join(sent)} isn't {own}"
