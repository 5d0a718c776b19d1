"""redis:// sessions against a real server: what it may do, and what becomes of a session then."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from weightwire.deadline import Deadline, calling
from weightwire.errors import AuthenticationError, ConfigError, SessionError
from weightwire.session.records import Lease
from weightwire_redis import store

# ---------------------------------------------------------------------- what is kept there


def test_a_lease_expires_long_after_its_end_and_records_never(redis_server, open_session):
    session = open_session(redis_server.url("expiry"))
    session.write("senders/000001/record", Lease(1))
    session.write("senders/000001/lease", Lease(1), durable=False)
    keys = {
        key.decode().rpartition("/")[2]: redis_server.command("TTL", key)
        for key in redis_server.command("KEYS", "weightwire:expiry:*")
    }
    assert keys.pop("lease") > 86400  # a lease is at most a day
    assert len(keys) > 2
    assert set(keys.values()) == {-1}


def test_an_expired_lease_is_absent_and_can_be_renewed(redis_server, open_session):
    session = open_session(redis_server.url("expired"))
    session.write("senders/000001/lease", Lease(1), durable=False)
    (key,) = redis_server.command("KEYS", "weightwire:expired:*/senders/000001/lease")
    redis_server.command("PEXPIRE", key, "1")
    while redis_server.command("EXISTS", key):
        time.sleep(0.001)
    assert session.read("senders/000001/lease", Lease) is None
    session.write("senders/000001/lease", Lease(2), durable=False)
    assert session.read("senders/000001/lease", Lease) == Lease(2)


def test_a_session_asks_for_its_own_names_only(redis_server, open_session):
    """Other runs share the server: nothing may take time by how much they keep there."""
    other = [word for i in range(2000) for word in (f"other:{i}", "x")]
    redis_server.command("MSET", *other)
    session = open_session(redis_server.url("own"))
    redis_server.command("CONFIG", "RESETSTAT")
    for key in ("a/b/c", "a/d", "b"):
        session.write(key, Lease(1))
    assert session.children("a") == ["b", "d"]
    session.delete_tree("a")
    session.delete("b")
    used = set(redis_server.command("INFO", "commandstats"))
    assert not {command for command in used if "scan" in command or "keys" in command}
    assert len(redis_server.command("KEYS", "other:*")) == 2000
    redis_server.command("DEL", *other[::2])


def test_names_and_databases_are_sessions_of_their_own(redis_server, open_session):
    first, second = open_session(redis_server.url("one")), open_session(redis_server.url("two"))
    third = open_session(redis_server.url("3/one"))
    assert len({first.id, second.id, third.id}) == 3
    first.write("a", Lease(1))
    assert second.read("a", Lease) is None
    assert third.read("a", Lease) is None


def test_whoever_only_looks_writes_nothing(redis_server, open_session):
    url = redis_server.url("looked-at")
    with pytest.raises(SessionError, match=r"doesn't exist: correct the URL, or start a sender"):
        open_session(url, read_only=True)
    assert redis_server.command("KEYS", "weightwire:looked-at*") == []
    session = open_session(url)
    before = redis_server.command("INFO", "commandstats")["cmdstat_set"]["calls"]
    assert open_session(url, read_only=True).id == session.id
    assert redis_server.command("INFO", "commandstats")["cmdstat_set"]["calls"] == before


def test_a_closed_session_says_so(redis_server, open_session):
    session = open_session(redis_server.url("closed"))
    session.close()
    session.close()
    with pytest.raises(SessionError, match="is closed: open it again"):
        session.read("a", Lease)


# ---------------------------------------------------------------------- restarts


def test_a_server_that_comes_back_with_its_data_is_used_again(run_redis, open_session):
    server = run_redis(keep=True)
    session = open_session(server.url())
    session.write("a", Lease(1))
    server.restart()
    assert session.read("a", Lease) == Lease(1)
    server.kill()
    begins = threading.Timer(0.5, server.start)
    begins.start()
    with calling(Deadline(20)):
        session.write("a", Lease(2))
    begins.join()
    assert session.read("a", Lease) == Lease(2)
    assert session.children("nothing") == []


def restarts(server, stop: threading.Event) -> threading.Thread:
    def again() -> None:
        while not stop.is_set():
            server.restart()
            time.sleep(0.15)

    thread = threading.Thread(target=again)
    thread.start()
    return thread


def test_whatever_was_answered_is_true_across_restarts(run_redis, open_session):
    """Two members create the same keys, and write and delete their own, while the server dies."""
    server = run_redis(keep=True)
    sessions = [open_session(server.url()) for _ in range(2)]
    stop, problems = threading.Event(), []
    won: list[set[int]] = [set(), set()]
    rounds = [0, 0]

    def member(me: int) -> None:
        session = sessions[me]
        try:
            while not stop.is_set() or rounds[me] < 40:
                i = rounds[me]
                if session.create(f"claim/{i}", Lease(me)):
                    won[me].add(i)
                session.write(f"own/{me}/{i % 7}", Lease(i))
                if session.read(f"own/{me}/{i % 7}", Lease) != Lease(i):
                    problems.append(f"{me} wrote {i}, and it isn't there")
                session.delete(f"own/{me}/{i % 7}")
                if session.read(f"own/{me}/{i % 7}", Lease) is not None:
                    problems.append(f"{me} deleted {i}, and it is there")
                rounds[me] += 1
        except Exception as error:
            problems.append(repr(error))

    threads = [threading.Thread(target=member, args=(me,)) for me in range(2)]
    for thread in threads:
        thread.start()
    ends = threading.Event()
    chaos = restarts(server, ends)
    time.sleep(2.5)
    ends.set()
    chaos.join()
    stop.set()
    for thread in threads:
        thread.join()
    assert not problems
    both = min(rounds)
    assert both >= 40
    for i in range(both):
        winners = [me for me in range(2) if i in won[me]]
        assert len(winners) == 1, (i, winners)
        assert sessions[0].read(f"claim/{i}", Lease) == Lease(winners[0])


def test_a_server_that_lost_its_data_is_an_error_that_says_so(run_redis, open_session):
    server = run_redis()
    session = open_session(server.url())
    session.write("a", Lease(1))
    server.restart()
    for action in (lambda: session.read("a", Lease), lambda: session.write("b", Lease(1))):
        with pytest.raises(SessionError) as caught:
            action()
        assert str(caught.value) == (
            f"session {session.url} lost its records (Redis came back without its data, or with "
            "older data): start all members again, and let Redis keep its data (appendonly yes, "
            "appendfsync always)"
        )
    newer = open_session(server.url())
    assert newer.id != session.id
    assert newer.children("b") == []
    with pytest.raises(SessionError, match="lost its records"):
        session.write("a", Lease(2))
    assert newer.read("a", Lease) is None


def test_a_member_that_slept_through_the_loss_is_told_that_the_session_is_another(
    run_redis, open_session
):
    server = run_redis()
    session = open_session(server.url())
    server.restart()
    open_session(server.url()).write("a", Lease(7))
    with pytest.raises(SessionError, match=r"another session has its name now\): start all mem"):
        session.write("a", Lease(1))
    assert open_session(server.url()).read("a", Lease) == Lease(7)


def test_a_server_that_comes_back_with_older_data_is_noticed(run_redis, open_session):
    """As after a power failure, or where a replica that was behind took over."""
    server = run_redis()
    session = open_session(server.url())
    session.write("a", Lease(1))
    server.command("SAVE")
    session.write("lease", Lease(1), durable=False)
    server.restart()
    assert session.read("a", Lease) == Lease(1)  # a lease may be lost
    session.write("a", Lease(2))
    server.restart()
    with pytest.raises(SessionError, match="came back without its data, or with older data"):
        session.read("b", Lease)
    assert open_session(server.url()).read("a", Lease) == Lease(1)


def test_a_loss_is_noticed_however_much_was_written_since(run_redis, open_session):
    """By one who saw what is lost; another may have written as much again before he looks."""
    server = run_redis()
    robbed, other = (open_session(server.url()) for _ in range(2))
    server.command("SAVE")
    for i in range(3):
        robbed.write("a", Lease(i))
    server.restart()
    for i in range(5):
        other.write("b", Lease(i))
    with pytest.raises(SessionError, match="came back without its data, or with older data"):
        robbed.read("b", Lease)
    other.write("b", Lease(9))
    assert other.read("a", Lease) is None


def test_a_member_that_slept_through_a_whole_history_goes_on(run_redis, open_session, monkeypatch):
    monkeypatch.setattr(store, "HISTORY", 100)
    server = run_redis()
    sleeper, other = (open_session(server.url()) for _ in range(2))
    sleeper.write("a", Lease(1))
    for i in range(400):
        other.write("b", Lease(i))
    assert sleeper.read("b", Lease) == Lease(399)
    (key,) = server.command("KEYS", "weightwire:*:history")
    assert server.command("XLEN", key) < 300


# ---------------------------------------------------------------------- away


def test_nobody_at_the_port_is_an_error_within_the_deadline(run_redis, open_session):
    server = run_redis()
    server.kill()
    began = time.monotonic()
    with pytest.raises(SessionError) as caught:
        open_session(server.url(), seconds=1.0)
    assert time.monotonic() - began < 1.6
    first = str(caught.value).splitlines()[0]
    assert first.startswith(f"session {server.url()} can't be reached (open: no answer within 1 s;")
    assert first.endswith("start Redis, or correct host and port")


def test_a_stopped_server_is_an_error_within_the_deadline_and_used_again(run_redis, open_session):
    server = run_redis()
    session = open_session(server.url())
    session.write("a", Lease(1))
    server.signal(signal.SIGSTOP)
    for action in (lambda: session.read("a", Lease), lambda: session.write("a", Lease(2))):
        began = time.monotonic()
        with calling(Deadline(0.7)), pytest.raises(SessionError, match="can't be reached"):
            action()
        assert time.monotonic() - began < 1.3
    server.signal(signal.SIGCONT)
    session.write("a", Lease(3))
    assert session.read("a", Lease) == Lease(3)


def test_what_a_lost_connection_held_never_comes_after_what_followed(run_redis, open_session):
    """A server that stood still reads what it was sent then: it must have been taken back."""
    server = run_redis()
    session = open_session(server.url())
    for i in range(20):
        server.signal(signal.SIGSTOP)
        with calling(Deadline(0.2)), pytest.raises(SessionError, match="can't be reached"):
            session.write("a", Lease(2 * i))
        late = threading.Timer(0.02, server.signal, (signal.SIGCONT,))
        late.start()
        session.write("a", Lease(2 * i + 1))
        late.join()
        assert session.read("a", Lease) == Lease(2 * i + 1)


def answering(reply: bytes, *, pause: float = 0.0) -> tuple[socket.socket, threading.Thread]:
    """Something at a port that isn't Redis, and says this to everything."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            with peer:
                try:
                    peer.recv(1 << 16)
                    step = 1 if pause else len(reply)
                    for at in range(0, len(reply), step):
                        peer.sendall(reply[at : at + step])
                        time.sleep(pause)
                except OSError:
                    pass

    thread = threading.Thread(target=serve)
    thread.start()
    return listener, thread


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n" * 20,
        b"$x\r\n" * 20,
        b"*1\r\n" * 100_000,
        b"*-7\r\n" * 20,
        b"$5\r\nabcdefgh\r\n" * 20,
        b"+OK\r\n" * 20,
        b":1\r\n" * 20,
        b"*0\r\n" * 20,
        b"$-1\r\n" * 20,
        b"-\r\n" * 20,
        b"\xff\xfe\r\n" * 20,
    ],
)
def test_what_isnt_redis_is_a_session_error(open_session, reply):
    listener, thread = answering(reply)
    try:
        # By how far it gets: no answer, no Redis, or an identity that isn't one.
        said = r"session redis://127\.0\.0\.1:\d+/run|writing to this session's keys"
        with pytest.raises(SessionError, match=said):
            open_session(f"redis://127.0.0.1:{listener.getsockname()[1]}/run", seconds=0.5)
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def test_a_server_that_answers_byte_by_byte_doesnt_outlast_the_deadline(open_session):
    listener, thread = answering(b"$100000\r\n" + b"x" * 100_000, pause=0.02)
    began = time.monotonic()
    try:
        with pytest.raises(SessionError, match="can't be reached"):
            open_session(f"redis://127.0.0.1:{listener.getsockname()[1]}/run", seconds=1.0)
        assert time.monotonic() - began < 1.6
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


