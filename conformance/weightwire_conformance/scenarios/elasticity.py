"""Coming, going and failing again and again costs the others nothing."""

from __future__ import annotations

from typing import Any

from weightwire_conformance.capabilities import receivers
from weightwire_conformance.rig import Fleet
from weightwire_conformance.scenario import scenario
from weightwire_conformance.scenarios.flat import same, usage

__all__: list[str] = []


@scenario(need=receivers(2), cases={"6": {"count": 6}, "50": {"count": 50}})
def joins_and_leaves_leave_the_others_flat(fleet: Fleet, count: int) -> None:
    """One receiver stays, another one comes and goes between the versions."""
    sender, stays = fleet.sender(), fleet.receiver("stays")
    fleet.exchange(sender, 1, stays)
    comes = fleet.receiver("comes")
    before: dict[str, Any] = {}
    for turn in range(1, count + 1):
        fleet.exchange(sender, turn + 1, stays, comes)
        comes.close()
        if turn == (count + 1) // 2:
            before = {**usage(fleet, sender, stays), "files": 1 << 30}
        if turn < count:
            comes = fleet.receiver("comes", workers=comes.workers)
    same(before, lambda: usage(fleet, sender, stays))


@scenario
def a_receiver_that_fails_again_and_again_is_served_each_time(fleet: Fleet) -> None:
    """What a failed version held is given back, whoever still moved its bytes."""
    sender, replica = fleet.sender(), fleet.receiver()
    fleet.exchange(sender, 1, replica)
    before: dict[str, Any] = {}
    for turn in range(6):
        version = 2 + 2 * turn
        replica.arm("receiver.fetched", "raise", after=1)
        sending = sender.start("send", version=version, wait="applied")
        error = replica.start("receive", minimum=version).error()
        assert error.kind == "PlannedFailure", f"the engine's own error is hidden: {error}"
        sending.error()
        replica.must_be_whole()
        fleet.exchange(sender, version + 1, replica)
        if turn == 2:
            before = {**usage(fleet, sender, replica), "files": 1 << 30}
    same(before, lambda: usage(fleet, sender, replica))


@scenario
def reports_say_which_way_the_bytes_took(fleet: Fleet) -> None:
    """Both sides name the backend, and how it moved them."""
    sender, replica = fleet.sender(), fleet.receiver()
    sending = sender.start("send", version=1, wait="applied")
    received = replica.receive()[0]
    sent = sending.results()[0]
    for report in (sent, received):
        named, _, how = report["path"].partition(" (")
        assert named == fleet.backend, f"the path is {report['path']!r}"
        assert how.removesuffix(")").strip(), f"the path is {report['path']!r}"
    replica.must_hold(1)
