"""Connections that a network breaks between two sides that both live."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from nixl_rig import WAYS, NixlFleet, Way, exchange
from process_rig import Side, until

MakeFleet = Callable[..., NixlFleet]
PUSH, PULL = (way for way in WAYS if way.path == "TCP")
CASES = [
    (PUSH, "sender", False, ()),
    (PUSH, "replica", True, ()),
    (PULL, "sender", True, ()),
    (PULL, "replica", False, ()),
    (PUSH, "sender", True, pytest.mark.soak),
    (PUSH, "replica", False, pytest.mark.soak),
    (PULL, "sender", False, pytest.mark.soak),
    (PULL, "replica", True, pytest.mark.soak),
]


def attempt(sender: Side, version: int, *replicas: Side) -> bool:
    """Whether a version goes through; else everybody says so, and nobody pretends."""
    receiving = [each.start("receive", minimum=version, timeout=20.0) for each in replicas]
    sending = sender.start("send", version=version, wait="applied", timeout=20.0)
    until(lambda: sending.done and all(calls.done for calls in receiving), "all ends", 30)
    through = "error" not in sender.first.answers[sending.calls[0].number]
    for replica in replicas:
        if replica.version is not None or through:
            assert replica.holds(*range(1, version + 1)) == replica.version
    if not through:
        assert "TransferError" in sending.error().kinds
    return through


@pytest.mark.parametrize(
    ("way", "who", "zero_copy"),
    [
        pytest.param(way, who, live, marks=marks, id=f"{way}-{who}-{'live' if live else 'staged'}")
        for way, who, live, marks in CASES
    ],
)
def test_a_broken_connection_ends_no_more_than_what_is_under_way(
    make_fleet: MakeFleet, way: Way, who: str, zero_copy: bool
) -> None:
    fleet = make_fleet(way)
    config = {"zero_copy": zero_copy}
    sender = fleet.sender(config=config)
    replica, other = fleet.receiver(config=config), fleet.receiver("other", config=config)
    exchange(sender, 1, replica, other)
    broken = sender if who == "sender" else replica
    assert broken.ask("break_connections") > 0
    # Each side of each connection may notice in an attempt of its own.
    assert any(attempt(sender, version, replica, other) for version in range(2, 8))
    for version in (8, 9):
        exchange(sender, version, replica, other)
    assert replica.ask("nixl")["aside"] == 0


def test_what_a_broken_connection_leaves_behind_ends_with_its_peer(make_fleet: MakeFleet) -> None:
    """Who can't say any more that it reads no longer is believed when its process has ended."""
    fleet = make_fleet(PUSH)
    sender, replica = fleet.sender(), fleet.receiver()
    exchange(sender, 1, replica)
    replica.first.arm("receiver.fetch", after=1)
    replica.start("receive", minimum=2)
    sending = sender.start("send", version=2, wait="applied")
    replica.first.until_at("receiver.fetch")
    assert sender.ask("break_connections", now=True) > 0
    replica.first.kill()
    assert "TransferError" in sending.error().kinds
    sender.close()
    until(lambda: "weightwire-nixl-aside" not in sender.ask("usage")["threads"], "it ends", 10)
