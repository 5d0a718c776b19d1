"""Failures that users of weight synchronisation have met elsewhere, one test a kind."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from process_rig import Fleet, exchange, in_time, until

MakeFleet = Callable[..., Fleet]


def refuse_table(fleet: Fleet, source: str, target: str) -> str:
    """A receiver that declines: both sides raise, nothing changes.  Returns the message."""
    sender = fleet.sender(model=source)
    replica = fleet.receiver(model=target)
    receiving = replica.start("receive", timeout=5.0)
    sending = sender.start("send", version=1, timeout=5.0, wait="applied")
    error = receiving.error()
    assert error.kind == "TableMismatch"
    assert in_time(error, 5.0)
    sent = sending.error()
    assert sent.kind == "TableMismatch"
    assert "receiver 'replica-0' declined" in sent.first
    assert sent.seconds < 4
    assert replica.holds(1) == "pristine"
    assert replica.version is None
    assert replica.tainted is None
    return error.first


# ---------------------------------------------------------------------- names, ties, shapes


def test_tensors_that_the_trainer_doesnt_send_stay_bit_identical(fleet: Fleet) -> None:
    extra = "layers.0.extra.weight"
    sender = fleet.sender()
    replica = fleet.receiver(model="other-name", target_options={"untouched": [extra]})
    before = replica.ask("addresses")
    for version in (1, 2):
        receiving = replica.start("receive", minimum=version)
        sender.send(version)
        receiving.results()
        states = replica.ask("compare", version=version)
        assert states.pop(extra) == "pristine"
        assert set(states.values()) <= {"new"}
    assert replica.ask("addresses") == before


def test_wrapper_prefixes_are_stripped_at_any_depth(fleet: Fleet) -> None:
    sender, replica = fleet.sender(model="wrapped"), fleet.receiver(model="unwrapped")
    exchange(sender, 1, replica)
    exchange(sender, 2, replica)


def test_names_that_collide_without_their_wrappers_are_refused(fleet: Fleet) -> None:
    sender = fleet.sender(model="colliding")
    fleet.receiver(model="unwrapped")
    error = sender.start("send", version=1, fill=False).error()
    assert error.kind == "ConfigError"
    assert "'inner.weight'" in error.first
    assert "'module.inner.weight'" in error.first
    assert "rename one" in error.first


@pytest.mark.parametrize("target", ["tied", "untied"])
def test_a_tied_trainer_updates_every_name_of_the_tied_weight(fleet: Fleet, target: str) -> None:
    sender, replica = fleet.sender(model="tied"), fleet.receiver(model=target)
    for version in (1, 2):
        receiving = replica.start("receive", minimum=version)
        sender.send(version)
        receiving.results()
        states = replica.ask("compare", version=version)
        if target == "untied":
            # The head decides in a tied model: the embedding has its value.
            assert states.pop("embed.weight") == "other"
            hashes = replica.ask("same_bits", one="embed.weight", other="lm_head.weight")
            assert hashes is True
        assert set(states.values()) == {"new"}


def test_an_engine_that_ties_what_the_trainer_doesnt_is_refused(fleet: Fleet) -> None:
    first = refuse_table(fleet, "untied", "tied")
    assert "'embed.weight'" in first
    assert "'lm_head.weight'" in first
    assert "tie them at the trainer" in first


def test_a_vocabulary_padded_on_one_side_is_an_error_with_both_shapes(fleet: Fleet) -> None:
    first = refuse_table(fleet, "small", "padded-vocabulary")
    assert "'embed.weight'" in first
    assert "(3, 96)" in first
    assert "(4, 96)" in first


def test_one_misspelt_name_among_many_is_an_error_that_names_it(fleet: Fleet) -> None:
    first = refuse_table(fleet, "misspelt", "small")
    assert "'layers.3.up.weight'" in first
    assert "'layers.3.upp.weight'" in first


@pytest.mark.parametrize(
    ("target", "named"),
    [
        ("other-name", "layers.0.extra.weight"),
        ("other-shape", "(6, 96)"),
        ("other-dtype", "bfloat16"),
    ],
)
def test_names_shapes_or_dtypes_that_differ_are_refused_before_a_byte_moves(
    fleet: Fleet, target: str, named: str
) -> None:
    assert named in refuse_table(fleet, "small", target)


def test_a_refused_receiver_gets_the_next_version_once_the_trainer_is_mended(
    make_fleet: MakeFleet, backend: str
) -> None:
    fleet = make_fleet(backend)
    sender = fleet.sender(model="misspelt")
    replica = fleet.receiver()
    receiving = replica.start("receive", timeout=5.0)
    sending = sender.start("send", version=1)
    receiving.error()
    if fleet.stores:
        sending.results()
    else:
        sending.error()
    sender.close()
    exchange(fleet.sender(workers=sender.workers), 2, replica)


def test_scalars_empties_integers_bools_and_float8_arrive(fleet: Fleet) -> None:
    sender, replica = fleet.sender(model="scalars"), fleet.receiver(model="scalars")
    for version in (1, 2):
        exchange(sender, version, replica)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("noncontiguous", "contiguous"),
        ("contiguous", "noncontiguous-target"),
        ("noncontiguous", "noncontiguous-target"),
    ],
)
def test_strided_transposed_and_expanded_tensors_arrive_by_value(
    fleet: Fleet, source: str, target: str
) -> None:
    sender, replica = fleet.sender(model=source), fleet.receiver(model=target)
    for version in (1, 2):
        exchange(sender, version, replica)


def test_masters_in_fp32_arrive_as_bf16_and_a_kept_router_bias_keeps_its_bits(
    fleet: Fleet,
) -> None:
    sender = fleet.sender(model="router-master", wire_dtype="bfloat16", keep_dtype=["*router.bias"])
    replica = fleet.receiver(model="router")
    exchange(sender, 1, replica)
    assert replica.ask("distinct", key="router.bias") > 200
    exchange(sender, 2, replica)


def test_a_bias_that_would_lose_its_precision_on_the_wire_is_refused(fleet: Fleet) -> None:
    sender = fleet.sender(model="router-master", wire_dtype="bfloat16")
    replica = fleet.receiver(model="router")
    receiving = replica.start("receive", timeout=5.0)
    sending = sender.start("send", version=1, timeout=5.0, wait="applied")
    error = receiving.error()
    assert error.kind == "TableMismatch"
    assert "'router.bias'" in error.first
    assert "keep_dtype" in error.first
    sending.error()


def test_running_statistics_and_integer_buffers_are_sent(fleet: Fleet) -> None:
    sender, replica = fleet.sender(model="normed"), fleet.receiver(model="normed")
    for version in (1, 2):
        exchange(sender, version, replica)
        states = replica.ask("compare", version=version)
        for buffer in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
            assert states[buffer] == "new"


# ---------------------------------------------------------------------- when sources may change


@pytest.mark.parametrize("wait", ["applied", "published"])
@pytest.mark.parametrize("overlap", [False, True])
def test_the_source_may_change_as_soon_as_send_has_returned(
    make_fleet: MakeFleet, backend: str, wait: str, overlap: bool
) -> None:
    """The trainer overwrites its weights at once; slow receivers still get what was sent."""
    fleet = make_fleet(backend)
    sender = fleet.sender(ranks=2, overlap=overlap)
    replica = fleet.receiver(overlap=overlap)
    for version in (1, 2, 3):
        receiving = replica.start("receive", minimum=version)
        sender.send(version, wait=wait, scribble=True)
        receiving.results()
        assert replica.holds(1, 2, 3) == version


def test_a_source_whose_memory_was_replaced_is_read_where_it_is_now(fleet: Fleet) -> None:
    sender, replica = fleet.sender(), fleet.receiver()
    exchange(sender, 1, replica)
    sender.call("replace_storage", version=2)
    receiving = replica.start("receive", minimum=2)
    sender.send(2, fill=False)
    receiving.results()
    assert replica.holds(1, 2) == 2


# ---------------------------------------------------------------------- failures that travel


@pytest.mark.parametrize("point", ["target.plan", "target.begin", "target.write", "target.commit"])
def test_a_receiver_that_raises_fails_the_version_on_both_sides_in_time(
    fleet: Fleet, point: str
) -> None:
    sender, replica = fleet.sender(), fleet.receiver()
    replica.first.arm(point, "raise", after=0 if point != "target.write" else 2)
    sending = sender.start("send", version=1, wait="applied", timeout=8.0)
    receiving = replica.start("receive", timeout=8.0)
    error = receiving.error()
    assert error.kind == "Planned"
    sent = sending.error()
    assert in_time(sent, 8.0)
    assert sent.kind == "PeerLost"
    assert "'replica-0'" in sent.first
    assert sent.seconds < 5
    assert replica.version is None
    exchange(sender, 2, replica)


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("point", ["target.begin", "target.write", "target.commit"])
def test_an_error_on_one_inference_rank_is_raised_on_all(
    make_fleet: MakeFleet, backend: str, failing: int, point: str
) -> None:
    fleet = make_fleet(backend)
    sender, replica = fleet.sender(), fleet.receiver(ranks=2)
    exchange(sender, 1, replica)
    replica.workers[failing].arm(point, "raise")
    sending = sender.start("send", version=2, wait="applied", timeout=8.0)
    errors = replica.start("receive", minimum=2, timeout=8.0).errors()
    assert errors[failing].kind == "Planned"
    assert errors[1 - failing].kind == "PeerLost"
    assert all(error.seconds < 5 for error in errors)
    assert sending.error().kind == "PeerLost"
    assert replica.version is None
    assert all(replica.call("tainted"))
    exchange(sender, 3, replica)
    assert replica.call("tainted") == [None, None]


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("point", ["source.tensors", "sender.put", "sender.finish"])
def test_an_error_on_one_trainer_rank_is_raised_on_all_and_the_next_version_works(
    make_fleet: MakeFleet, backend: str, failing: int, point: str
) -> None:
    fleet = make_fleet(f"stepped-{backend}")
    sender, replica = fleet.sender(ranks=2), fleet.receiver()
    exchange(sender, 1, replica)
    sender.workers[failing].arm(point, "raise")
    receiving = replica.start("receive", minimum=2)
    errors = sender.start("send", version=2, wait="applied", timeout=8.0).errors()
    assert errors[failing].kind == "Planned"
    assert errors[1 - failing].kind == "PeerLost"
    assert all(error.seconds < 5 for error in errors)
    if fleet.stores or point == "source.tensors":  # nothing of the version was ever to be seen
        sender.send(3)
        assert receiving.results()[0]["version"] == 3
    elif point == "sender.put":
        error = receiving.error()
        assert error.kind == "PeerLost"
        assert error.seconds < 5
    else:  # all bytes were sent: the receiver may have applied them, and is whole
        until(lambda: receiving.done, "the receiver is done")
    if fleet.stores:
        assert not list(fleet.versions_directory().glob("v00000002-*"))
        assert not list(fleet.versions_directory().glob(".staging-*"))
    exchange(sender, 4, replica)


def test_sides_that_were_opened_with_different_backends_are_told_so(
    make_fleet: MakeFleet,
) -> None:
    fleet = make_fleet("memory")
    sender = fleet.sender()
    other = fleet.receiver("other", backend="filesystem")
    error = other.start("receive").error()  # it was never offered anything
    assert error.kind == "ConfigError"
    assert error.seconds < 10
    assert "'memory'" in error.first
    assert "'filesystem'" in error.first
    error = sender.start("send", version=1, timeout=1.0).error()
    assert error.kind == "TransferTimeout"
    assert in_time(error, 1.0)
    assert "'other' (opened with 'filesystem', this sender with 'memory')" in error.first
    good = fleet.receiver("good")
    good.first.arm("target.write")
    sending = sender.start("send", version=1)
    receiving = good.start("receive")
    good.first.until_at("target.write")
    error = other.start("receive", timeout=2.0).error()
    assert error.kind == "ConfigError"
    assert "'memory'" in error.first
    assert "'filesystem'" in error.first
    good.first.release("target.write")
    receiving.results()
    sending.results()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("ConfigError", ({"version": 1}, {"version": 2})),
        ("ConfigError", ({"wait": "applied"}, {"wait": "published"})),
    ],
)
def test_trainer_ranks_that_call_send_differently_are_all_told(
    fleet: Fleet, kind: str, options: tuple[dict[str, object], dict[str, object]]
) -> None:
    sender = fleet.sender(ranks=2)
    replica = fleet.receiver()
    calls = [
        worker.start("send", **{"version": 1, "timeout": 5.0, **some})
        for worker, some in zip(sender.workers, options, strict=True)
    ]
    for call in calls:
        error = call.error()
        assert error.kind == kind
        assert "call send alike on all ranks" in error.first
    exchange(sender, 3, replica)


@pytest.mark.parametrize(
    ("named", "options"),
    [("group_bytes", {"group_bytes": 1 << 10}), ("verify='off'", {"verify": "off"})],
)
def test_trainer_ranks_that_were_opened_differently_are_all_told(
    fleet: Fleet, named: str, options: dict[str, object]
) -> None:
    sender = fleet.sender(ranks=2, open_now=False)
    openings = [
        worker.start("open_sender", rank=rank, world_size=2, **{**sender.opening, **some})
        for rank, (worker, some) in enumerate(zip(sender.workers, ({}, options), strict=True))
    ]
    fleet.sessions.add([opening.result() for opening in openings].pop()["session_id"])
    replica = fleet.receiver()
    for call in [worker.start("send", version=1, timeout=5.0) for worker in sender.workers]:
        error = call.error()
        assert error.kind == "ConfigError"
        assert error.first.startswith("trainer rank 1 ")
        assert named in error.first
    assert replica.holds(1) == "pristine"


@pytest.mark.parametrize("other", ["other-shape", "other-dtype"])
def test_trainer_ranks_whose_tensors_contradict_are_all_told(fleet: Fleet, other: str) -> None:
    sender = fleet.sender(ranks=2, open_now=False)
    calls = [
        worker.start("open_sender", rank=rank, world_size=2, **{**sender.opening, "model": model})
        for rank, (worker, model) in enumerate(zip(sender.workers, ("small", other), strict=True))
    ]
    fleet.sessions.add([call.result() for call in calls].pop()["session_id"])
    for error in sender.start("send", version=1, timeout=5.0).errors():
        assert error.kind == "TableMismatch"
        assert "'head.weight'" in error.first


def test_a_killed_trainer_doesnt_block_the_next_one(
    make_fleet: MakeFleet, backend: str, scheme: str
) -> None:
    fleet = make_fleet(backend, scheme)
    sender, replica = fleet.sender(ranks=2), fleet.receiver()
    exchange(sender, 1, replica)
    sender.kill()
    fresh = fleet.sender(ranks=2)
    exchange(fresh, 2, replica)


# ---------------------------------------------------------------------- what a replica says


def test_a_replica_is_tainted_until_a_full_sync_succeeds(fleet: Fleet) -> None:
    sender, replica = fleet.sender(), fleet.receiver()
    exchange(sender, 1, replica)
    for version in (2, 3):
        replica.first.arm("target.write", "raise", after=2)
        sending = sender.start("send", version=version, wait="applied")
        assert replica.start("receive", minimum=version).error().kind == "Planned"
        sending.error()
        assert replica.holds(1, 2, 3) == "mixed"
        assert replica.version is None
        assert "planned failure" in replica.tainted
    exchange(sender, 4, replica)
    assert replica.tainted is None
    assert replica.version == 4


def test_a_failure_before_the_first_write_leaves_the_old_version_serving(
    make_fleet: MakeFleet, backend: str
) -> None:
    fleet = make_fleet(backend)
    sender, replica = fleet.sender(), fleet.receiver(staged=True)
    exchange(sender, 1, replica)
    replica.first.arm("target.write", "raise")
    sending = sender.start("send", version=2, wait="applied")
    assert replica.start("receive", minimum=2).error().kind == "Planned"
    sending.error()
    assert replica.holds(1, 2) == 1
    assert replica.version == 1
    assert replica.tainted is None
    exchange(sender, 3, replica)


def test_the_version_names_nothing_while_a_new_one_comes_in(
    make_fleet: MakeFleet, backend: str
) -> None:
    fleet = make_fleet(backend)
    sender, replica = fleet.sender(), fleet.receiver()
    assert replica.version is None
    exchange(sender, 1, replica)
    replica.first.arm("target.begin")
    replica.first.arm("target.write", after=1)
    replica.first.arm("target.commit")
    sending = sender.start("send", version=2, wait="applied")
    receiving = replica.start("receive", minimum=2)
    for point in ("target.begin", "target.write", "target.commit"):
        replica.first.until_at(point)
        assert replica.ask("version", now=True) is None
        replica.first.release(point)
    receiving.results()
    sending.results()
    assert replica.version == 2


def test_begin_leaves_the_old_version_in_place_until_fetch(fleet: Fleet) -> None:
    sender, replica = fleet.sender(), fleet.receiver()
    exchange(sender, 1, replica)
    sending = sender.start("send", version=2, wait="applied")
    assert replica.ask("begin", minimum=2) == 2
    assert replica.version == 1
    assert replica.holds(1, 2) == 1
    replica.ask("fetch")
    assert replica.version is None
    assert replica.ask("commit")["version"] == 2
    assert replica.version == 2
    assert replica.holds(1, 2) == 2
    sending.results()


# ---------------------------------------------------------------------- nothing runs twice


def test_a_version_already_applied_isnt_applied_again(fleet: Fleet) -> None:
    sender, replica = fleet.sender(), fleet.receiver()
    exchange(sender, 1, replica)
    assert replica.ask("poll") is None
    error = replica.start("receive", timeout=0.5).error()
    assert error.kind == "TransferTimeout"
    assert in_time(error, 0.5)
    assert replica.version == 1
    assert replica.ask("counts")["target.commit"] == 1
    assert sender.start("send", version=1).error().kind == "ConfigError"
    exchange(sender, 2, replica)
    assert replica.ask("counts")["target.commit"] == 2


def test_a_second_receive_while_the_first_runs_is_refused_and_harms_nothing(
    fleet: Fleet,
) -> None:
    sender, replica = fleet.sender(), fleet.receiver()
    replica.first.arm("target.write")
    sending = sender.start("send", version=1, wait="applied")
    receiving = replica.start("receive")
    replica.first.until_at("target.write")
    again = replica.first.start("receive", now=True, timeout=5.0).error()
    assert again.kind == "HandleError"
    assert "busy" in again.first
    replica.first.release("target.write")
    assert receiving.results()[0]["version"] == 1
    sending.results()
    assert replica.ask("counts")["target.commit"] == 1


# ---------------------------------------------------------------------- versions on disk


def test_a_version_is_invisible_until_its_marker_is_written(make_fleet: MakeFleet) -> None:
    fleet = make_fleet("stepped-filesystem")
    sender, replica = fleet.sender(), fleet.receiver()
    exchange(sender, 1, replica)
    sender.first.arm("sender.publish")
    sending = sender.start("send", version=2)
    sender.first.until_at("sender.publish")
    assert replica.ask("poll") is None
    assert [path.name[:9] for path in fleet.versions_directory().glob("v*")] == ["v00000001"]
    sender.first.release("sender.publish")
    sending.results()
    assert (fleet.version_path(2) / "weightwire.json").is_file()
    assert replica.ask("poll") == 2


def test_a_sender_killed_before_the_marker_leaves_the_earlier_version_the_newest(
    make_fleet: MakeFleet,
) -> None:
    fleet = make_fleet("stepped-filesystem")
    sender = fleet.sender()
    sender.send(1)
    sender.first.arm("sender.publish", "kill")
    sending = sender.start("send", version=2)
    with pytest.raises(Exception, match="WorkerDied"):
        sending.results()
    late = fleet.receiver()
    assert late.receive()[0]["version"] == 1
    assert late.holds(1, 2) == 1
    resumed = fleet.sender(resume_from=1)
    assert not list(fleet.versions_directory().glob(".staging-*"))
    exchange(resumed, 2, late)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_failed_copy_leaves_no_marker(make_fleet: MakeFleet, ranks: int) -> None:
    fleet = make_fleet("stepped-filesystem")
    sender = fleet.sender(ranks=ranks)
    sender.workers[-1].arm("sender.put", "raise", after=1)
    for error in sender.start("send", version=1).errors():
        assert error.kinds[0] in ("Planned", "PeerLost")
    assert list(fleet.versions_directory().iterdir()) == []
    late = fleet.receiver()
    assert late.ask("poll") is None
    report = sender.send(1)[0]
    assert report["attempt"] == 2
    assert late.receive()[0]["attempt"] == 2
    assert late.holds(1) == 1


def test_retention_never_deletes_the_version_that_a_slow_reader_reads(
    make_fleet: MakeFleet,
) -> None:
    fleet = make_fleet("filesystem")
    sender, replica = fleet.sender(config={"keep": 1}), fleet.receiver()
    sender.send(1)
    first = fleet.version_path(1)
    replica.first.arm("target.write", after=1)
    receiving = replica.start("receive")
    replica.first.until_at("target.write")
    for version in (2, 3, 4):
        sender.send(version)
        assert (first / "weightwire.json").is_file()
    until(lambda: names(fleet) == ["v00000001", "v00000004"], "versions 2 and 3 are dropped")
    replica.first.release("target.write")
    assert receiving.results()[0]["version"] == 1
    assert replica.holds(1, 2, 3, 4) == 1
    sender.send(5)
    until(lambda: names(fleet) == ["v00000005"], "version 1 is dropped once it was read")
    assert replica.receive()[0]["version"] == 5


def names(fleet: Fleet) -> list[str]:
    return sorted(path.name[:9] for path in fleet.versions_directory().glob("v*"))


# ---------------------------------------------------------------------- flat over many versions


@pytest.mark.parametrize("shape", [(1, 1), pytest.param((2, 2), marks=pytest.mark.soak, id="2x2")])
def test_fifty_versions_leave_everything_flat(
    make_fleet: MakeFleet, backend: str, shape: tuple[int, int]
) -> None:
    fleet = make_fleet(backend)
    sender = fleet.sender(ranks=shape[0])
    replica = fleet.receiver(ranks=shape[1])
    workers = [*sender.workers, *replica.workers]
    at_ten: list[dict[str, object]] = []
    records_at_forty = 0
    for version in range(1, 51):
        receiving = replica.start("receive", minimum=version)
        sender.send(version, wait="applied")
        receiving.results()
        if version == 10:
            at_ten = [worker.call("usage") for worker in workers]
        if version == 40:
            records_at_forty = count_records(fleet)
    at_fifty = [worker.call("usage") for worker in workers]
    for before, after in zip(at_ten, at_fifty, strict=True):
        assert after["fds"] == before["fds"]
        assert after["threads"] == before["threads"]
        assert after["maps"] == before["maps"]
        assert after["rss"] - before["rss"] < 8 << 20
    assert replica.holds(50) == 50
    records = count_records(fleet)
    assert records <= records_at_forty + 2
    assert records < 600
    shared = list(Path("/dev/shm").glob(f"weightwire-{sender.about[0]['session_id']}-*"))
    assert len(shared) == (0 if fleet.stores else len(workers))
    if fleet.stores:
        until(lambda: len(names(fleet)) <= 2, "old versions are dropped")


def count_records(fleet: Fleet) -> int:
    root = fleet.directory / "session/records"
    temporary = re.compile(r"\.(tmp|probe)")
    return sum(1 for path in root.rglob("*") if path.is_file() and not temporary.search(path.name))
