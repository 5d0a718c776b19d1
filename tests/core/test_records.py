"""Records: sealed, opened, refused; whatever the bytes, the error is one of two."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from weightwire import errors
from weightwire.contract import Policy
from weightwire.deadline import Deadline
from weightwire.errors import AuthenticationError, PeerLost, SessionError, TableMismatch
from weightwire.session import records
from weightwire.session.records import (
    Codec,
    ErrorInfo,
    Lease,
    Outcome,
    Ready,
    SessionRecord,
    Status,
)
from weightwire.session.session import Session

FAST = settings(deadline=None, database=None, max_examples=300)
KEY = "senders/000001/lease"


def codec(token: str | None = None, session: str = "0123456789abcdef") -> Codec:
    made = Codec(token)
    made.session_id = session
    return made


def compact(envelope: dict) -> bytes:
    """As it was sealed: the signature covers the body's very bytes."""
    return json.dumps(envelope, separators=(",", ":"), ensure_ascii=False).encode()


def refusal(reader: Codec, payload: bytes, kind=Lease, key: str = KEY) -> SessionError:
    with pytest.raises(SessionError) as caught:
        reader.open(key, payload, kind)
    assert key in str(caught.value).splitlines()[0]
    return caught.value


@pytest.mark.parametrize("token", [None, "secret"])
def test_a_record_is_opened_by_any_member_with_the_same_token(token):
    status = Status("serving", Policy(1, 2, 3), digest="ff")
    assert codec(token).open(KEY, codec(token).seal(KEY, status), Status) == status


def test_the_sequence_rises_with_each_record_of_a_writer():
    writer = codec()
    numbers = [json.loads(writer.seal(KEY, Lease(0)))["sequence"] for _ in range(3)]
    assert numbers == [1, 2, 3]


@pytest.mark.parametrize("token", ["", " ", "\n\t"])
def test_an_empty_token_is_refused_with_its_remedy(token, tmp_path, monkeypatch):
    with pytest.raises(AuthenticationError, match="the session token is empty: unset WEIGHTWIRE_T"):
        Codec(token)
    monkeypatch.setenv("WEIGHTWIRE_TOKEN", token)
    with pytest.raises(AuthenticationError, match="the session token is empty"):
        Session.open(f"file://{tmp_path}/session", deadline=Deadline(1))
    assert not (tmp_path / "session").exists()


@pytest.mark.parametrize(
    ("writer", "reader", "message"),
    [
        ("one", "two", "was signed with another token: give all members the same WEIGHTWIRE_TOKEN"),
        ("one", None, "is signed, and this process has no token: set WEIGHTWIRE_TOKEN"),
        (None, "two", "isn't signed: set WEIGHTWIRE_TOKEN on the process that wrote it"),
    ],
    ids=["wrong", "missing here", "missing there"],
)
def test_members_whose_tokens_differ_are_told_what_to_set(tmp_path, writer, reader, message):
    url = f"file://{tmp_path}/session"
    Session.open(url, deadline=Deadline(5), token=writer).close()
    with pytest.raises(AuthenticationError) as caught:
        Session.open(url, deadline=Deadline(5), token=reader)
    assert str(caught.value) == f"record 'session' {message}"


def test_the_token_comes_from_the_environment_unless_it_is_given(tmp_path, monkeypatch):
    url = f"file://{tmp_path}/session"
    monkeypatch.setenv("WEIGHTWIRE_TOKEN", "secret")
    Session.open(url, deadline=Deadline(5))
    monkeypatch.delenv("WEIGHTWIRE_TOKEN")
    Session.open(url, deadline=Deadline(5), token="secret")


@pytest.mark.parametrize("part", ["schema", "kind", "session", "writer", "sequence", "body", "mac"])
def test_a_signed_record_that_was_changed_anywhere_is_refused(part):
    envelope = json.loads(codec("secret").seal(KEY, Lease(7)))
    changed = {
        "schema": 2,
        "kind": "Closed",
        "session": "f" * 16,
        "writer": "f" * 16,
        "sequence": 99,
        "body": {"counter": 8},
        "mac": envelope["mac"][:-1] + ("0" if envelope["mac"][-1] != "0" else "1"),
    }
    assert codec("secret").open(KEY, compact(envelope), Lease) == Lease(7)
    envelope[part] = changed[part]
    error = refusal(codec("secret"), compact(envelope))
    # Another schema says nothing that this version could authenticate.
    assert isinstance(error, AuthenticationError) == (part != "schema")


def test_a_signed_record_that_was_moved_to_another_key_is_refused():
    sealed = codec("secret").seal("receivers/a/000001/lease", Lease(1))
    error = refusal(codec("secret"), sealed, key="receivers/b/000001/lease")
    assert isinstance(error, AuthenticationError)


def test_a_record_of_another_session_is_refused_naming_both():
    sealed = codec(session="a" * 16).seal(KEY, Lease(1))
    assert str(refusal(codec(session="b" * 16), sealed)) == (
        f"record '{KEY}' belongs to session '{'a' * 16}', not to '{'b' * 16}': "
        "the session was made anew, open it again"
    )


def test_a_record_of_another_kind_is_refused():
    assert str(refusal(codec(), codec().seal(KEY, Lease(1)), Outcome)) == (
        f"record '{KEY}' is a 'Lease', not a Outcome: is something else writing to this session?"
    )