# ---------------------------------------------------------------------- full, evicting, foreign


def test_a_full_server_is_an_error_that_says_what_to_do(run_redis, open_session):
    server = run_redis(options=("--maxmemory", "4mb"))
    session = open_session(server.url())
    with pytest.raises(SessionError) as caught:
        session.put_blob(bytes(16 << 20))
    first = str(caught.value).splitlines()[0]
    assert "Redis is full" in first
    assert "raise its maxmemory, or delete sessions that are over" in first
    assert session.read("a", Lease) is None  # reading goes on


@pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-random"])
def test_a_server_that_evicts_records_is_refused(run_redis, open_session, policy):
    server = run_redis(options=("--maxmemory-policy", policy))
    with pytest.raises(SessionError) as caught:
        open_session(server.url())
    assert str(caught.value) == (
        f"session {server.url()}: Redis drops records when its memory is full (maxmemory-policy "
        f"{policy}): CONFIG SET maxmemory-policy noeviction"
    )


def test_leases_that_are_evicted_are_written_again(run_redis, open_session):
    server = run_redis(options=("--maxmemory-policy", "volatile-lru"))
    session = open_session(server.url())
    session.write("a", Lease(1))
    session.write("lease", Lease(1), durable=False)
    server.command("CONFIG", "SET", "maxmemory", "1")  # everything that may go, goes
    while server.command("KEYS", "*/lease"):
        with pytest.raises(SessionError, match="Redis is full"):
            session.write("a", Lease(2))
    assert session.read("lease", Lease) is None
    assert session.read("a", Lease) == Lease(1)
    server.command("CONFIG", "SET", "maxmemory", "0")
    session.write("lease", Lease(2), durable=False)
    assert session.read("lease", Lease) == Lease(2)


