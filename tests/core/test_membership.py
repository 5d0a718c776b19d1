"""Who is in a session: real processes that claim names, die, stop and come back."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from weightwire.deadline import Deadline, Watch
from weightwire.errors import SessionError, TransferTimeout
from weightwire.session import membership, process
from weightwire.session.lease import LeaseKeeper, LeaseObserver, Member, Siblings
from weightwire.session.records import Closed, Lease, MemberRecord, RankReport
from weightwire.session.session import Session
from weightwire.session.silence import Silence
from weightwire.waiting import drive

SENDER = {"kind": "senders", "member_id": "sender"}
REPLICA = {"kind": "receivers/a", "member_id": "a"}


@pytest.fixture
def url(tmp_path) -> str:
    return f"file://{tmp_path}/session"


@pytest.fixture
def session(url) -> Session:
    return Session.open(url, deadline=Deadline(10))


def watch(seconds: float = 10) -> Watch:
    running = Watch()
    running.start(Deadline(seconds))
    return running


def claim(session: Session, kind: str = "senders", *, clock=time.monotonic, **options) -> Member:
    arguments = {"member_id": kind.split("/")[-1], "world_size": 1, "lease_ttl": 2.0, **options}
    steps = membership.claim(
        session, LeaseObserver(session, clock), kind, backend="memory", **arguments
    )
    return drive(steps, watch())


# ---------------------------------------------------------------------- one name, one process


@pytest.mark.parametrize(
    ("who", "remedy"),
    [
        (SENDER, "end it, or use another session"),
        (REPLICA, "end it, or use another receiver id"),
    ],
    ids=["sender", "receiver"],
)
def test_a_second_live_process_of_one_name_is_refused_naming_the_first(child, url, who, remedy):
    first = child("member", url=url, **who).hear()
    refused = child("member", url=url, **who).hear()
    assert refused["error"] == "SessionError"
    assert refused["message"].startswith(
        f"session {url} has a live '{who['member_id']}' already (process {first['pid']} on "
    )
    assert refused["message"].endswith(f", incarnation 1): {remedy}")


def test_two_receivers_with_different_ids_are_both_in(child, url, session):
    for name in ("a", "b"):
        child("member", url=url, kind=f"receivers/{name}", member_id=name).hear()
    assert sorted(membership.live_members(session, LeaseObserver(session))) == ["a", "b"]


def test_a_killed_process_of_this_host_is_replaced_at_once(child, url):
    first = child("member", url=url, **SENDER, lease_ttl=600.0)
    assert first.hear()["incarnation"] == 1
    first.kill()
    second = child("member", url=url, **SENDER, lease_ttl=600.0)
    assert second.hear(20)["incarnation"] == 2


def test_a_process_that_left_is_replaced_at_once(child, url):
    first = child("member", url=url, **REPLICA, lease_ttl=600.0)
    first.hear()
    first.tell("leave")
    assert first.end() == 0
    assert child("member", url=url, **REPLICA, lease_ttl=600.0).hear(20)["incarnation"] == 2


def test_a_dead_process_of_another_host_is_replaced_after_its_lease(child, url, session):
    gone = child("claim_without_lease", url=url, **SENDER)
    assert gone.hear()["incarnation"] == 1
    assert gone.end() == 0
    began = time.monotonic()
    assert claim(session).incarnation == 2
    assert 0.9 < time.monotonic() - began < 4  # its lease was 1 s


def test_a_stopped_process_loses_its_name_after_its_lease_and_keeps_its_number(child, url):
    first = child("member", url=url, **REPLICA, lease_ttl=0.5)
    first.hear()
    first.signal(signal.SIGSTOP)
    second = child("member", url=url, **REPLICA, lease_ttl=0.5)
    assert second.hear()["incarnation"] == 2
    first.signal(signal.SIGCONT)
    third = child("member", url=url, **REPLICA).hear()
    assert "incarnation 2)" in third["message"]


def test_claiming_waits_no_longer_than_the_callers_deadline(session, child, url):
    stopped = child("member", url=url, **SENDER, lease_ttl=60.0)
    stopped.hear()
    stopped.signal(signal.SIGSTOP)
    steps = membership.claim(
        session,
        LeaseObserver(session),
        "senders",
        member_id="sender",
        world_size=1,
        backend="memory",
        lease_ttl=1.0,
    )
    with pytest.raises(
        TransferTimeout, match="no end of the lease of the previous 'sender' within 0"
    ):
        drive(steps, watch(0.5))


@pytest.mark.parametrize("shown", ["its directory", "its name"])
def test_of_two_that_claim_at_once_one_wins_whatever_the_store_shows_half_made(
    session, monkeypatch, shown
):
    """Stores may list an incarnation, or its record, just before the record is there."""
    children = session.store.children
    early = {"its directory": {"senders": ["000001"]}, "its name": {"senders/000001": ["record"]}}
    listed = {"senders": ["000001"], **early[shown]}
    monkeypatch.setattr(
        session.store, "children", lambda prefix: listed.get(prefix) or children(prefix)
    )
    assert claim(session).incarnation == 1


def test_a_number_that_is_always_taken_ends_at_the_deadline(session, monkeypatch):
    monkeypatch.setattr(session.store, "create", lambda key, value: False)
    steps = membership.claim(
        session,
        LeaseObserver(session),
        "senders",
        member_id="sender",
        world_size=1,
        backend="memory",
        lease_ttl=1.0,
    )
    with pytest.raises(TransferTimeout, match="no free incarnation of 'sender'"):
        drive(steps, watch(0.2))


def test_an_incarnation_whose_record_was_deleted_is_not_taken_again(session):
    first = claim(session)
    session.write(first.key("lease"), Lease(1))
    session.delete(first.key("record"))
    assert claim(session).incarnation == 2


def test_old_incarnations_of_a_receiver_are_forgotten_and_those_of_a_sender_kept(session):
    for kind in ("senders", "receivers/a"):
        for _ in range(5):
            membership.leave(session, claim(session, kind))
    assert session.numbers("senders") == [1, 2, 3, 4, 5]
    assert session.numbers("receivers/a") == [4, 5]


# ---------------------------------------------------------------------- leases


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def remote(session: Session, ttl: float = 2.0, world_size: int = 1) -> Member:
    """A member of another host: only its lease tells whether it lives."""
    record = MemberRecord(
        "a", 1, world_size, "memory", ttl, host="far", pid=1, process="", created=0.0, nonce=""
    )
    session.write("receivers/a/000001/record", record)
    return Member("receivers/a", record)


def test_a_member_is_dead_when_its_counter_stood_still_for_its_lease(session):
    member, clock = remote(session), Clock()
    observer = LeaseObserver(session, clock)
    session.write(member.key("lease"), Lease(7))
    assert observer.is_alive(member)
    clock.now += 2.0
    assert observer.is_alive(member)
    clock.now += 0.1
    assert not observer.is_alive(member)
    session.write(member.key("lease"), Lease(8))
    assert observer.is_alive(member)


@pytest.mark.parametrize("how", ["expires", "is put back"])
def test_a_lease_that_goes_or_falls_back_is_no_sign_of_life(session, how):
    """Stores may drop a lease, or come back with an older one; so may whoever replays one."""
    member, clock = remote(session), Clock()
    observer = LeaseObserver(session, clock)
    session.write(member.key("lease"), Lease(6))
    older = session.store.get(member.key("lease"))
    session.write(member.key("lease"), Lease(7))
    assert observer.is_alive(member)
    clock.now += 1.5
    if how == "expires":
        session.delete(member.key("lease"))
    else:
        session.store.put(member.key("lease"), older)
    assert observer.is_alive(member)
    clock.now += 1
    assert not observer.is_alive(member)
    session.write(member.key("lease"), Lease(8))
    assert observer.is_alive(member)


def test_time_in_which_the_session_did_not_answer_counts_against_nobody(session, monkeypatch):
    member, clock = remote(session), Clock()
    session.silence = Silence(clock)
    observer = LeaseObserver(session, clock)
    session.write(member.key("lease"), Lease(1))
    assert observer.is_alive(member)
    get = session.store.get

    def away(key):
        raise SessionError("away")

    clock.now += 0.5
    monkeypatch.setattr(session.store, "get", away)
    for _ in range(3):
        with pytest.raises(SessionError, match="away"):
            observer.is_alive(member)
        clock.now += 10

    def slow(key):
        monkeypatch.setattr(session.store, "get", get)
        clock.now += 5
        return get(key)

    monkeypatch.setattr(session.store, "get", slow)
    assert observer.is_alive(member)  # half a second of its two are used, and no more
    clock.now += 1.5
    assert observer.is_alive(member)
    clock.now += 0.1
    assert not observer.is_alive(member)


def test_a_session_that_never_answers_in_time_does_not_hide_a_loss_for_ever(session, monkeypatch):
    member, clock = remote(session), Clock()
    session.silence = Silence(clock)
    observer = LeaseObserver(session, clock)
    session.write(member.key("lease"), Lease(1))
    get = session.store.get

    def slow(key):
        clock.now += 3
        return get(key)

    monkeypatch.setattr(session.store, "get", slow)
    assert observer.is_alive(member)
    for _ in range(30):
        alive = observer.is_alive(member)
    assert not alive


def test_a_member_that_never_renewed_gets_one_lease_of_time(session):
    member, clock = remote(session), Clock()
    observer = LeaseObserver(session, clock)
    assert observer.is_alive(member)
    clock.now += 2.1
    assert not observer.is_alive(member)


def test_a_member_that_closed_is_gone_at_once(session):
    member = remote(session)
    session.write(member.key("lease"), Lease(1))
    session.write(member.key("closed"), Closed())
    assert not LeaseObserver(session, Clock()).is_alive(member)


def look(siblings: Siblings, clock: Clock, seconds: float) -> str:
    """What rank 0 says of the other ranks when it has looked for so long."""
    for _ in range(round(seconds / 0.1)):
        clock.now += 0.1
        failure = siblings.failure()
        if failure is not None:
            return str(failure)
    return ""


def test_a_rank_that_stands_still_is_missed_by_its_rank_0(session):
    member, clock = remote(session, world_size=2), Clock()
    siblings = Siblings(session, member, clock)
    session.write(member.lease_key(1), Lease(3))
    assert not look(siblings, clock, 1.9)
    session.write(member.lease_key(1), Lease(4))
    assert not look(siblings, clock, 2.0)
    said = look(siblings, clock, 1.0)
    assert said.startswith("a rank 1 is gone")
    assert "lease of 2 s" in said
    session.write(member.lease_key(1), Lease(5))
    clock.now += 1  # it looks again
    assert not look(siblings, clock, 1.0), "it has woken up"


def test_a_rank_that_was_missed_isnt_once_it_is_awake_whoever_looks(session):
    """Nobody looks between two calls, and the next one may begin before the first look."""
    member, clock = remote(session, world_size=3), Clock()
    siblings = Siblings(session, member, clock)
    for rank in (1, 2):
        session.write(member.lease_key(rank), Lease(3))
    assert look(siblings, clock, 3.0)
    assert siblings.missing({1, 2}) == {1, 2}
    assert siblings.missing({2}) == {2}
    session.write(member.lease_key(1), Lease(4))
    assert siblings.missing({1, 2}) == {2}, "it has stood still since"
    clock.now += 0.5
    assert "rank 2 is gone" in str(siblings.failure())
    assert siblings.lost == {2}


def test_a_rank_isnt_lost_by_time_in_which_its_rank_0_did_not_look(session):
    """Both may have stood still together, with their machine."""
    member, clock = remote(session, world_size=2), Clock()
    siblings = Siblings(session, member, clock)
    session.write(member.lease_key(1), Lease(3))
    assert siblings.failure() is None
    clock.now += 3600
    assert not look(siblings, clock, 1.9)
    assert look(siblings, clock, 1.0)


def test_a_rank_renews_a_lease_of_its_own(session):
    member = remote(session, ttl=0.2)
    keeper = LeaseKeeper(session, member, rank=3)
    keeper.start()
    try:
        place = member.lease_key(3)
        watch(10).until(lambda: session.read(place, Lease).counter > 2, "renewals")
    finally:
        keeper.stop()
    assert session.read(member.lease_key(), Lease) is None


def test_the_keeper_renews_runs_its_watch_and_ends_with_its_thread(session):
    member, seen = remote(session, ttl=0.2), []
    keeper = LeaseKeeper(session, member, lambda: seen.append(True))
    keeper.start()
    watch(10).until(lambda: len(seen) > 2, "looks")
    watch(10).until(lambda: session.read(member.key("lease"), Lease).counter > 2, "renewals")
    keeper.stop()
    keeper.stop()
    renewed, looks = session.read(member.key("lease"), Lease).counter, len(seen)
    time.sleep(0.3)
    assert (session.read(member.key("lease"), Lease).counter, len(seen)) == (renewed, looks)


def test_a_look_around_that_hangs_does_not_end_the_lease(session):
    member, hangs = remote(session, ttl=0.2), threading.Event()
    keeper = LeaseKeeper(session, member, lambda: hangs.wait(10) and None)
    keeper.start()
    try:
        watch(10).until(lambda: session.read(member.key("lease"), Lease).counter > 5, "renewals")
    finally:
        hangs.set()
        keeper.stop()


def test_a_store_that_is_away_for_a_moment_does_not_end_the_lease(session, monkeypatch, caplog):
    member = remote(session, ttl=0.2)
    put, failures = session.store.put, iter(range(2))

    def away(key: str, value: bytes, *, durable: bool = True) -> None:
        if next(failures, None) is not None:
            raise SessionError("the store is away")
        put(key, value, durable=durable)

    keeper = LeaseKeeper(session, member)
    keeper.start()
    try:
        monkeypatch.setattr(session.store, "put", away)
        watch(10).until(lambda: session.read(member.key("lease"), Lease).counter > 3, "renewals")
    finally:
        keeper.stop()
    assert "the store is away" in caplog.text


def test_a_process_knows_itself_and_its_dead(child, url):
    assert not process.is_gone(process.identity())
    assert not process.is_gone("")
    assert not process.is_gone("another-boot/pid:[1]/1/1")
    other = child("member", url=url, **SENDER)
    pid = other.hear()["pid"]
    start = process._start_time(pid)
    identity = f"{process.this_host()}/{pid}/{start}"
    assert not process.is_gone(identity)
    assert process.is_gone(f"{process.this_host()}/{pid}/{int(start) + 1}"), "a number used again"
    os.kill(pid, signal.SIGKILL)
    watch(10).until(lambda: process.is_gone(identity), "end of the process, a zombie by now")
    other.kill()
    assert process.is_gone(identity)


# ---------------------------------------------------------------------- ranks of one side


def test_ranks_join_the_incarnation_of_their_rank_0_in_any_order(child, url):
    ranks = [child("member", url=url, **REPLICA, rank=rank, world_size=3) for rank in (2, 0, 1)]
    assert [rank.hear()["incarnation"] for rank in ranks] == [1, 1, 1]


def test_a_replica_with_a_missing_rank_is_not_in_and_says_who_is_missing(child, url, session):
    missing = child("member", url=url, **REPLICA, rank=0, world_size=3, timeout=2.0)
    joiner = child("member", url=url, **REPLICA, rank=2, world_size=3, timeout=2.0)
    assert membership.live_members(session, LeaseObserver(session)) == {}
    answer = missing.hear()
    assert answer["error"] == "TransferTimeout"
    assert answer["message"].startswith("no ranks of 'a' from rank 1 within 2 s: ")
    assert "no confirmation of 'a' by its rank 0 from rank 0 within 2 s" in joiner.hear()["message"]


def test_ranks_of_an_earlier_run_are_not_counted_for_the_next(child, url):
    first = [child("member", url=url, **REPLICA, rank=r, world_size=2) for r in range(2)]
    for rank in first:
        rank.hear()
    first[0].kill()
    restarted = child("member", url=url, **REPLICA, rank=0, world_size=2, timeout=20.0)
    stale = first[1]  # lives on, but belongs to the run whose rank 0 is dead
    joined = child("member", url=url, **REPLICA, rank=1, world_size=2, timeout=20.0)
    assert restarted.hear()["incarnation"] == 2
    assert joined.hear()["incarnation"] == 2
    assert stale.process.poll() is None


def test_a_rank_waits_for_a_rank_0_of_its_own_world_size(child, url, session):
    child("member", url=url, **REPLICA, rank=0, world_size=1).hear()
    other = child("member", url=url, **REPLICA, rank=1, world_size=2, timeout=1.5)
    assert other.hear()["message"].startswith(
        "no rank 0 of 'a' with world size 2 (found one of 1) from rank 0 within 1.5 s: "
    )


def test_a_rank_that_joined_a_dead_incarnation_follows_its_rank_0_to_the_next(session):
    first = claim(session, "receivers/a", world_size=2)
    steps = membership.join(session, "receivers/a", rank=1, world_size=2, member_id="a")
    next(steps)
    assert session.numbers(first.key("ranks")) == [1]
    session.write(first.key("closed"), Closed())
    second = claim(session, "receivers/a", world_size=2)
    next(steps)
    assert session.numbers(second.key("ranks")) == [1]
    drive(membership.confirm(session, second), watch())
    assert drive(steps, watch()) == second


def test_a_second_process_of_one_rank_does_not_join_the_same_incarnation(session):
    first = claim(session, "receivers/a", world_size=2)
    session.write(first.key("ranks", "1"), RankReport())
    session.write(first.key("joined"), RankReport())
    steps = membership.join(session, "receivers/a", rank=1, world_size=2, member_id="a")
    with pytest.raises(TransferTimeout, match="no confirmation of 'a' by its rank 0"):
        drive(steps, watch(0.3))
