"""No wait outlasts its deadline."""

from __future__ import annotations

import time

from weightwire_conformance.rig import Fleet
from weightwire_conformance.rig.fleet import in_time, took_at_most
from weightwire_conformance.scenario import scenario

__all__: list[str] = []

_CLOSING_SECONDS = 1.0


@scenario
def a_receive_without_an_offer_ends_in_time(fleet: Fleet) -> None:
    sender, replica = fleet.sender(), fleet.receiver()
    error = replica.start("receive", timeout=0.6).error()
    assert "TransferTimeout" in error.kinds, error
    in_time(error, 0.6)
    fleet.exchange(sender, 1, replica)


@scenario
def a_send_that_nobody_answers_ends_in_time(fleet: Fleet) -> None:
    sender, replica = fleet.sender(), fleet.receiver()
    error = sender.start("send", version=1, wait="applied", timeout=0.6).error()
    assert "TransferTimeout" in error.kinds, error
    assert "replica" in error.first, f"doesn't name who is missing: {error}"
    in_time(error, 0.6)
    fleet.exchange(sender, 2, replica)


@scenario
def a_stalled_sender_doesnt_hold_its_receivers(fleet: Fleet) -> None:
    sender, replica = fleet.sender(), fleet.receiver()
    deadline = fleet.deadline(1.0)
    sender.arm("sender.put", after=1)
    sending = sender.start("send", version=1)
    receiving = replica.start("receive", timeout=deadline)
    sender.first.until_at("sender.put")
    error = receiving.error()
    assert "TransferTimeout" in error.kinds, error
    in_time(error, deadline)
    replica.must_be_whole()
    sender.first.release("sender.put")
    sending.outcome()
    sending = sender.start("send", version=2, wait="applied")
    replica.receive(minimum=2)
    sending.results()
    replica.must_hold(2)


@scenario
def a_stalled_receiver_doesnt_hold_its_sender(fleet: Fleet) -> None:
    sender, replica = fleet.sender(), fleet.receiver()
    deadline = fleet.deadline(1.0)
    replica.arm("receiver.fetch", after=1)
    sending = sender.start("send", version=1, wait="applied", timeout=deadline)
    receiving = replica.start("receive")
    replica.first.until_at("receiver.fetch")
    error = sending.error()
    assert "TransferTimeout" in error.kinds, error
    in_time(error, deadline)
    replica.first.release("receiver.fetch")
    receiving.outcome()
    replica.must_be_whole()
    sending = sender.start("send", version=2, wait="applied")
    replica.receive(minimum=2)
    sending.results()
    replica.must_hold(2)


@scenario
def closing_ends_a_call_that_waits_for_an_offer(fleet: Fleet) -> None:
    replica = fleet.receiver()
    receiving = replica.start("receive")
    replica.first.until_waiting("offer")
    replica.ask("close", now=True)
    error = receiving.error()
    assert "WeightWireError" in error.kinds, error
    back = fleet.receiver(workers=replica.workers)
    fleet.exchange(fleet.sender(), 1, back)


@scenario
def closing_ends_a_call_that_waits_for_bytes(fleet: Fleet) -> None:
    """A receiver that has begun, and whose sender stalls; a stored version isn't there yet."""
    sender, replica = fleet.sender(), fleet.receiver()
    sender.arm("sender.put", after=1)
    sender.start("send", version=1)
    receiving = replica.start("receive")
    sender.first.until_at("sender.put")
    put_is_fetchable = "a group that was put must be fetchable without another call on the sender"
    if fleet.stores:
        replica.first.until_waiting("offer")
    else:
        replica.first.until_waiting("group 1", put_is_fetchable)
    time.sleep(0.2)  # it is about to wait inside its transport
    closing = replica.first.start("close", now=True)
    error = receiving.error()
    closing.result()
    assert "WeightWireError" in error.kinds, f"not translated: {error}"
    assert "TransferTimeout" not in error.kinds, f"ended by its deadline only: {error}"
    took_at_most(closing.seconds(), _CLOSING_SECONDS, "close()")
    sender.first.release("sender.put")
