"""What every session store promises: ``pytest --pyargs weightwire_conformance.stores``.

Each test is one promise, over each store that ``--weightwire-store URL`` names, with
members in processes of their own where that matters.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from weightwire.errors import AuthenticationError, ConfigError, SessionError
from weightwire.inspection import inspect_session
from weightwire.session import Session, SessionStore, membership
from weightwire.session.lease import LeaseObserver
from weightwire.session.records import Lease
from weightwire_conformance.store_rig import Peer, Peers, Place, Sessions, store_id

__all__: list[str] = []

_PLUGIN = "weightwire-stores-run"
_SEED = 20261130


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    plugin = metafunc.config.pluginmanager.get_plugin(_PLUGIN)
    if plugin is None:
        raise pytest.UsageError("no store to prove: give --weightwire-store URL")
    metafunc.parametrize(
        "place", [Place(url) for url in plugin.urls], ids=map(store_id, plugin.urls)
    )


@pytest.fixture(autouse=True)
def _named(request: pytest.FixtureRequest, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    name = request.node.function.__name__.removeprefix("test_").replace("_", "-")
    if case := [v for k, v in request.node.callspec.params.items() if k != "place"]:
        name += f"[{'-'.join(map(str, case))}]"
    properties = request.node.user_properties
    properties.append(("weightwire_store", store_id(place.asked)))
    properties.append(("weightwire_promise", name))
    monkeypatch.delenv("WEIGHTWIRE_TOKEN", raising=False)


@pytest.fixture
def sessions() -> Iterator[Sessions]:
    opened = Sessions()
    yield opened
    opened.close()


@pytest.fixture
def serving(place: Place, sessions: Sessions) -> Callable[..., Session]:
    """Opens a session that nobody has used, as the sender that may serve it."""

    def make(**options: Any) -> Session:
        return sessions.open(place.new(), serve=True, **options)

    return make


@pytest.fixture
def session(serving: Callable[..., Session]) -> Session:
    return serving()


@pytest.fixture
def url(place: Place, session: Session) -> str:
    """The session's URL for other members."""
    return place.reach(session)


@pytest.fixture
def store(session: Session) -> SessionStore:
    return session.store


@pytest.fixture(scope="module")
def peers(request: pytest.FixtureRequest) -> Iterator[Peers]:
    kept = Peers(request.config.getoption("--weightwire-patience"))
    yield kept
    kept.close()


@pytest.fixture
def members(peers: Peers, url: str) -> Iterator[list[Peer]]:
    """Three other processes that have opened the session."""
    with peers.take(3) as taken:
        for peer in taken:
            peer.start("open", url=url)
        for peer in taken:
            peer.answer()
        yield taken


# ---------------------------------------------------------------------- records


def test_a_value_is_read_back_and_an_absent_one_is_none(store: SessionStore) -> None:
    assert store.get("a/b") is None
    store.put("a/b", b"one")
    store.put("a/b", b"two")
    assert store.get("a/b") == b"two"
    assert store.get("a/c") is None
    assert store.get("a/b/c") is None


@pytest.mark.parametrize("durable", [True, False])
def test_values_are_any_bytes_of_any_size(store: SessionStore, durable: bool) -> None:
    generator = random.Random(_SEED)
    for value in (
        b"",
        b"\0",
        b"\0" * 1000,
        bytes(range(256)) * 3,
        b"\r\n$5\r\n",
        b"\x00absent\xff",
        generator.randbytes(100_000),
        generator.randbytes((2 << 20) + 1),
        b"short again",
    ):
        store.put("a/value", value, durable=durable)
        assert store.get("a/value") == value


def test_what_is_written_is_replaced_whether_durable_or_not(store: SessionStore) -> None:
    for i in range(6):
        store.put("a/b", bytes([i]), durable=i % 3 == 0)
        assert store.get("a/b") == bytes([i])
        assert store.children("a") == ["b"]


