"""Sessions, and what goes wrong with each built-in store; what all promise is in the kit."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import threading
import time
from pathlib import Path

import pytest

from weightwire.deadline import Deadline, calling
from weightwire.errors import AuthenticationError, ConfigError, SessionError
from weightwire.session.file import FileStore
from weightwire.session.records import Lease
from weightwire.session.session import Session


@pytest.fixture
def open_session(request):
    def opener(url: str, *, seconds: float = 20, **options) -> Session:
        session = Session.open(url, deadline=Deadline(seconds), **options)
        request.addfinalizer(session.close)
        return session

    return opener


@pytest.fixture
def session(session_url, open_session) -> Session:
    return open_session(session_url)


# ---------------------------------------------------------------------- both schemes


def test_names_that_are_none_of_ours_are_left_out_of_listings(session):
    session.write("receivers/a/1", Lease(1))
    session.store.put("receivers/lost+found", b"x")
    session.store.put("receivers/²", b"x")
    assert session.children("receivers") == ["a"]
    assert session.numbers("receivers") == []


def test_a_record_that_is_put_back_in_its_successors_place_is_refused(session, open_session):
    reader = open_session(session.url)
    session.write("lease", Lease(1))
    old = session.store.get("lease")
    session.write("lease", Lease(2))
    assert reader.read("lease", Lease) == Lease(2)
    session.store.put("lease", old)
    with pytest.raises(AuthenticationError, match=r"'lease' of session .* is older than one that"):
        reader.read("lease", Lease)
    session.write("lease", Lease(3))
    assert reader.read("lease", Lease) == Lease(3)
    session.delete("lease")
    other = open_session(session.url)
    other.write("lease", Lease(1))  # another writer counts for itself
    assert reader.read("lease", Lease) == Lease(1)


def test_threads_that_read_one_place_never_take_each_others_records_for_old_ones(session):
    stop = threading.Event()
    failures = []

    def read():
        while not stop.is_set():
            try:
                session.read("lease", Lease)
            except AuthenticationError as error:
                failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for counter in range(300):
        session.write("lease", Lease(counter), durable=False)
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures


# ---------------------------------------------------------------------- URLs


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("/shared/run42", "is no URL: write file:///directory or tcp://host:port/name"),
        ("", "is no URL: write file:///directory or tcp://host:port/name"),
        (None, "is no URL: write file:///directory or tcp://host:port/name"),
        ("tcp://[::1/run", "is no URL: write file:///directory or tcp://host:port/name"),
        ("carrier-pigeon://x/y", "no session scheme 'carrier-pigeon' is installed; installed: fil"),
        ("file://shared/run42", "names host 'shared': write file:///absolute/path, with three"),
        ("file:///", "names no directory: write file:///absolute/path"),
        ("file:run42", "names no directory: write file:///absolute/path"),
        ("file:///tmp/a?b", "has a '?' or '#', which would cut it short: write %3F or %23"),
        ("file:///tmp/a#b", "has a '?' or '#', which would cut it short: write %3F or %23"),
        ("file:///tmp/a\nb", "has a control character, which would be left out"),
        ("tcp://127.0.0.1:29400/a\tb", "has a control character, which would be left out"),
        ("file:///tmp/a%00b", "has a zero byte: take it out"),
        ("tcp://127.0.0.1/run", "is incomplete: write tcp://host:port/name"),
        ("tcp://127.0.0.1:29400", "is incomplete: write tcp://host:port/name"),
        ("tcp://127.0.0.1:99999/run", "has no valid port (Port out of range 0-65535): write tcp:"),
        ("tcp://127.0.0.1:port/run", "has no valid port"),
        ("tcp://127.0.0.1:0/run", "has port 0, which only the sender that serves it may choose"),
        ("tcp://me:secret@127.0.0.1:29400/run", "has a user or password: leave it out, and set W"),
        ("file:///tmp/\udcff", "isn't valid Unicode: write other bytes as %xx escapes"),
        ("tcp://127.0.0.1:29400/a/b", "is incomplete: write tcp://host:port/name"),
        ("tcp://:29400/run", "is incomplete: write tcp://host:port/name"),
        ("tcp://10.0.0.1:29400/run", "is open to the network: set WEIGHTWIRE_TOKEN on all"),
        ("tcp://0.0.0.0:29400/run", "is open to the network: set WEIGHTWIRE_TOKEN on all"),
        ("tcp://trainer0:29400/run", "is open to the network: set WEIGHTWIRE_TOKEN on all"),
    ],
)
def test_a_wrong_url_is_a_config_error_that_shows_the_right_form(open_session, url, message):
    with pytest.raises(ConfigError) as caught:
        open_session(url, seconds=5)
    assert message in str(caught.value).splitlines()[0]
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("scheme", ["file", "tcp"])
def test_whoever_only_looks_makes_no_session_and_writes_nothing(tmp_path, open_session, scheme):
    if scheme == "file":
        url = f"file://{tmp_path}/session"
    else:
        url = open_session("tcp://127.0.0.1:0/run", serve=True).url.replace("/run", "/other")
    with pytest.raises(SessionError, match=r"doesn't exist: correct the URL, or start a sender"):
        open_session(url, read_only=True)
    session = open_session(url)
    assert open_session(url, read_only=True).id == session.id
    if scheme == "file":
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
        open_session(url, read_only=True)
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


# ---------------------------------------------------------------------- file://


def test_records_that_others_can_write_are_refused_without_a_token(tmp_path, open_session):
    records = tmp_path / "session" / "records"
    records.mkdir(parents=True)
    records.chmod(0o770)
    with pytest.raises(SessionError) as caught:
        open_session(f"file://{tmp_path}/session")
    assert f"{records} can be written by other users (mode 0770): chmod go-w it" in str(
        caught.value
    )
    open_session(f"file://{tmp_path}/session", token="secret")


def test_directories_and_files_are_private(tmp_path, open_session):
    before = os.umask(0)
    try:
        session = open_session(f"file://{tmp_path}/session")
        session.write("senders/000001/record", Lease(1))
        session.put_blob(b"table")
    finally:
        os.umask(before)
    found = [tmp_path / "session", *(tmp_path / "session").rglob("*")]
    assert len(found) > 5
    for path in found:
        wanted = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path


def test_a_missing_parent_directory_is_named(tmp_path, open_session):
    with pytest.raises(SessionError) as caught:
        open_session(f"file://{tmp_path}/not-mounted/session")
    assert str(caught.value) == (
        f"session directory {tmp_path}/not-mounted/session: its parent doesn't exist; "
        "create it, or mount the shared filesystem"
    )


@pytest.mark.parametrize("where", ["below a file", "is a file", "/proc", "name too long"])
def test_a_directory_that_cannot_be_made_is_named_with_the_reason(tmp_path, open_session, where):
    file = tmp_path / "file"
    file.touch()
    path = {
        "below a file": file / "session",
        "is a file": file,
        "/proc": Path("/proc/session"),
        "name too long": tmp_path / ("x" * 300),
    }[where]
    with pytest.raises(SessionError) as caught:
        open_session(f"file://{path}")
    first = str(caught.value).splitlines()[0]
    assert first.startswith(f"session directory {path}")
    assert "choose another" in first or "create it" in first


def test_a_percent_encoded_path_is_decoded(tmp_path, open_session):
    open_session(f"file://{tmp_path}/run%2042%3F").write("a", Lease(1))
    assert (tmp_path / "run 42?").is_dir()


def test_nothing_temporary_is_left_behind(tmp_path, open_session):
    session = open_session(f"file://{tmp_path}/session")
    session.write("a/b", Lease(1))
    session.create("a/b", Lease(2))
    session.create("a/c", Lease(2))
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".")]


def test_a_full_disk_is_a_session_error_that_names_the_record(tmp_path, open_session, monkeypatch):
    session = open_session(f"file://{tmp_path}/session")

    def full(*args: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(SessionError) as caught:
        session.write("senders/000001/lease", Lease(1))
    monkeypatch.undo()
    assert str(caught.value) == (
        f"session file://{tmp_path}/session: can't write record 'senders/000001/lease' (No space "
        "left on device): check that the filesystem is mounted, writable and not full"
    )
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".")]


def test_a_link_that_nfs_answers_twice_counts_as_made(tmp_path, monkeypatch):
    store = FileStore(tmp_path / "session")
    link = Path.hardlink_to

    def retransmitted(self: Path, target: Path) -> None:
        link(self, target)
        raise FileExistsError(17, "File exists")

    monkeypatch.setattr(Path, "hardlink_to", retransmitted)
    assert store.create("a", b"x")
    assert not store.create("a", b"y")
    assert store.get("a") == b"x"


def test_a_write_is_made_again_where_its_directory_is_deleted_meanwhile(tmp_path, monkeypatch):
    store = FileStore(tmp_path / "session")
    replace, deletions = Path.replace, iter(range(3))

    def after_deletion(self: Path, target: Path) -> Path:
        if next(deletions, None) is not None:
            store.delete_tree("versions/000001")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", after_deletion)
    store.put("versions/000001/2.1/applied", b"x")
    assert next(deletions, None) is None
    assert store.get("versions/000001/2.1/applied") == b"x"


def test_a_directory_that_goes_for_good_is_an_error(tmp_path, open_session):
    session = open_session(f"file://{tmp_path}/session")
    shutil.rmtree(tmp_path / "session")
    with pytest.raises(SessionError, match=r"can't write record 'a' \(No such file or directory\)"):
        session.write("a", Lease(1))


def test_a_tree_that_is_made_while_it_is_deleted_stays(tmp_path, monkeypatch):
    store = FileStore(tmp_path / "session")
    store.put("versions/1", b"x")
    store.delete("versions/1")
    is_dir = Path.is_dir

    def before_it_was_made(self: Path) -> bool:
        monkeypatch.setattr(Path, "is_dir", is_dir)
        store.put("versions/1/offer", b"x")
        return False

    monkeypatch.setattr(Path, "is_dir", before_it_was_made)
    store.delete_tree("versions/1")
    assert store.get("versions/1/offer") == b"x"


# ---------------------------------------------------------------------- tcp://


def listening(pid: int) -> list[tuple[str, int]]:
    """Addresses on which a process listens, as the kernel says."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = []
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                address, port = fields[1].split(":")
                raw = b"".join(
                    bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8)
                )
                found.append((socket.inet_ntop(family, raw), int(port, 16)))
    return found


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_without_a_token_the_server_listens_on_loopback_only(child, host):
    served = child("serve", url=f"tcp://{host}:0/run").hear()
    port = int(served["url"].rpartition(":")[2].partition("/")[0])
    assert listening(served["pid"]) == [("127.0.0.1", port)]


