"""Corrupted bytes are found, from the receiver's own memory."""

from __future__ import annotations

from weightwire_conformance.rig import Fleet, Side
from weightwire_conformance.scenario import scenario

__all__: list[str] = []

_MEMORY = {"in-place": {"staged": False}, "staged": {"staged": True}}


def is_found(fleet: Fleet, sender: Side, replica: Side, harmed: Side, point: str, how: str) -> None:
    """The kit corrupts one group at the contract's edge: both sides hear of it."""
    fleet.exchange(sender, 1, replica)
    harmed.arm(point, how, after=1)
    sending = sender.start("send", version=2, wait="applied")
    error = replica.start("receive").error()
    assert "VerificationError" in error.kinds, error
    refused = sending.error()
    assert "WeightWireError" in refused.kinds, refused
    assert replica.version is None, "corrupted bytes are claimed to be a version"
    fleet.exchange(sender, 3, replica)


@scenario(cases=_MEMORY)
def a_bit_flipped_under_way_is_found(fleet: Fleet, staged: bool) -> None:
    sender, replica = fleet.sender(), fleet.receiver(staged=staged)
    is_found(fleet, sender, replica, sender, "sender.put", "flip")


@scenario(cases=_MEMORY)
def a_bit_flipped_on_arrival_is_found(fleet: Fleet, staged: bool) -> None:
    sender, replica = fleet.sender(), fleet.receiver(staged=staged)
    is_found(fleet, sender, replica, replica, "receiver.fetched", "flip")


@scenario
def a_wrong_seal_is_found(fleet: Fleet) -> None:
    """The digest that its owner sealed reaches the receiver as it is."""
    sender, replica = fleet.sender(), fleet.receiver()
    is_found(fleet, sender, replica, sender, "sender.put", "misseal")