def test_deleting_takes_a_record_and_no_more(store: SessionStore) -> None:
    for key in ("a/b", "a/b-c", "a/bc", "a/d/e"):
        store.put(key, key.encode())
    store.delete("a/b")
    store.delete("a/b")
    store.delete("a/d")
    store.delete("nothing/at/all")
    assert store.get("a/b") is None
    assert store.children("a") == ["b-c", "bc", "d"]
    assert store.get("a/d/e") == b"a/d/e"


def test_keys_are_told_apart(store: SessionStore) -> None:
    """Components of all that a key may hold, and of any length that it may have."""
    long = "x" * 127
    keys = [
        "a/1",
        "a/01",
        "a/1.1",
        "a/1_1",
        "a/1-1",
        f"a/{long}",
        f"a/{long[:-1]}",
        f"b/{long}/{long}",
    ]
    for key in keys:
        store.put(key, key.encode())
    assert [store.get(key) for key in keys] == [key.encode() for key in keys]
    assert store.children("a") == sorted(key[2:] for key in keys[:-1])


# ---------------------------------------------------------------------- listings


def test_children_are_the_next_components_sorted(store: SessionStore) -> None:
    for key in ("top/b/x", "top/a", "top/b/y", "topper/z", "top/10/x", "top/9/x", "top-1/x"):
        store.put(key, b"x")
    assert store.children("top") == ["10", "9", "a", "b"]
    assert store.children("top/b") == ["x", "y"]
    assert store.children("top/a") == []
    assert store.children("to") == []
    assert store.children("nothing") == []


def test_a_prefix_of_a_name_is_not_its_parent(store: SessionStore) -> None:
    for key in ("a/b/c", "a/b-x", "a/b.x/y", "a/b0/z", "a/bb"):
        store.put(key, b"x")
    assert store.children("a/b") == ["c"]
    store.delete_tree("a/b")
    assert store.children("a") == ["b-x", "b.x", "b0", "bb"]


def test_a_tree_is_deleted_without_its_neighbours(store: SessionStore) -> None:
    for key in ("t/a/x", "t/a/y/z", "t/ab/x", "t/b"):
        store.put(key, b"x", durable=key != "t/a/x")
    store.delete_tree("t/a")
    assert store.children("t") == ["ab", "b"]
    assert store.get("t/a/y/z") is None
    store.delete_tree("t/b")
    store.delete_tree("t/b")
    store.delete_tree("nothing")
    assert store.children("t") == ["ab"]


def test_thousands_of_records_are_listed(store: SessionStore) -> None:
    names = [f"{i:05d}" for i in range(2000)]
    for name in names:
        store.put(f"l/{name}", b"x", durable=False)
    assert store.children("l") == names
    store.delete_tree("l")
    assert store.children("l") == []


def test_it_behaves_as_a_map_whatever_the_order(
    session: Session, sessions: Sessions, url: str
) -> None:
    """Random operations through two connections, beside a dictionary."""
    generator = random.Random(_SEED)
    stores = [session.store, sessions.open(url).store]
    model: dict[str, bytes] = {}
    # No key lies below another: where a store has directories, one can't be both.
    keys = [f"t/{a}/{b}" for a in "xyz" for b in ("1", "2", "1-2")] + ["t/w", "t/xx"]
    for step in range(300):
        store, key = generator.choice(stores), generator.choice(keys)
        value = f"{step}".encode()
        match generator.randrange(6):
            case 0 | 1:
                store.put(key, value, durable=generator.random() < 0.5)
                model[key] = value
            case 2:
                assert store.create(key, value) == (key not in model), (step, key)
                model.setdefault(key, value)
            case 3:
                store.delete(key)
                model.pop(key, None)
            case 4:
                top = key.rpartition("/")[0] if generator.random() < 0.2 else key
                store.delete_tree(top)
                model = {k: v for k, v in model.items() if k != top and not k.startswith(f"{top}/")}
            case _:
                assert store.get(key) == model.get(key), (step, key)
        other = generator.choice(stores)
        assert other.get(key) == model.get(key), (step, key)
        for top in ("t", "t/x"):
            below = {k[len(top) + 1 :].split("/")[0] for k in model if k.startswith(f"{top}/")}
            # A directory that is empty may still be listed: nothing is found in it.
            listed = other.children(top)
            assert listed == sorted(listed)
            assert below <= set(listed), (step, top)
            extra = [name for name in listed if name not in below]
            assert all(other.get(f"{top}/{name}") is None for name in extra), (step, top)
            assert not any(other.children(f"{top}/{name}") for name in extra), (step, top)