def test_an_ipv6_address_keeps_its_brackets(child, open_session):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    served = child("serve", url="tcp://[::1]:0/run").hear()
    assert served["url"].startswith("tcp://[::1]:")
    assert open_session(served["url"]).id == served["id"]


def test_a_port_that_is_taken_is_named(open_session):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(SessionError) as caught:
            open_session(f"tcp://127.0.0.1:{port}/run", serve=True)
    assert str(caught.value) == (
        f"session tcp://127.0.0.1:{port}/run can't be served: port {port} on 127.0.0.1: Address "
        "already in use; choose a free port, or end the process that holds it"
    )


def assert_refused_in_time(open_session, url: str, seconds: float, **options: object) -> None:
    began = time.monotonic()
    with pytest.raises(SessionError) as caught:
        open_session(url, seconds=seconds, **options)
    assert time.monotonic() - began < seconds * 1.1 + 0.5
    assert str(caught.value).splitlines()[0] == (
        f"session {url} can't be reached (no answer within {seconds:g} s): "
        "start the sender that serves it, or correct host and port"
    )


def test_nobody_at_the_port_is_an_error_within_the_deadline(open_session, free_port):
    assert_refused_in_time(open_session, f"tcp://127.0.0.1:{free_port}/run", 1.0)


def test_a_host_that_does_not_answer_is_an_error_within_the_deadline(open_session):
    # 192.0.2.0/24 is set aside for examples: nobody answers, or the network says so at once.
    assert_refused_in_time(open_session, "tcp://192.0.2.1:29400/run", 1.5, token="secret")


