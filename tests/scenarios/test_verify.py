"""Digests: a flipped bit is found, and digests don't depend on the way the bytes took."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
from process_rig import Fleet, RemoteError, Side

MakeFleet = Callable[..., Fleet]


def exchange(sender: Side, version: int, *replicas: Side) -> tuple[str, str]:
    """Digests of both sides."""
    receiving = [replica.start("receive", minimum=version) for replica in replicas]
    sending = sender.start("send", version=version, wait="applied")
    received = [calls.results()[0] for calls in receiving]
    sent = sending.results()
    assert [replica.holds(version) for replica in replicas] == [version] * len(replicas)
    total = sum(int(report["digest"] or "0", 16) for report in sent) % (1 << 64)
    assert all(int(report["digest"] or "0", 16) == total for report in received)
    return sent[0]["digest"], received[0]["digest"]


@pytest.mark.parametrize("verify", ["sample", "full"])
@pytest.mark.parametrize("point", ["sender.put", "receiver.fetched"])
@pytest.mark.parametrize("staged", [False, True])
def test_a_bit_flipped_on_the_way_is_found_on_the_receiving_side(
    make_fleet: MakeFleet, backend: str, verify: str, point: str, staged: bool
) -> None:
    """Flipped after the owner's digest and before the receiver's."""
    fleet = make_fleet(f"stepped-{backend}")
    sender, replica = fleet.sender(verify=verify), fleet.receiver(staged=staged)
    exchange(sender, 1, replica)
    side = sender if point == "sender.put" else replica
    # A sample takes every element of a small tensor, and some of each part of a large one.
    side.first.arm(point, "flip-small" if verify == "sample" else "flip")
    sending = sender.start("send", version=2, wait="applied")
    error = replica.start("receive", minimum=2).error()
    assert error.kind == "VerificationError"
    assert "version 2" in error.first
    assert "tensor '" in error.first
    assert "send it again" in error.first
    assert sending.error().kind in ("VerificationError", "PeerLost")
    if staged:  # nothing is written that wasn't verified
        assert replica.version == 1
        assert replica.holds(1, 2) == 1
        assert replica.tainted is None
    else:
        assert replica.version is None
        assert replica.tainted is not None
    exchange(sender, 3, replica)


def test_without_verification_reports_have_no_digest(fleet: Fleet) -> None:
    sender, replica = fleet.sender(verify="off"), fleet.receiver()
    assert exchange(sender, 1, replica) == ("", "")


@pytest.mark.parametrize("verify", ["sample", "full"])
def test_digests_are_equal_over_every_backend_session_and_number_of_ranks(
    make_fleet: MakeFleet, verify: str
) -> None:
    digests = set()
    seed = None
    for i, (backend, scheme, ranks) in enumerate(
        [
            ("memory", "file", 1),
            ("filesystem", "file", 1),
            ("memory", "tcp", 2),
            ("filesystem", "tcp", 2),
        ]
    ):
        fleet = make_fleet(backend, scheme, name=f"run{i}")
        seed = fleet.seed if seed is None else seed
        fleet.seed = seed
        sender = fleet.sender(ranks=ranks, verify=verify, group_bytes=(4 << 10) * (i + 1))
        replica = fleet.receiver(staged=bool(i % 2))
        received = [exchange(sender, version, replica)[1] for version in (1, 2, 5)]
        assert len(set(received)) == 3
        digests.add(tuple(received))
    assert len(digests) == 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_replicas_laid_out_alike_that_hold_different_bits_are_named(
    make_fleet: MakeFleet, backend: str, ranks: int
) -> None:
    fleet = make_fleet(backend)
    sender = fleet.sender(min_receivers=3)
    good, bad = fleet.receiver("good", ranks=ranks), fleet.receiver("bad", ranks=ranks)
    unlike = fleet.receiver("unlike", ranks=3 - ranks)  # nothing to compare it with
    bad.workers[-1].arm("target.committed", "flip-small")
    receiving = [side.start("receive") for side in (good, bad, unlike)]
    sending = sender.start("send", version=1, wait="applied")
    error = sending.error()
    assert error.kind == "VerificationError"
    assert "'good'" in error.first
    assert "'bad'" in error.first
    assert "different bits after version 1" in error.first
    for calls in receiving[:2]:
        calls.results()
    with contextlib.suppress(RemoteError):  # it may hear of the abort before it is done
        receiving[2].results()
    receiving = [side.start("receive") for side in (good, bad, unlike)]
    assert sender.send(1, wait="applied")[0]["attempt"] == 2
    for calls in receiving:
        calls.results()
    assert (good.holds(1), bad.holds(1), unlike.holds(1)) == (1, 1, 1)
