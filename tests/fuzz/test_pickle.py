"""Nothing is unpickled: no code of ours could, and no decoder does."""

from __future__ import annotations

import io
import pickle
import re
import tokenize
from pathlib import Path

import pytest
from fuzz_targets import TARGETS, Target
from fuzz_worker import try_one

from weightwire.deadline import Deadline
from weightwire.errors import SessionError
from weightwire.session import Session
from weightwire.session.records import MemberRecord

ROOT = Path(__file__).parents[2]
PACKAGES = ("core", "backends", "engines", "sessions", "conformance")
UNPICKLES = re.compile(
    r"\b(c?pickle|cloudpickle|dill|joblib|marshal|shelve|allow_pickle|Unpickler"
    r"|torch \. (load|save)|torch \. package"
    r"|\w*(gather|broadcast|scatter|send|recv)_object(_list)?"
    r"|np \. load|numpy \. load|yaml \. (unsafe_)?load"
    r"|(multiprocessing|mp|context) \. (Simple|Joinable)?(Queue|Pipe|Manager|Pool)"
    r"|multiprocessing \. (managers|connection|queues|pool))\b"
)


def code_of(path: Path) -> str:
    """A file's code, its tokens apart, without comments and strings."""
    left_out = (tokenize.COMMENT, tokenize.STRING, tokenize.NL)
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    return " ".join(token.string for token in tokens if token.type not in left_out)


def test_no_code_unpickles_nor_calls_what_does() -> None:
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert len(files) > 150
    found = {
        str(path.relative_to(ROOT)): match[0]
        for path in files
        if (match := UNPICKLES.search(code_of(path)))
    }
    assert not found


def test_the_search_finds_what_it_is_for(tmp_path: Path) -> None:
    for line in (
        "import pickle",
        "torch.load(path)",
        "dist.all_gather_object(a, b)",
        "queue = multiprocessing.Queue()",
        "np.load(path, allow_pickle=True)",
        "from multiprocessing.connection import Listener",
    ):
        (tmp_path / "bad.py").write_text(line + "\n")
        assert UNPICKLES.search(code_of(tmp_path / "bad.py")), line


class Trap:
    """Its pickle makes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self._path,)


@pytest.fixture
def trap(tmp_path: Path) -> tuple[Path, list[bytes]]:
    sprung = tmp_path / "sprung"
    payloads = [pickle.dumps(Trap(sprung), protocol=protocol) for protocol in range(6)]
    pickle.loads(payloads[0])
    assert sprung.exists()  # it would work
    sprung.unlink()
    return sprung, payloads


@pytest.mark.parametrize("target", TARGETS, ids=[target.name for target in TARGETS])
def test_a_pickle_that_is_sent_is_not_loaded(
    target: Target, trap: tuple[Path, list[bytes]]
) -> None:
    sprung, payloads = trap
    for payload in payloads:
        try_one(target, payload)
        try_one(target, target.seeds[0] + payload)
    assert not sprung.exists()


def test_a_pickle_in_a_records_place_is_a_session_error(
    tmp_path: Path, trap: tuple[Path, list[bytes]]
) -> None:
    sprung, payloads = trap
    with_records = Session.open(f"file://{tmp_path}/session", deadline=Deadline(10))
    for payload in payloads:
        with_records.store.put("senders/000001/record", payload)
        with pytest.raises(SessionError, match="can't be read"):
            with_records.read("senders/000001/record", MemberRecord)
        with_records.store.put("session", payload)
        with pytest.raises(SessionError, match="can't be read"):
            Session.open(f"file://{tmp_path}/session", deadline=Deadline(10))
    assert not sprung.exists()