def test_a_server_that_accepts_and_says_nothing_is_an_error_within_the_deadline(open_session):
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        assert_refused_in_time(open_session, f"tcp://127.0.0.1:{mute.getsockname()[1]}/run", 1.5)


def test_a_stopped_server_is_an_error_and_lets_the_process_end(child):
    server = child("serve", url="tcp://127.0.0.1:0/run")
    asker = child("ask_stopped", url=server.hear()["url"])
    asker.hear()
    server.signal(signal.SIGSTOP)
    asker.tell()
    answer = asker.hear(30)
    assert answer["error"] == "SessionError"
    assert (
        "can't be reached (read 'session': it doesn't answer): start the sender"
        in (answer["message"])
    )
    assert answer["seconds"] < 12  # seven, and what a busy machine adds
    assert asker.end(10) == 0


def test_a_server_that_continues_is_used_again(child, open_session):
    server = child("serve", url="tcp://127.0.0.1:0/run")
    session = open_session(server.hear()["url"])
    session.write("a", Lease(1))
    server.signal(signal.SIGSTOP)
    began = time.monotonic()
    for action in (
        lambda: session.read("a", Lease),
        lambda: session.write("b", Lease(2)),
    ):
        with calling(Deadline(1.0)), pytest.raises(SessionError, match="can't be reached"):
            action()
    assert time.monotonic() - began < 2 * 1.1 + 1
    server.signal(signal.SIGCONT)
    assert session.read("a", Lease) == Lease(1)


