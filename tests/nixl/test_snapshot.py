"""``snapshot="host"``: late receivers are served from the trainer's copies, by real NIXL."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from nixl_rig import WAYS, NixlFleet, Way, exchange
from process_rig import until

import weightwire
from weightwire import snapshot
from weightwire.errors import ConfigError, UnsupportedOperation
from weightwire.snapshot import HostCopies
from weightwire.sources import MappingSource, Resolver, WireRules

MakeFleet = Callable[..., NixlFleet]
KEPT = {"snapshot": "host"}


@pytest.mark.parametrize(
    ("trainers", "ranks", "way"),
    [(1, 1, WAYS[0]), (2, 2, WAYS[0]), (2, 1, WAYS[1])],
    ids=["1-to-1-cma", "2-to-2-cma", "2-to-1-tcp"],
)
def test_a_joiner_gets_the_newest_finished_version_without_the_trainer(
    make_fleet: MakeFleet, trainers: int, ranks: int, way: Way
) -> None:
    fleet = make_fleet(way)
    sender, early = fleet.sender(ranks=trainers, config=KEPT), fleet.receiver("early", config=KEPT)
    for version in (1, 2):
        exchange(sender, version, early)
    sender.call("replace_storage", version=3)  # what the trainer holds now is no version yet
    late = fleet.receiver("late", ranks=ranks, config=KEPT)
    assert late.version is None
    report = late.receive()[0]
    assert report["version"] == 2
    assert report["path"].endswith("to catch up")
    assert late.holds(1, 2, 3) == 2
    exchange(sender, 3, early, late)
    again = fleet.receiver("again", config=KEPT)
    assert again.receive(minimum=3)[0]["version"] == 3
    assert again.holds(1, 2, 3) == 3


@pytest.mark.parametrize("trainers", [1, 2])
def test_a_joiner_in_the_midst_of_a_version_gets_the_one_before(
    make_fleet: MakeFleet, trainers: int
) -> None:
    fleet = make_fleet()
    sender, early = fleet.sender(ranks=trainers, config=KEPT), fleet.receiver("early", config=KEPT)
    exchange(sender, 1, early)
    sender.first.arm("sender.put")
    receiving = early.start("receive", minimum=2)
    sending = sender.start("send", version=2, wait="applied")
    sender.first.until_at("sender.put")
    late = fleet.receiver("late", config=KEPT)
    assert late.receive()[0]["version"] == 1
    assert late.holds(1, 2) == 1
    sender.first.release("sender.put")
    sending.results()
    receiving.results()
    assert early.holds(1, 2) == 2
    exchange(sender, 3, early, late)


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_reader_that_is_lost_holds_the_snapshot_for_a_moment_only(
    make_fleet: MakeFleet, how: str
) -> None:
    """The next version comes, takes its place, and is served."""
    fleet = make_fleet()
    sender = fleet.sender(config=KEPT, max_receivers=1)
    early = fleet.receiver("early", config=KEPT)
    exchange(sender, 1, early)
    lost = fleet.receiver("lost", config=KEPT)
    lost.first.arm("receiver.fetch")
    reading = lost.start("receive")
    lost.first.until_at("receiver.fetch")
    if how == "killed":
        lost.first.kill()
    else:
        lost.first.stop()
    exchange(sender, 2, early)
    other = fleet.receiver("other", config=KEPT)
    assert other.receive()[0]["version"] == 2
    assert other.holds(1, 2) == 2
    if how == "stopped":
        lost.first.resume()
        lost.first.release("receiver.fetch")
        until(lambda: reading.done, "the sleeper's call ends", 20)
        assert lost.version in (None, 2)
        if lost.version is None:
            assert "TransferError" in reading.error().kinds
            assert lost.receive()[0]["version"] == 2
        assert lost.holds(1, 2) == 2


def test_a_trainer_that_closes_ends_what_is_read(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    sender, early = fleet.sender(config=KEPT), fleet.receiver("early", config=KEPT)
    exchange(sender, 1, early)
    late = fleet.receiver("late", config=KEPT)
    late.first.arm("receiver.fetch")
    reading = late.start("receive")
    late.first.until_at("receiver.fetch")
    sender.close()
    late.first.release("receiver.fetch")
    assert "TransferError" in reading.error().kinds
    assert late.version is None
    sender = fleet.sender(workers=sender.workers, config=KEPT)
    exchange(sender, 1, early, late)


def test_a_joiner_that_takes_an_offer_meanwhile_is_not_waited_for(make_fleet: MakeFleet) -> None:
    """It asked for the snapshot, and got the next version: the snapshot's sender goes on."""
    fleet = make_fleet()
    sender, early = fleet.sender(config=KEPT), fleet.receiver("early", config=KEPT)
    for version in range(1, 5):
        late = fleet.receiver(f"late-{version}", config=KEPT)
        exchange(sender, version, early, late)
        late.close()
    last = fleet.receiver("last", config=KEPT)
    assert last.receive()[0]["version"] == 4


# ---------------------------------------------------------------------- copies


def test_memory_is_looked_at_before_it_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(snapshot, "available_nbytes", lambda: 100)
    with pytest.raises(ConfigError) as caught:
        weightwire.open_sender(
            {"backend": "nixl", **KEPT},
            session=f"file://{tmp_path / 'session'}",
            source={"w": torch.zeros(64)},
            wire_dtype="bfloat16",
        )
    assert str(caught.value) == (
        "snapshot='host' takes 128 bytes of host memory on this rank, 100 are available: leave it "
        "out and use catch_up, or give the trainer more memory"
    )


def test_copies_have_the_dtype_of_the_wire_and_follow_the_layout() -> None:
    weights = {"w": torch.randn(3, 4), "scalar": torch.tensor(3), "none": torch.zeros(0, 2)}
    weights["tied"] = weights["w"]
    source, rules = MappingSource(weights), WireRules("bfloat16")
    copies = HostCopies(source, rules)
    resolver = Resolver(source, rules)
    copies.take(resolver.resolve())
    found = copies.tensors()
    assert torch.equal(found["w"].local, weights["w"].bfloat16())
    assert found["tied"] is found["w"]
    assert found["scalar"].local == 3
    assert copies.nbytes == 24 + 8
    kept = found["w"].local
    weights["w"].add_(1)
    assert not torch.equal(kept, weights["w"].bfloat16())
    weights["w"] = weights["tied"] = torch.randn(5, 4)
    copies.take(resolver.resolve())
    assert torch.equal(copies.tensors()["w"].local, weights["w"].bfloat16())


def test_what_cant_be_kept_is_refused(tmp_path) -> None:
    url = f"file://{tmp_path / 'session'}"
    stream = weightwire.StreamingSource(lambda: iter([("w", torch.zeros(4))]))
    with pytest.raises(UnsupportedOperation, match="snapshot='host' needs a source whose tensors"):
        weightwire.open_sender({"backend": "nixl", **KEPT}, session=url, source=stream)
    with pytest.raises(ConfigError, match="snapshot='host' and catch_up serve late receivers"):
        weightwire.open_sender(
            {"backend": "nixl", **KEPT},
            session=url,
            source={"w": torch.zeros(4)},
            catch_up="filesystem",
        )
    with pytest.raises(UnsupportedOperation, match="'nccl' has no option 'snapshot'"):
        weightwire.open_sender(
            {"backend": "nccl", **KEPT}, session=url, source={"w": torch.zeros(4)}
        )