# ---------------------------------------------------------------------- several members


@pytest.mark.parametrize("durable", [True, False])
def test_what_is_written_is_seen_by_others_at_once(
    session: Session, url: str, members: list[Peer], durable: bool
) -> None:
    for counter in range(20):
        session.write("a/b", Lease(counter), durable=durable)
        assert members[0].call("read", url=url, key="a/b") == {"counter": counter}
        members[1].call("write", url=url, key="b/a", counter=counter, durable=durable)
        assert session.read("b/a", Lease) == Lease(counter)
        assert session.children("b") == ["a"]


def test_what_others_deleted_is_listed_when_it_is_written_again(
    session: Session, sessions: Sessions, url: str
) -> None:
    other = sessions.open(url)
    for delete in (other.delete, other.delete_tree):
        for durable in (True, False):
            session.write("top/a", Lease(1), durable=durable)
            assert other.children("top") == ["a"]
            delete("top/a")
            assert session.children("top") == []
            session.write("top/a", Lease(2), durable=durable)
            assert other.children("top") == session.children("top") == ["a"]
            delete("top/a")
        assert session.create("top/a", Lease(3))
        assert other.children("top") == ["a"]
        delete("top/a")


def test_creating_what_is_there_changes_nothing(store: SessionStore) -> None:
    assert store.create("a/b", b'"one"')
    assert not store.create("a/b", b'"one"')
    assert not store.create("a/b", b'"two"')
    assert store.get("a/b") == b'"one"'
    store.delete("a/b")
    assert store.create("a/b", b'"two"')
    store.put("a/c", b'"put"', durable=False)
    assert not store.create("a/c", b'"created"')
    assert store.get("a/c") == b'"put"'


def test_of_many_processes_exactly_one_creates_each_key(
    session: Session, url: str, members: list[Peer]
) -> None:
    for me, member in enumerate(members):
        member.start("race", url=url, keys=60, me=me)
    won = [member.answer()["won"] for member in members]
    assert sorted(key for keys in won for key in keys) == list(range(60))
    for me, keys in enumerate(won):
        for key in keys:
            assert session.read(f"race/{key}", Lease) == Lease(me)


def test_numbers_that_members_claim_are_each_claimed_once(url: str, members: list[Peer]) -> None:
    for member in members:
        member.start("claim", url=url, count=15)
    claimed = sorted(number for member in members for number in member.answer()["mine"])
    assert claimed == list(range(1, 46))


