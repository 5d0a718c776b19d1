"""What doesn't fit is refused before a byte moves."""

from __future__ import annotations

from weightwire_conformance.rig import Fleet
from weightwire_conformance.scenario import scenario

__all__: list[str] = []


@scenario(
    cases={
        "a-name": {"model": "misspelt"},
        "a-tensor-too-many": {"model": "extra"},
        "a-shape": {"model": "reshaped"},
        "a-dtype": {"model": "retyped"},
    }
)
def a_table_that_differs_in_something_is_refused(fleet: Fleet, model: str) -> None:
    """The receiver is as it was, and takes the next trainer's version."""
    sender, replica = fleet.sender(model), fleet.receiver()
    sending = sender.start("send", version=1)
    error = replica.start("receive").error()
    assert "TableMismatch" in error.kinds, error
    refused = sending.outcome()
    assert fleet.stores or (refused is not None and "TableMismatch" in refused.kinds), refused
    replica.must_be_pristine()
    assert (replica.version, replica.tainted) == (None, None)
    sender.close()
    fleet.exchange(fleet.sender(workers=sender.workers), 1, replica)


@scenario
def a_table_that_isnt_the_offered_one_is_refused(fleet: Fleet) -> None:
    """An offer names its table by digest: another one that lies there isn't planned from."""
    sender, replica = fleet.sender(group_bytes=4 << 10), fleet.receiver()
    fleet.exchange(sender, 1, replica)
    (other,) = (path.read_bytes() for path in fleet.tables())
    sender.close()
    sender = fleet.sender(workers=sender.workers)
    sending = sender.start("send", version=2, wait="applied")
    sender.first.until_waiting("receiver_")
    for path in fleet.tables():
        path.write_bytes(other)
    error = replica.start("receive", minimum=2).error()
    assert "TableMismatch" in error.kinds, error
    refused = sending.error()
    assert "TableMismatch" in refused.kinds, refused
    replica.must_hold(1)
    sender.close()
    again = fleet.sender(workers=sender.workers, group_bytes=2 << 10)
    fleet.exchange(again, 2, replica)


@scenario
def names_that_leave_their_directory_are_refused(fleet: Fleet) -> None:
    """A table may not name files outside the session."""
    sender = fleet.sender("escaping")
    error = sender.start("send", version=1).error()
    assert "TableMismatch" in error.kinds, error
    sender.close()
    fleet.exchange(fleet.sender(workers=sender.workers), 1, fleet.receiver())
