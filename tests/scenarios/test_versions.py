"""Versions in a row, from every shape of trainer to every shape of replica."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from process_rig import Fleet

MakeFleet = Callable[..., Fleet]


@pytest.mark.parametrize(("senders", "receivers"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_versions_in_a_row_arrive_bit_for_bit(
    make_fleet: MakeFleet, backend: str, scheme: str, senders: int, receivers: int
) -> None:
    fleet = make_fleet(backend, scheme)
    sender = fleet.sender(ranks=senders)
    replica = fleet.receiver(ranks=receivers)
    assert replica.holds(1) == "pristine"
    for version in (1, 2, 5):
        sending = sender.start("send", version=version, wait="applied")
        reports = replica.receive()
        sent = sending.results()
        assert replica.holds(version) == version
        assert replica.version == version
        assert [report["version"] for report in (*reports, *sent)] == [version] * len(
            (*reports, *sent)
        )
        total = sum(int(report["digest"], 16) for report in sent) % (1 << 64)
        assert [int(report["digest"], 16) for report in reports] == [total] * receivers
        assert sum(r["nbytes"] for r in sent) == reports[0]["nbytes"]


@pytest.mark.parametrize("count", [2, 3])
def test_every_receiver_gets_every_version(make_fleet: MakeFleet, backend: str, count: int) -> None:
    fleet = make_fleet(backend)
    sender = fleet.sender(min_receivers=count)
    replicas = [fleet.receiver(f"replica-{i}") for i in range(count)]
    for version in (3, 4):
        sending = sender.start("send", version=version, wait="applied")
        receiving = [replica.start("receive") for replica in replicas]
        report = sending.results()[0]
        assert [calls.results()[0]["version"] for calls in receiving] == [version] * count
        assert [replica.holds(3, 4) for replica in replicas] == [version] * count
        assert list(report["roster"]) == [f"replica-{i}" for i in range(count)]