def test_threads_share_a_store(store: SessionStore) -> None:
    problems: list[str] = []
    won: list[str] = []

    def work(me: int) -> None:
        try:
            for i in range(25):
                store.put(f"t/{me}/{i}", bytes([me, i]))
                if store.get(f"t/{me}/{i}") != bytes([me, i]):
                    problems.append(f"{me} read another's")
                if store.create(f"race/{i}", f'"{me}"'.encode()):
                    won.append(f"race/{i}")
        except Exception as error:
            problems.append(repr(error))

    threads = [threading.Thread(target=work, args=(me,)) for me in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    assert sorted(won) == sorted({f"race/{i}" for i in range(25)})
    assert len(store.children("t/3")) == 25


def test_a_reader_never_sees_half_a_value(
    store: SessionStore, url: str, members: list[Peer]
) -> None:
    members[0].start("overwrite", url=url, rounds=100, size=300_000)
    seen = 0
    while not members[0].has_answered():
        value = store.get("torn")
        if value is not None:
            assert len(value) >= 300_000
            assert value == value[:1] * len(value)
            seen += 1
    members[0].answer()
    assert seen > 0


def test_a_member_that_is_killed_leaves_whole_values_and_holds_nobody(
    store: SessionStore, url: str, peers: Peers, members: list[Peer]
) -> None:
    with peers.take(1) as (doomed,):
        doomed.call("open", url=url)
        doomed.start("overwrite", url=url, rounds=0, size=300_000)
        while store.get("torn") is None:
            time.sleep(0.001)
        time.sleep(0.05)
        doomed.kill()
    value = store.get("torn")
    assert value is not None
    assert len(value) >= 300_000
    assert value == value[:1] * len(value)
    store.put("torn", b"x")
    assert store.children("torn") == []
    assert members[0].call("race", url=url, keys=3, me=1)["won"] == [0, 1, 2]


# ---------------------------------------------------------------------- sessions


def test_all_members_agree_on_who_the_session_is(
    session: Session, sessions: Sessions, url: str, peers: Peers
) -> None:
    assert sessions.open(url).id == session.id
    with peers.take(1) as (peer,):
        assert peer.call("open", url=url) == {"id": session.id}
    assert not session.is_replaced()


def test_members_that_come_at_once_make_one_session(
    serving: Callable[..., Session], sessions: Sessions, place: Place, peers: Peers
) -> None:
    with peers.take(3) as taken:
        for _ in range(5):
            url = place.reach(serving()) if place.is_served else place.new()
            for peer in taken:
                peer.start("open", url=url)
            assert {peer.answer()["id"] for peer in taken} == {sessions.open(url).id}
            for peer in taken:
                peer.call("close")


def test_sessions_of_other_names_are_others(serving: Callable[..., Session]) -> None:
    first, second = serving(), serving()
    assert first.id != second.id
    first.write("a/b", Lease(1))
    second.write("a/c", Lease(2))
    assert second.read("a/b", Lease) is None
    assert first.children("a") == ["b"]
    first.delete_tree("a")
    assert second.read("a/c", Lease) == Lease(2)


def test_records_stay_when_members_leave(session: Session, sessions: Sessions, url: str) -> None:
    other = sessions.open(url)
    other.write("a/b", Lease(1))
    other.close()
    other.close()
    assert session.read("a/b", Lease) == Lease(1)
    assert sessions.open(url).read("a/b", Lease) == Lease(1)


def test_a_session_made_anew_is_noticed(session: Session, sessions: Sessions, url: str) -> None:
    session.store.delete("session")
    assert session.is_replaced()
    newer = sessions.open(url)
    assert newer.id != session.id
    assert session.is_replaced()
    newer.write("a/b", Lease(1))
    with pytest.raises(SessionError, match=r"belongs to session .* made anew, open it again"):
        session.read("a/b", Lease)


def test_blobs_cross_processes_in_parts(session: Session, url: str, members: list[Peer]) -> None:
    size = (9 << 20) + 1
    digest = members[0].call("put_blob", url=url, size=size)["digest"]
    payload = hashlib.shake_256(b"blob").digest(size)
    assert session.get_blob(digest) == payload
    assert session.put_blob(payload) == digest
    session.store.delete(f"tables/{digest}/0001")
    assert session.get_blob(digest) is None
    assert session.put_blob(payload) == digest
    assert session.get_blob(digest) == payload


@pytest.mark.parametrize("size", [0, 1, 2 << 20, (2 << 20) + 1])
def test_blobs_of_any_size_come_back(session: Session, size: int) -> None:
    payload = b"z" * size
    assert session.get_blob(session.put_blob(payload)) == payload


def test_whoever_only_looks_makes_nothing(
    session: Session, sessions: Sessions, url: str, place: Place
) -> None:
    session.write("a/b", Lease(1))
    looked = sessions.open(url, read_only=True)
    assert looked.id == session.id
    assert inspect_session(looked, LeaseObserver(looked)).session_id == session.id
    nowhere = place.beside(session)
    for _ in range(2):
        with pytest.raises(SessionError):
            sessions.open(nowhere, read_only=True)


def test_a_member_is_alive_while_it_renews_and_only_then(
    session: Session, url: str, peers: Peers
) -> None:
    """Its process is on this host, or not seen: the lease decides, within its time."""
    observer = LeaseObserver(session)
    with peers.take(1) as (peer,):
        peer.call("open", url=url)
        assert peer.call("enter", url=url, receiver_id="one", lease_ttl=1.0) == {"incarnation": 1}
        (member,) = membership.live_members(session, observer).values()
        until = time.monotonic() + 2.5
        while time.monotonic() < until:
            assert observer.is_alive(member)
            time.sleep(0.05)
        peer.kill()
    gone = time.monotonic()
    while observer.is_alive(member):
        assert time.monotonic() - gone < 5
        time.sleep(0.05)
    assert membership.live_members(session, observer) == {}


# ---------------------------------------------------------------------- hostile input


@pytest.mark.parametrize(
    ("mine", "theirs"), [("one", "two"), ("one", None), (None, "two")], ids=["wrong", "none", "one"]
)
def test_another_token_is_refused(
    serving: Callable[..., Session],
    sessions: Sessions,
    place: Place,
    mine: str | None,
    theirs: str | None,
) -> None:
    url = place.reach(serving(token=mine))
    assert sessions.open(url, token=mine)
    with pytest.raises(AuthenticationError):
        sessions.open(url, token=theirs)


def test_an_empty_token_is_refused(sessions: Sessions, url: str) -> None:
    for token in ("", " "):
        with pytest.raises(AuthenticationError, match="the session token is empty"):
            sessions.open(url, token=token)


def test_records_that_are_forged_moved_or_put_back_are_refused(
    serving: Callable[..., Session], sessions: Sessions, place: Place
) -> None:
    session = serving(token="secret")  # noqa: S106 - of this test
    reader = sessions.open(place.reach(session), token="secret")  # noqa: S106
    session.write("a/b", Lease(1))
    old = session.store.get("a/b")
    assert old is not None
    session.write("a/b", Lease(2))
    assert reader.read("a/b", Lease) == Lease(2)
    session.store.put("a/b", old)
    with pytest.raises(AuthenticationError, match="is older than one that was read before"):
        reader.read("a/b", Lease)
    session.store.put("a/c", old)
    with pytest.raises(AuthenticationError):
        reader.read("a/c", Lease)
    session.store.put("a/d", old.replace(b'"counter":1', b'"counter":9'))
    with pytest.raises(AuthenticationError):
        reader.read("a/d", Lease)


def test_values_that_are_no_records_are_session_errors(session: Session) -> None:
    generator = random.Random(_SEED)
    session.write("a/b", Lease(1))
    sound = session.store.get("a/b")
    assert sound is not None
    for _ in range(50):
        broken = bytearray(sound)
        for _ in range(generator.randrange(1, 4)):
            broken[generator.randrange(len(broken))] = generator.randrange(256)
        for value in (bytes(broken), sound[: generator.randrange(len(sound))], b"", b"\x80\x04."):
            session.store.put("a/b", value)
            with contextlib.suppress(SessionError):
                record = session.read("a/b", Lease)
                assert record is not None  # a letter of its number changed, and it is a record


@pytest.mark.parametrize(
    "key", ["../outside", "a/../../b", "/etc/passwd", "a//b", "", ".a", "a/.", "a\0b"]
)
def test_keys_that_would_leave_the_session_never_reach_the_store(
    session: Session, key: str
) -> None:
    for action in (
        lambda: session.write(key, Lease(1)),
        lambda: session.create(key, Lease(1)),
        lambda: session.read(key, Lease),
        lambda: session.delete(key),
        lambda: session.delete_tree(key),
        lambda: session.children(key),
        lambda: session.get_blob(key),
    ):
        with pytest.raises(ConfigError, match="is malformed"):
            action()
