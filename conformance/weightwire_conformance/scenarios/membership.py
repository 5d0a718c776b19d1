"""Receivers and senders come and go."""

from __future__ import annotations

from weightwire_conformance.capabilities import (
    FINISHED_ARE_SERVED,
    NOBODY_NEED_LISTEN,
    receivers,
)
from weightwire_conformance.rig import Fleet
from weightwire_conformance.rig.fleet import wait_done
from weightwire_conformance.scenario import scenario

__all__: list[str] = []


@scenario(
    cases={"2": {"count": 2}, "3": {"count": 3}}, needs={"2": receivers(2), "3": receivers(3)}
)
def every_receiver_gets_every_version(fleet: Fleet, count: int) -> None:
    sender = fleet.sender(min_receivers=count)
    replicas = [fleet.receiver(f"replica-{i}") for i in range(count)]
    for version in (1, 2):
        fleet.exchange(sender, version, *replicas)


@scenario(need=receivers(2))
def a_receiver_joins_between_versions(fleet: Fleet) -> None:
    sender, early = fleet.sender(), fleet.receiver("early")
    fleet.exchange(sender, 1, early)
    joins = fleet.receiver("joins")
    joins.must_be_pristine()
    sending = sender.start("send", version=2, wait="applied")
    receiving = [early.start("receive"), joins.start("receive", minimum=2)]
    assert [calls.results()[0]["version"] for calls in receiving] == [2, 2]
    sending.results()
    early.must_hold(2)
    joins.must_hold(2)


@scenario(need=receivers(2))
def a_receiver_leaves_and_the_others_go_on(fleet: Fleet) -> None:
    sender = fleet.sender(min_receivers=2)
    stays, leaves = fleet.receiver("stays"), fleet.receiver("leaves")
    fleet.exchange(sender, 1, stays, leaves)
    leaves.close()
    sender.close()
    sender = fleet.sender(workers=sender.workers)
    for version in (2, 3):
        fleet.exchange(sender, version, stays)


@scenario(cases={"closed": {"how": "closed"}, "killed": {"how": "killed"}})
def a_receiver_comes_back(fleet: Fleet, how: str) -> None:
    """Under its old name it starts with nothing, and is current after a version."""
    sender, replica = fleet.sender(), fleet.receiver()
    fleet.exchange(sender, 1, replica)
    if how == "closed":
        replica.close()
    else:
        replica.kill()
    back = fleet.receiver(workers=replica.workers if how == "closed" else ())
    assert back.version is None, "a receiver that has nothing claims a version"
    sending = sender.start("send", version=2, wait="applied")
    back.receive(minimum=2)
    sending.results()
    back.must_hold(2)


@scenario(need=NOBODY_NEED_LISTEN)
def a_version_sent_to_nobody_is_read_later(fleet: Fleet) -> None:
    sender = fleet.sender(min_receivers=0)
    sender.send(1)
    replica = fleet.receiver()
    assert replica.receive()[0]["version"] == 1
    replica.must_hold(1)


@scenario(need=FINISHED_ARE_SERVED)
def a_late_receiver_catches_up_at_once(fleet: Fleet) -> None:
    sender = fleet.sender(min_receivers=0)
    for version in (1, 2, 3):
        sender.send(version, wait="published")
    late = fleet.receiver("late")
    assert late.ask("poll") == 3
    assert late.receive()[0]["version"] == 3
    late.must_hold(3)
    assert late.ask("poll") is None


@scenario(need=FINISHED_ARE_SERVED)
def finished_versions_outlive_their_sender(fleet: Fleet) -> None:
    sender = fleet.sender(min_receivers=0)
    sender.send(1, wait="published")
    sender.kill()
    late = fleet.receiver("late")
    assert late.receive()[0]["version"] == 1
    late.must_hold(1)


@scenario(need=FINISHED_ARE_SERVED)
def a_resumed_sender_voids_what_came_after(fleet: Fleet) -> None:
    """Versions up to ``resume_from`` stay readable, later ones don't."""
    sender = fleet.sender(min_receivers=0)
    for version in (1, 2):
        sender.send(version, wait="published")
    sender.close()
    sender = fleet.sender(workers=sender.workers, min_receivers=0, resume_from=1)
    late = fleet.receiver("late")
    got = late.receive()[0]["version"]
    assert got == 1, f"version {got} is served, and is void"
    late.must_hold(1)
    fleet.exchange(sender, 2, late)


@scenario(need=receivers(2))
def a_slow_receiver_gets_whole_versions(fleet: Fleet) -> None:
    """The others' speed is not its own; nothing is overwritten while it reads."""
    sender = fleet.sender("twins", min_receivers=2, group_bytes=2 << 10)
    fast, slow = (fleet.receiver(name, "twins") for name in ("fast", "slow"))
    slow.arm("receiver.fetch", "slow")
    for version in (1, 2):
        fleet.exchange(sender, version, fast, slow)


@scenario
def published_bytes_survive_their_sender(fleet: Fleet) -> None:
    """Once ``send`` has returned, the sender may die: who reads late gets all of it."""
    sender = fleet.sender("twins", group_bytes=2 << 10)
    replica = fleet.receiver(model="twins")
    replica.arm("receiver.fetch", after=1)
    receiving = replica.start("receive")
    sending = sender.start("send", version=1, wait="published")
    replica.first.until_at("receiver.fetch")
    early = wait_done(sending, 0.3)
    if early:
        sending.results()
        sender.kill()
    replica.arm("target.commit")
    replica.first.release("receiver.fetch")
    replica.first.until_at("target.commit")
    if not early:
        sending.results()
        sender.kill()
    replica.first.release("target.commit")
    assert receiving.results()[0]["version"] == 1
    replica.must_hold(1)


@scenario(cases={"closed": {"how": "closed"}, "killed": {"how": "killed"}})
def a_sender_starts_again(fleet: Fleet, how: str) -> None:
    """Its receivers stay, and take the new one's versions, whatever their numbers."""
    sender, replica = fleet.sender(), fleet.receiver()
    for version in (1, 2):
        fleet.exchange(sender, version, replica)
    if how == "closed":
        sender.close()
    else:
        sender.kill()
    again = fleet.sender(workers=sender.workers if how == "closed" else ())
    assert again.incarnation == sender.incarnation + 1
    for version in (1, 2):
        fleet.exchange(again, version, replica)