def test_a_record_of_another_schema_says_to_run_one_version():
    envelope = json.loads(codec().seal(KEY, Lease(1))) | {"schema": 7}
    assert "has schema 7, this weightwire writes 1: run one version on all members" in str(
        refusal(codec(), compact(envelope))
    )


def test_an_oversized_record_is_refused_before_it_is_parsed(monkeypatch):
    monkeypatch.setattr(records, "MAX_RECORD", 1000)
    assert "has 1001 bytes: more than 1000" in str(refusal(codec(), b"[" * 1001))


@pytest.mark.parametrize(
    "body",
    [
        b'{"counter":-1}',
        b'{"counter":1.5}',
        b'{"counter":"1"}',
        b'{"counter":1,"extra":2}',
        b"{}",
        b"[1]",
        b'{"counter":99999999999999999999}',
    ],
)
def test_a_body_of_wrong_type_is_malformed(body):
    sealed = codec().seal(KEY, Lease(1)).replace(b'{"counter":1}', body)
    assert body in sealed
    assert "is malformed (" in str(refusal(codec(), sealed))


@pytest.mark.parametrize("name", ["", "**", "../up", "a\0b", "AB", "f" * 65, "ab\n"])
def test_a_session_whose_id_could_be_no_part_of_a_file_name_is_refused(name):
    sealed = codec().seal(KEY, SessionRecord(name, 1.0))
    assert "is malformed (" in str(refusal(codec(), sealed, SessionRecord))


@FAST
@given(st.binary(max_size=300), st.sampled_from([None, "secret"]))
@example(b"[" * 100_000, None)
@example(b"\xff\xfe", None)
@example(b'{"schema":1,"kind":"\xff"}', None)
def test_garbage_is_a_session_error_and_nothing_else(payload, token):
    refusal(codec(token), payload)


@settings(FAST, max_examples=600)
@given(st.data(), st.sampled_from([None, "secret"]))
def test_damaged_records_open_unchanged_or_are_refused(data, token):
    original = Status("tainted", None, ErrorInfo("PeerLost", "é"), "d")
    payload = bytearray(codec(token).seal(KEY, original))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(payload) - 1))
        match data.draw(st.sampled_from(["set", "cut", "insert"])):
            case "set":
                payload[at] = data.draw(st.integers(0, 255))
            case "cut":
                del payload[at : at + data.draw(st.integers(1, 20))]
            case "insert":
                payload[at:at] = data.draw(st.binary(max_size=8))
        if not payload:
            payload = bytearray(b"0")
    try:
        opened = codec(token).open(KEY, bytes(payload), Status)
    except SessionError:
        return
    assert token is None or opened == original


@FAST
@given(
    st.fixed_dictionaries(
        {
            "schema": st.just(1) | st.integers(),
            "kind": st.just("Lease") | st.text(max_size=300),
            "session": st.just("0123456789abcdef") | st.text(max_size=10),
            "writer": st.text(max_size=10),
            "sequence": st.integers(-5, 1 << 70),
            "body": st.none() | st.integers() | st.dictionaries(st.text(), st.integers()),
            "mac": st.text(max_size=70),
        }
    ),
    st.sampled_from([None, "secret"]),
)
@example(
    {
        "schema": 1,
        "kind": "Lease",
        "session": "0123456789abcdef",
        "writer": "w",
        "sequence": 1,
        "body": {"counter": 1},
        "mac": "é" * 64,
    },
    "secret",
)
def test_forged_envelopes_are_refused(envelope, token):
    try:
        codec(token).open(KEY, compact(envelope), Lease)
    except SessionError:
        return
    assert token is None


@FAST
@given(st.binary(max_size=2000))
def test_opaque_bytes_survive(blob):
    ready = Ready((blob, b""))
    assert codec().open(KEY, codec().seal(KEY, ready), Ready) == ready


# ---------------------------------------------------------------------- errors that travel


OF_ONE_PROCESS = {"Cancelled", "HandleError"}


@pytest.mark.parametrize("name", sorted(OF_ONE_PROCESS))
def test_what_says_nothing_of_other_processes_travels_as_peer_lost(name):
    kind = getattr(errors, name)
    arrived = ErrorInfo.of(kind("it was closed")).to_error("receiver 'a' failed")
    assert type(arrived) is errors.PeerLost
    assert str(arrived) == f"receiver 'a' failed: {name}: it was closed"


@pytest.mark.parametrize("name", sorted(set(errors.__all__) - OF_ONE_PROCESS))
def test_every_error_of_the_tree_travels_as_its_class(name):
    kind = getattr(errors, name)
    arrived = ErrorInfo.of(kind("tensor 'w' is wrong")).to_error("receiver 'a' failed")
    assert type(arrived) is kind
    assert str(arrived) == "receiver 'a' failed: tensor 'w' is wrong"


@pytest.mark.parametrize("forged", ["SystemExit", "__name__", "annotations", "WeightWireErrorX"])
def test_any_other_error_travels_as_peer_lost_with_its_name(forged):
    arrived = ErrorInfo(forged, "boom").to_error("receiver 'a' failed")
    assert type(arrived) is PeerLost
    assert str(arrived) == f"receiver 'a' failed: {forged}: boom"


def test_a_long_message_is_cut_and_an_empty_one_replaced():
    assert len(ErrorInfo.of(TableMismatch("x" * 100_000)).message) == 16 << 10
    assert ErrorInfo.of(KeyboardInterrupt()).message == "KeyboardInterrupt"