def test_a_record_that_somebody_else_removed_is_missed(redis_server, open_session):
    session = open_session(redis_server.url("robbed"))
    session.write("a", Lease(1))
    (key,) = redis_server.command("KEYS", "weightwire:robbed:*/a")
    redis_server.command("DEL", key)
    with pytest.raises(SessionError, match=r"lost record 'a': Redis evicted it, or somebody del"):
        session.read("a", Lease)
    session.write("a", Lease(2))
    assert session.read("a", Lease) == Lease(2)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("SET", "KEY", "x"), "record 'a' can't be read"),
        (("SET", "KEY", "x" * 40), "record 'a' can't be read"),
        (("DEL", "KEY"), "lost record 'a'"),
        (("SET", "KEY", "0123456789abcdef\nnonsense"), "record 'a' can't be read"),
        (("RPUSH", "KEY", "x"), "something else writes to its keys"),
    ],
)
def test_values_of_others_are_errors(redis_server, open_session, command, message):
    session = open_session(redis_server.url("foreign"))
    session.write("a", Lease(1))
    (key,) = redis_server.command("KEYS", "weightwire:foreign:*/a")
    redis_server.command("DEL", key)
    redis_server.command(*(key.decode() if word == "KEY" else word for word in command))
    with pytest.raises(SessionError, match=message):
        session.read("a", Lease)
    redis_server.command("DEL", key)
    session.delete("a")