def test_a_write_to_a_stopped_server_is_an_error(child, open_session):
    """It was sent, but nobody has taken it: nothing may be built on it."""
    server = child("serve", url="tcp://127.0.0.1:0/run")
    session = open_session(server.hear()["url"])
    server.signal(signal.SIGSTOP)
    with calling(Deadline(1.0)), pytest.raises(SessionError, match="doesn't answer"):
        session.write("a", Lease(1))


def test_a_server_that_is_gone_is_an_error(child, open_session):
    server = child("serve", url="tcp://127.0.0.1:0/run")
    session = open_session(server.hear()["url"])
    server.kill()
    began = time.monotonic()
    with pytest.raises(SessionError, match="start the sender that serves it"):
        session.read("a", Lease)
    assert time.monotonic() - began < 8


def test_two_names_on_one_server_are_two_sessions(tcp_server, open_session):
    first, second = open_session(f"{tcp_server}/first"), open_session(f"{tcp_server}/second")
    assert first.id != second.id
    first.write("a", Lease(1))
    assert second.read("a", Lease) is None
    assert second.children("a") == []


def test_a_closed_session_says_so(tcp_server, open_session):
    session = open_session(f"{tcp_server}/closed")
    session.close()
    session.close()
    with pytest.raises(SessionError, match="is closed: open it again"):
        session.read("a", Lease)


def test_a_record_that_tcpstore_would_drop_is_refused(tcp_server, open_session):
    session = open_session(f"{tcp_server}/large")
    for act in (session.store.put, session.store.create):
        with pytest.raises(
            SessionError, match=r"has 8388608 bytes, TCPStore takes 8388608 at once"
        ):
            act("a", bytes(8 << 20))
    session.store.put("a", bytes(8 << 20 >> 1))
    assert session.store.get("a") == bytes(8 << 20 >> 1)
