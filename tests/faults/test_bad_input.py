"""Wrong arguments, sessions and handles: the right error, in time, and nothing is lost."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from process_rig import Fleet, RemoteError, exchange, free_port, in_time

MakeFleet = Callable[..., Fleet]
ROLES = ["sender", "receiver"]


def opening_error(fleet: Fleet, role: str, **options: Any) -> RemoteError:
    side = getattr(fleet, role)(open_now=False, **options)
    error = side.start_opening()[0].error()
    assert "WeightWireError" in error.kinds, error
    return error


# ---------------------------------------------------------------------- backends and options


@pytest.mark.parametrize("role", ROLES)
def test_an_unknown_backend_lists_those_installed(make_fleet: MakeFleet, role: str) -> None:
    error = opening_error(make_fleet(), role, backend="nccll")
    assert error.kind == "BackendNotFound"
    for name in ("'nccll'", "memory", "filesystem"):
        assert name in error.first


@pytest.mark.parametrize("role", ROLES)
def test_a_backend_whose_library_is_missing_says_what_to_install(
    make_fleet: MakeFleet, role: str
) -> None:
    error = opening_error(make_fleet(), role, backend="no-library")
    assert error.kind == "BackendUnavailable"
    assert "pip install faraway" in error.first


@pytest.mark.parametrize("role", ROLES)
def test_an_unknown_option_lists_the_options(fleet: Fleet, role: str) -> None:
    error = opening_error(fleet, role, config={"directry": "/tmp"})
    assert error.kind == "ConfigError"
    assert "'directry'" in error.first
    assert "directory" in error.first.replace("directry", "")


@pytest.mark.parametrize("backend_choice", [{"directory": "/tmp"}, 7, None, ["memory"]])
def test_a_choice_that_names_no_backend_says_what_to_write(
    make_fleet: MakeFleet, backend_choice: object
) -> None:
    error = opening_error(make_fleet(), "sender", backend=backend_choice)
    assert error.kind == "ConfigError"
    assert "backend" in error.first


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("timeout", 0),
        ("timeout", -1.0),
        ("open_timeout", 0),
        ("lease_ttl", 0.01),
        ("verify", "most"),
    ],
)
def test_an_option_out_of_range_is_named(make_fleet: MakeFleet, option: str, value: object) -> None:
    error = opening_error(make_fleet(), "sender", **{option: value})
    assert error.kind == "ConfigError"
    assert option in error.first


@pytest.mark.parametrize("role", ROLES)
def test_an_option_directory_that_is_missing_is_named_and_a_second_try_works_at_once(
    make_fleet: MakeFleet, backend: str, role: str
) -> None:
    """What failed to open has left the session: nobody waits for its lease."""
    fleet = make_fleet(backend)
    good_sender = fleet.sender() if role == "receiver" else None
    occupied = fleet.directory / "file"
    occupied.write_text("in the way")
    side = getattr(fleet, role)(open_now=False, config={"directory": str(occupied / "deeper")})
    opening = side.start_opening()[0]
    if role == "receiver" and backend == "filesystem":
        opening.result()  # a reader looks for the directory when there is a version to read
        return
    error = opening.error()
    assert error.kind == "ConfigError"
    assert str(occupied / "deeper") in error.first
    second = getattr(fleet, role)(workers=side.workers, open_timeout=5.0)
    if good_sender is not None:
        exchange(good_sender, 1, second)


# ---------------------------------------------------------------------- sessions


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("url", ["gopher://host/run", "/shared/run", "", "file://host/run"])
def test_a_session_url_that_isnt_one_is_refused(make_fleet: MakeFleet, role: str, url: str) -> None:
    error = opening_error(make_fleet(), role, session=url)
    assert error.kind == "ConfigError"
    assert (url.partition(":")[0] or "''") in error.first


@pytest.mark.parametrize("role", ROLES)
def test_a_session_directory_without_a_parent_is_refused(make_fleet: MakeFleet, role: str) -> None:
    fleet = make_fleet()
    error = opening_error(fleet, role, session=f"file://{fleet.directory}/no/such/run")
    assert error.kind == "SessionError"
    assert str(fleet.directory) in error.first
    assert "create it" in error.first


@pytest.fixture
def unwritable(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "closed"
    directory.mkdir()
    directory.chmod(0o500)
    yield directory
    directory.chmod(0o700)


@pytest.mark.parametrize("role", ROLES)
def test_a_session_directory_that_cant_be_written_is_refused(
    make_fleet: MakeFleet, role: str, unwritable: Path
) -> None:
    url = f"file://{unwritable}/run"
    if os.access(unwritable, os.W_OK):  # root writes everywhere, but not there
        url = "file:///proc/run"
    error = opening_error(make_fleet(), role, session=url)
    assert error.kind == "SessionError"
    assert "can't be written" in error.first
    assert "choose another" in error.first


@pytest.mark.parametrize("role", ROLES)
def test_a_session_directory_that_is_a_file_is_refused(
    make_fleet: MakeFleet, role: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    error = opening_error(make_fleet(), role, session=f"file://{tmp_path}/file")
    assert error.kind == "SessionError"
    assert "is a file: choose another" in error.first


def test_a_port_that_is_taken_is_named(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))
        taken.listen()
        port = taken.getsockname()[1]
        error = opening_error(fleet, "sender", session=f"tcp://127.0.0.1:{port}/run")
    assert error.kind == "SessionError"
    assert f"port {port}" in error.first
    assert "choose a free port" in error.first
    fleet.sender(session=f"tcp://127.0.0.1:{port}/run")


@pytest.mark.parametrize("silent", [False, True])
def test_a_host_that_doesnt_answer_ends_in_an_error_within_the_deadline(
    make_fleet: MakeFleet, silent: bool
) -> None:
    """Nothing listens; or something does and never says a word."""
    fleet = make_fleet()
    port = free_port()
    with socket.socket() as listener:
        if silent:
            listener.bind(("127.0.0.1", port))
            listener.listen()
        error = opening_error(
            fleet, "receiver", session=f"tcp://127.0.0.1:{port}/run", open_timeout=2.0
        )
    assert error.kind == "SessionError"
    assert str(port) in error.first
    assert "start the sender" in error.first
    assert in_time(error, 2.0)


def test_a_network_session_without_a_token_is_refused(make_fleet: MakeFleet) -> None:
    error = opening_error(make_fleet(), "sender", session=f"tcp://0.0.0.0:{free_port()}/run")
    assert error.kind == "ConfigError"
    assert "WEIGHTWIRE_TOKEN" in error.first


@pytest.mark.parametrize("ours", [None, "other"])
def test_a_missing_or_wrong_token_is_refused(
    make_fleet: MakeFleet, scheme: str, ours: str | None
) -> None:
    fleet = make_fleet("memory", scheme)
    sender = fleet.sender(token="secret")
    error = opening_error(fleet, "receiver", token=ours, open_timeout=5.0)
    assert error.kind == "AuthenticationError"
    assert "WEIGHTWIRE_TOKEN" in error.first
    assert "secret" not in error.message
    exchange(sender, 1, fleet.receiver(token="secret"))


def test_two_senders_in_one_session_are_refused(make_fleet: MakeFleet, scheme: str) -> None:
    fleet = make_fleet("memory", scheme)
    sender, replica = fleet.sender(lease_ttl=1.0), fleet.receiver()
    error = opening_error(fleet, "sender", open_timeout=10.0)
    assert error.kind == "SessionError"
    assert "already" in error.first or "end the process" in error.first
    exchange(sender, 1, replica)


def test_two_receivers_with_one_id_are_refused(make_fleet: MakeFleet, scheme: str) -> None:
    fleet = make_fleet("memory", scheme)
    sender, replica = fleet.sender(), fleet.receiver("twin", lease_ttl=1.0)
    error = opening_error(fleet, "receiver", receiver_id="twin", open_timeout=10.0)
    assert error.kind == "SessionError"
    assert "'twin'" in error.first
    assert "receiver id" in error.first
    exchange(sender, 1, replica)


@pytest.mark.parametrize(
    "receiver_id", ["../outside", "a/b", "", ".hidden", "..", "x" * 128, "a b", "a\nb", 7]
)
def test_a_receiver_id_that_would_leave_the_session_is_refused(
    make_fleet: MakeFleet, receiver_id: object
) -> None:
    fleet = make_fleet()
    fleet.sender()
    error = opening_error(fleet, "receiver", receiver_id=receiver_id)
    assert error.kind == "ConfigError"
    assert "receiver id" in error.first
    assert sorted(path.name for path in fleet.directory.iterdir()) == ["session"]


@pytest.mark.parametrize("model", ["escaping", "absolute", "control"])
def test_a_tensor_name_that_would_leave_the_session_is_refused(fleet: Fleet, model: str) -> None:
    sender = fleet.sender(model=model)
    fleet.receiver()
    error = sender.start("send", version=1).error()
    assert error.kind == "TableMismatch"
    assert "rename the tensor" in error.first
    assert sorted(path.name for path in fleet.directory.iterdir()) == ["session"]


# ---------------------------------------------------------------------- handles


CALLS = {
    "sender": [("send", {"version": 9, "fill": False})],
    "receiver": [
        ("receive", {}), ("begin", {}), ("poll", {}), ("fetch", {}), ("commit", {}), ("abort", {}),
    ],
}  # fmt: skip
ALL_CALLS = [(role, call, args) for role, calls in CALLS.items() for call, args in calls]


@pytest.mark.parametrize(("role", "call", "args"), ALL_CALLS)
def test_a_closed_handle_refuses_and_closes_again_in_peace(
    make_fleet: MakeFleet, role: str, call: str, args: dict[str, Any]
) -> None:
    fleet = make_fleet()
    side = getattr(fleet, role)()
    side.close()
    side.close()
    error = side.start(call, **args).error()
    assert error.kind == "HandleError"
    assert "is closed: open a new one" in error.first


@pytest.mark.parametrize(("role", "call", "args"), ALL_CALLS)
def test_a_forked_handle_refuses_and_the_parents_goes_on(
    make_fleet: MakeFleet, backend: str, role: str, call: str, args: dict[str, Any]
) -> None:
    fleet = make_fleet(backend)
    sides = {"sender": fleet.sender(), "receiver": fleet.receiver()}
    exchange(sides["sender"], 1, sides["receiver"])
    args = {key: value for key, value in args.items() if key != "fill"}
    answer = sides[role].ask("fork", call=call, **args)
    assert answer["error"] == "HandleError"
    assert "fork" in answer["message"]
    exchange(sides["sender"], 2, sides["receiver"])


@pytest.mark.parametrize("role", ROLES)
def test_closing_in_a_fork_doesnt_close_the_parents_handle(
    make_fleet: MakeFleet, backend: str, scheme: str, role: str
) -> None:
    fleet = make_fleet(backend, scheme)
    sides = {"sender": fleet.sender(), "receiver": fleet.receiver()}
    exchange(sides["sender"], 1, sides["receiver"])
    sides[role].ask("fork", call="close")
    exchange(sides["sender"], 2, sides["receiver"])
    exchange(sides["sender"], 3, sides["receiver"])


@pytest.mark.parametrize(
    ("role", "call", "args"), [case for case in ALL_CALLS if case[1] != "poll"]
)
def test_a_busy_handle_refuses_and_the_first_call_goes_on(
    make_fleet: MakeFleet, role: str, call: str, args: dict[str, Any]
) -> None:
    fleet = make_fleet()
    sender, replica = fleet.sender(), fleet.receiver()
    replica.first.arm("target.write")
    sending = sender.start("send", version=1)
    receiving = replica.start("receive")
    replica.first.until_at("target.write")
    side = sender if role == "sender" else replica
    error = side.first.start(call, now=True, **args).error()
    assert error.kind == "HandleError"
    assert "busy" in error.first
    replica.first.release("target.write")
    receiving.results()
    sending.results()
    assert replica.holds(1) == 1


def test_polling_while_a_version_comes_in_is_answered_and_harms_nothing(fleet: Fleet) -> None:
    sender, replica = fleet.sender(), fleet.receiver()
    replica.first.arm("target.write")
    sending = sender.start("send", version=1)
    receiving = replica.start("receive")
    replica.first.until_at("target.write")
    assert replica.ask("poll", now=True) in (None, 1)
    replica.first.release("target.write")
    receiving.results()
    sending.results()
    assert replica.holds(1) == 1


@pytest.mark.parametrize("seconds", [0, -1, -0.5, 0.0])
def test_a_deadline_of_zero_or_below_is_refused(fleet: Fleet, seconds: float) -> None:
    sender, replica = fleet.sender(), fleet.receiver()
    for calls in (
        sender.start("send", version=1, timeout=seconds),
        replica.start("receive", timeout=seconds),
        replica.start("begin", timeout=seconds),
    ):
        error = calls.error()
        assert error.kind == "ConfigError"
        assert "above zero" in error.first
    exchange(sender, 1, replica)


def test_parts_of_a_receive_out_of_order_are_refused(fleet: Fleet) -> None:
    sender, replica = fleet.sender(), fleet.receiver()
    for call in ("fetch", "commit"):
        error = replica.start(call).error()
        assert error.kind == "HandleError"
        assert "begin" in error.first
    sending = sender.start("send", version=1, wait="applied")
    replica.ask("begin")
    error = replica.start("commit").error()
    assert error.kind == "HandleError"
    assert "fetch the version first" in error.first
    replica.ask("fetch")
    replica.ask("commit")
    sending.results()
    assert replica.holds(1) == 1


def test_a_version_that_was_begun_can_be_given_up(fleet: Fleet) -> None:
    sender, replica = fleet.sender(), fleet.receiver()
    exchange(sender, 1, replica)
    sending = sender.start("send", version=2, wait="applied")
    replica.ask("begin", minimum=2)
    replica.ask("abort")
    assert sending.error().kind in ("HandleError", "PeerLost")
    assert replica.version == 1
    assert replica.holds(1, 2) == 1
    exchange(sender, 3, replica)


def test_a_pending_version_doesnt_lengthen_the_next_calls_deadline(fleet: Fleet) -> None:
    sender, replica = fleet.sender(), fleet.receiver()
    sending = sender.start("send", version=1, wait="applied")
    replica.ask("begin")
    error = replica.start("receive", timeout=1.0, minimum=5).error()
    assert error.kind == "TransferTimeout"
    assert in_time(error, 1.0)
    sending.error()
    exchange(sender, 2, replica)


@pytest.mark.parametrize("pending", [False, True])
def test_closing_on_another_thread_ends_a_waiting_call(
    make_fleet: MakeFleet, backend: str, scheme: str, pending: bool
) -> None:
    fleet = make_fleet(backend, scheme)
    sender, replica = fleet.sender(), fleet.receiver()
    if pending:
        sending = sender.start("send", version=1, wait="applied")
        replica.ask("begin")
        replica.close()
        assert sending.error().kind in ("PeerLost", "HandleError")
        return
    receiving = replica.start("receive")
    replica.first.until_waiting("offer")
    replica.ask("close", now=True)
    error = receiving.error()
    assert "TransferError" in error.kinds
    assert "closed" in error.first


# ---------------------------------------------------------------------- deadlines


@pytest.mark.parametrize("seconds", [0.3, 1.0])
def test_receive_without_an_offer_ends_at_its_deadline(
    make_fleet: MakeFleet, backend: str, scheme: str, seconds: float
) -> None:
    fleet = make_fleet(backend, scheme)
    sender, replica = fleet.sender(), fleet.receiver()
    error = replica.start("receive", timeout=seconds).error()
    assert error.kind == "TransferTimeout"
    assert "offer" in error.first
    assert in_time(error, seconds)
    exchange(sender, 1, replica)


def test_send_without_a_receiver_ends_at_its_deadline(make_fleet: MakeFleet, scheme: str) -> None:
    fleet = make_fleet("memory", scheme)
    sender = fleet.sender(ranks=2)
    for error in sender.start("send", version=1, timeout=1.0).errors():
        assert error.kind == "TransferTimeout"
        assert in_time(error, 1.0)
    exchange(sender, 1, fleet.receiver())


def test_send_to_a_receiver_that_never_calls_receive_names_it(
    make_fleet: MakeFleet, backend: str
) -> None:
    fleet = make_fleet(backend)
    sender = fleet.sender(ranks=2)
    replica = fleet.receiver("idle-one")
    errors = sender.start("send", version=1, timeout=1.0, wait="applied").errors()
    for error in errors:
        assert error.kind == "TransferTimeout"
        assert in_time(error, 1.0)
        assert "'idle-one'" in error.first
    exchange(sender, 2, replica)


def test_a_replica_whose_other_rank_never_calls_ends_at_its_deadline(fleet: Fleet) -> None:
    sender, replica = fleet.sender(), fleet.receiver(ranks=2)
    sending = sender.start("send", version=1, wait="applied", timeout=2.0)
    error = replica.first.start("receive", timeout=1.0).error()
    assert error.kind == "TransferTimeout"
    assert "replica-0 rank 1" in error.first
    assert in_time(error, 1.0)
    assert in_time(sending.error(), 2.0)