def test_a_value_that_is_too_large_is_refused_before_it_is_fetched(redis_server, open_session):
    session = open_session(redis_server.url("large"))
    session.write("a", Lease(1))
    (key,) = redis_server.command("KEYS", "weightwire:large:*/a")
    redis_server.command("SETRANGE", key, str(100 << 20), "x")
    with pytest.raises(SessionError, match=r"record 'a' has more than 67108864 bytes"):
        session.read("a", Lease)
    redis_server.command("DEL", key)


@pytest.mark.parametrize("value", ["x", "", "0123456789ABCDEF", "0123456789abcdef0"])
def test_an_identity_that_isnt_one_is_an_error(redis_server, open_session, value):
    redis_server.command("SET", "weightwire:squatted", value)
    with pytest.raises(SessionError, match="something else writing to this session's keys"):
        open_session(redis_server.url("squatted"))


def test_a_replica_is_named(run_redis, open_session):
    primary = run_redis()
    replica = run_redis(options=("--replicaof", f"127.0.0.1 {primary.port}"))
    with pytest.raises(SessionError, match=r"is a replica .*: give the address of its primary"):
        open_session(replica.url())


# ---------------------------------------------------------------------- who may


def test_a_wrong_or_missing_password_is_an_authentication_error(run_redis, open_session):
    server = run_redis(options=("--requirepass", "s3cret/#"))
    session = open_session(f"redis://:s3cret%2F%23@{server.address}/run")
    assert session.url == server.url()
    session.write("a", Lease(1))
    for given in ("", ":wr0ng@", "nobody:wr0ng@"):
        with pytest.raises(AuthenticationError) as caught:
            open_session(f"redis://{given}{server.address}/run")
        text = str(caught.value)
        assert text.startswith(f"session {server.url()}: Redis refuses user or password (")
        assert text.splitlines()[0].endswith("correct them in the URL")
        assert "wr0ng" not in text


