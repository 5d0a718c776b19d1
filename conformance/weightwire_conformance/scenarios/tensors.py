"""Every tensor arrives, byte for byte."""

from __future__ import annotations

from typing import Any

from weightwire_conformance.capabilities import limit_of, option
from weightwire_conformance.rig import Fleet
from weightwire_conformance.scenario import scenario

__all__: list[str] = []


def arrives(fleet: Fleet, model: str, sizes: dict[str, Any] | None = None, **options: Any) -> None:
    """Two versions of a model, from one process to another."""
    sender = fleet.sender(model, sizes, **options)
    replica = fleet.receiver(model=model, sizes=sizes)
    replica.must_be_pristine()
    for version in (1, 2):
        fleet.exchange(sender, version, replica)


@scenario
def every_dtype_arrives_bit_for_bit(fleet: Fleet) -> None:
    """Floats from 8 to 64 bits, integers from 8 to 64 bits, bool."""
    arrives(fleet, "dtypes")


@scenario
def nan_payloads_negative_zeros_and_subnormals_survive(fleet: Fleet) -> None:
    arrives(fleet, "specials", verify="off")


@scenario
def zero_dim_tensors_arrive(fleet: Fleet) -> None:
    arrives(fleet, "scalars")


@scenario
def empty_tensors_arrive(fleet: Fleet) -> None:
    arrives(fleet, "empty")


@scenario
def integer_buffers_and_flags_arrive(fleet: Fleet) -> None:
    """What no optimizer touches, and an engine needs all the same."""
    arrives(fleet, "buffers")


@scenario
def noncontiguous_sources_arrive_as_they_read(fleet: Fleet) -> None:
    """Strided, transposed, narrowed and expanded tensors."""
    arrives(fleet, "noncontiguous")


@scenario
def tied_tensors_arrive_under_both_names(fleet: Fleet) -> None:
    arrives(fleet, "tied")


@scenario
def odd_names_arrive(fleet: Fleet) -> None:
    """Spaces, Unicode, quotes, slashes, names that differ in case, long ones."""
    arrives(fleet, "names")


@scenario
def tensors_of_one_shape_arent_confused(fleet: Fleet) -> None:
    arrives(fleet, "twins", verify="off")


@scenario
def tensors_of_one_shape_arent_confused_with_a_group_ahead(fleet: Fleet) -> None:
    """While one group is written the next one arrives, and all of their tensors are alike."""
    sender = fleet.sender("twins", group_bytes=4 << 10, verify="off", overlap=True)
    replica = fleet.receiver(model="twins", overlap=True)
    for version in (1, 2):
        fleet.exchange(sender, version, replica)


@scenario(cases={"300": {"count": 300}, "5000": {"count": 5000}})
def thousands_of_tiny_tensors_arrive(fleet: Fleet, count: int) -> None:
    arrives(fleet, "tiny", {"count": count}, group_bytes=512)


@scenario(cases={"3-MiB": {"nbytes": 3 << 20}, "64-MiB": {"nbytes": 64 << 20}})
def a_tensor_larger_than_its_group_arrives(fleet: Fleet, nbytes: int) -> None:
    arrives(fleet, "large", {"nbytes": nbytes}, group_bytes=1 << 20)


@scenario(large=True, need=limit_of(5 << 29))
def a_tensor_over_two_gibibytes_arrives(fleet: Fleet) -> None:
    fleet.patient(300.0)
    sizes = {"nbytes": 5 << 29}
    # Bytes are compared all the same; 1.3e9 elements take minutes to digest.
    sender = fleet.sender("large", sizes, group_bytes=256 << 20, verify="sample")
    replica = fleet.receiver(model="large", sizes=sizes)
    fleet.exchange(sender, 1, replica)


@scenario
def casts_on_the_wire_are_torchs_own(fleet: Fleet) -> None:
    """Masters in float32 travel as bfloat16; those that are kept don't."""
    arrives(fleet, "masters", wire_dtype="bfloat16", keep_dtype=["router.bias"])


@scenario
def casts_to_half_precision_are_torchs_own(fleet: Fleet) -> None:
    arrives(fleet, "halves", wire_dtype="float16")


@scenario(cases={level: {"verify": level} for level in ("full", "sample", "off")})
def good_bytes_pass_every_level_of_verification(fleet: Fleet, verify: str) -> None:
    arrives(fleet, "layers", {"count": 2, "width": 512}, verify=verify)


@scenario(
    cases={
        "1-to-1": {"trainers": 1, "ranks": 1},
        "2-to-1": {"trainers": 2, "ranks": 1},
        "1-to-2": {"trainers": 1, "ranks": 2},
        "2-to-2": {"trainers": 2, "ranks": 2},
    }
)
def replicated_trainers_reach_replicas_of_any_size(fleet: Fleet, trainers: int, ranks: int) -> None:
    """What several trainer ranks hold alike is served once, and reaches every rank."""
    sender = fleet.sender(ranks=trainers)
    replica = fleet.receiver(ranks=ranks)
    for version in (1, 2):
        sending = sender.start("send", version=version, wait="applied")
        received = replica.receive()
        sent = sending.results()
        replica.must_hold(version)
        assert sum(report["nbytes"] for report in sent) == received[0]["nbytes"]


@scenario(
    cases={
        "one-slot": {"overlap": False},
        "two-slots": {"overlap": True},
        "two-to-one": {"overlap": True, "theirs": False},
    }
)
def overlap_changes_nothing_but_time(
    fleet: Fleet, overlap: bool, theirs: bool | None = None
) -> None:
    """Many groups, one slot or two, a receiver that is slower than the sender."""
    sizes = {"count": 3, "width": 256}
    sender = fleet.sender(sizes=sizes, overlap=overlap)
    replica = fleet.receiver(
        sizes=sizes, overlap=overlap if theirs is None else theirs, staged=True
    )
    replica.arm("target.write", "slow")
    for version in (1, 2):
        fleet.exchange(sender, version, replica)


@scenario(need=option("zero_copy"), cases={"on": {"zero_copy": True}, "off": {"zero_copy": False}})
def zero_copy_changes_nothing_but_the_copies(fleet: Fleet, zero_copy: bool) -> None:
    """Tensors that are sent where they lie, beside such as must be cast; they move, and change."""
    fleet.options["zero_copy"] = zero_copy
    sender = fleet.sender("masters", wire_dtype="bfloat16", keep_dtype=["router.bias"])
    replica = fleet.receiver(model="masters")
    for version in (1, 2):
        fleet.exchange(sender, version, replica)
    sender.call("move_tensors")
    fleet.exchange(sender, 3, replica)
    replica.arm("receiver.fetch", "slow")
    receiving = replica.start("receive", minimum=4)
    sender.send(4, wait="published", scribble=True)
    receiving.results()
    replica.must_hold(4)


@scenario
def bytes_that_land_in_staging_memory_arrive(fleet: Fleet) -> None:
    """A target that gives no memory of its own gets the same bytes."""
    sender, replica = fleet.sender(), fleet.receiver(staged=True)
    for version in (1, 2):
        fleet.exchange(sender, version, replica)


@scenario
def a_target_keeps_its_addresses(fleet: Fleet) -> None:
    """Weights are filled in place: no address that an engine knows changes."""
    sender, replica = fleet.sender(), fleet.receiver()
    before = replica.ask("addresses")
    for version in (1, 2):
        fleet.exchange(sender, version, replica)
    assert replica.ask("addresses") == before, "a tensor of the target moved"


@scenario
def a_session_over_tcp_moves_the_same_bytes(fleet: Fleet) -> None:
    fleet.over_tcp()
    arrives(fleet, "layers")
