"""Observers hear of every version once on each side, and can't harm one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from process_rig import Fleet, Side

MakeFleet = Callable[..., Fleet]


def exchange(sender: Side, version: int, replica: Side) -> str:
    receiving = replica.start("receive", minimum=version)
    sending = sender.start("send", version=version, wait="applied")
    digest = receiving.results()[0]["digest"]
    sending.results()
    assert replica.holds(version) == version
    return digest


def seen(side: Side) -> list[list[dict[str, Any]]]:
    return side.call("observed")


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_each_side_is_told_once_a_version_on_its_rank_0(
    make_fleet: MakeFleet, backend: str, bad: bool, ranks: int
) -> None:
    fleet = make_fleet(backend)
    sender, replica = fleet.sender(ranks=ranks), fleet.receiver(ranks=ranks)
    for side in (sender, replica):
        side.call("observe", bad=bad)
    digests = [exchange(sender, version, replica) for version in (1, 2)]
    published, *others = seen(sender)
    assert [record["hook"] for record in published] == ["published"] * 2
    assert [record["version"] for record in published] == [1, 2]
    assert {(record["role"], record["member"]) for record in published} == {("sender", "sender")}
    assert {record["session"] for record in published} == {fleet.url}
    applied, *more = seen(replica)
    assert [record["hook"] for record in applied] == ["applied"] * 2
    assert [record["version"] for record in applied] == [1, 2]
    assert {(record["role"], record["member"]) for record in applied} == {("receiver", "replica-0")}
    if ranks == 1:
        assert [record["digest"] for record in applied] == digests
        assert [record["digest"] for record in published] == digests
    assert all(records == [] for records in [*others, *more])


@pytest.mark.parametrize("bad", [False, True])
def test_an_aborted_version_is_told_with_its_error(fleet: Fleet, bad: bool) -> None:
    sender, replica = fleet.sender(), fleet.receiver()
    for side in (sender, replica):
        side.call("observe", bad=bad)
    replica.first.arm("target.commit", "raise")
    receiving = replica.start("receive")
    sending = sender.start("send", version=1, wait="applied")
    assert receiving.error().kind == "Planned"
    assert sending.error().kind == "PeerLost"
    exchange(sender, 2, replica)
    assert [(r["hook"], r["version"], r["error"]) for r in seen(replica)[0]] == [
        ("aborted", 1, "Planned"),
        ("applied", 2, None),
    ]
    assert [(r["hook"], r["version"], r["error"]) for r in seen(sender)[0]] == [
        ("aborted", 1, "PeerLost"),
        ("published", 2, None),
    ]