def test_a_user_that_may_use_these_keys_only_is_enough(run_redis, open_session, caplog):
    server = run_redis()
    allowed = ("~weightwire:*", "+@read", "+@write", "+@transaction", "+@connection")
    server.command("ACL", "SETUSER", "trainer", "on", ">pass", *allowed)
    server.command("ACL", "SETUSER", "guest", "on", ">pass", "~*", "+@read", "+@connection")
    session = open_session(f"redis://trainer:pass@{server.address}/run")
    assert "whether Redis evicts records can't be seen" in caplog.text
    session.write("a/b", Lease(1))
    assert session.children("a") == ["b"]
    session.delete_tree("a")
    with pytest.raises(SessionError, match="doesn't permit this user all that a session needs"):
        open_session(f"redis://guest:pass@{server.address}/run")


def test_tls_needs_a_certificate_that_is_trusted(run_redis, open_session, tmp_path, monkeypatch):
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-keyout", str(key), "-out", str(certificate), "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
    )
    server = run_redis(
        options=(
            "--tls-cert-file",
            str(certificate),
            "--tls-key-file",
            str(key),
            "--tls-auth-clients",
            "no",
            "--tls-port",
            "PORT",
        )
    )
    url = f"rediss://{server.address}/run"
    with pytest.raises(SessionError, match=r"certificate isn't trusted .* in SSL_CERT_FILE"):
        open_session(url)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    session = open_session(url)
    session.put_blob(bytes(5 << 20))
    session.write("a", Lease(1))
    assert open_session(url).read("a", Lease) == Lease(1)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis://127.0.0.1:6379", "names no session: write redis://[user:password@]host[:port]/"),
        (
            "redis:///run",
            "is incomplete: write redis://[user:password@]host[:port]/[database/]name",
        ),
        ("redis://127.0.0.1/0", "names no session"),
        ("redis://127.0.0.1/a/b", "is incomplete"),
        ("redis://127.0.0.1/1/2/b", "is incomplete"),
        ("redis://127.0.0.1/a%2Fb", "names no session"),
        ("redis://127.0.0.1:99999/run", "has no valid port"),
        ("redis://me@127.0.0.1/run", "has a user and no password"),
        ("redis://10.0.0.1/run", "is open to the network: set WEIGHTWIRE_TOKEN on all members, or"),
        ("redis://:secret@[::1/run", "is no URL"),
        ("redis://:sec#secret@127.0.0.1/run", "has a '?' or '#'"),
        ("redis://:secret@127.0.0.1:port/run", "has no valid port"),
        ("rediss://redis.example/run", "is open to the network"),
    ],
)
def test_a_wrong_url_shows_the_right_form_and_no_password(open_session, url, message):
    with pytest.raises(ConfigError) as caught:
        open_session(url, seconds=1)
    assert message in str(caught.value).splitlines()[0]
    assert "secret" not in str(caught.value)


def test_core_and_the_plug_in_do_without_redis_py(tmp_path):
    (tmp_path / "redis.py").write_text("raise ImportError('no redis here')")
    code = """
from weightwire import plugins
from weightwire.deadline import Deadline
from weightwire.errors import BackendUnavailable
from weightwire.session import Session
try:
    Session.open("redis://127.0.0.1/run", deadline=Deadline(1))
except BackendUnavailable as error:
    print(error)
"""
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout == (
        "session redis://127.0.0.1/run needs redis-py (no redis here): "
        "pip install 'weightwire[redis]'\n"
    )


def test_a_session_is_inspected_without_writing(redis_server, open_session):
    from weightwire.inspection import inspect_session
    from weightwire.session.lease import LeaseObserver

    url = redis_server.url("inspected")
    open_session(url)
    looked = open_session(url, read_only=True)
    view = inspect_session(looked, LeaseObserver(looked))
    assert view.url == url
    assert view.receivers == ()
