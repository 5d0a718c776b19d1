"""A session's directory: what the filesystem below it really does."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from weightwire.doctor.check import CheckOptions, Verdict
from weightwire.doctor.children import Step, together

__all__ = [
    "contend",
    "filesystem_kind",
    "fsync",
    "lock",
    "read_while",
    "remove_places",
    "rename",
    "replace_often",
]

_RECORD = 1 << 16
_REPLACEMENTS = 300
_ROUNDS = 100
_SYNCS = 7
_SLOW_SYNC = 0.2
_NAP = 0.0005
_MEETING = 30.0
_PLACE = "place"
_NAME = "weightwire.doctor.directory:"
_OF_ONE_HOST = frozenset(
    {"tmpfs", "ramfs", "overlay", "ext4", "ext3", "xfs", "btrfs", "zfs", "f2fs", "apfs"}
)
_CHOOSE = "choose another directory (--directory), or mend its space, permissions and mount"


def rename(options: CheckOptions) -> Verdict:
    """A reader beside a writer sees the old file or the new one, whole, and never none."""
    if (refused := _unnamed(options)) is not None:
        return refused
    try:
        with _place(options) as place:
            steps = [
                Step(f"{_NAME}replace_often", [str(place)]),
                Step(f"{_NAME}read_while", [str(place)]),
            ]
            replaced, seen = together(steps, options.scratch, options.seconds - 5)
            kind = filesystem_kind(place)
    except (OSError, RuntimeError) as error:
        return _cannot(options, error)
    if seen["torn"] or seen["missing"]:
        return Verdict.failed(
            f"{seen['torn']} of {seen['reads']} reads beside {replaced} renames were torn, and "
            f"{seen['missing']} found no file",
            "choose a filesystem with atomic renames: records would be read half-written",
            **kind,
        )
    shared = ", which other hosts don't see" if kind["filesystem"] in _OF_ONE_HOST else ""
    return Verdict.ok(
        f"{kind['filesystem']} at {kind['mount']}{shared}: {seen['reads']} reads beside "
        f"{replaced} renames, all whole",
        reads=seen["reads"],
        **kind,
    )


def replace_often(directory: str) -> int:
    """The writer: a file of one repeated byte, replaced again and again."""
    path = Path(directory) / "record"
    for number in range(_REPLACEMENTS):
        temporary = path.with_name(f".{number}.tmp")
        temporary.write_bytes(bytes([number % 256]) * _RECORD)
        temporary.replace(path)
        if number == 0:
            _meet(Path(directory), "writer", "reader")
        time.sleep(_NAP)
    (Path(directory) / "over").touch()
    return _REPLACEMENTS


def read_while(directory: str) -> dict[str, int]:
    """The reader: how many reads, and how many were torn or found nothing."""
    seen = {"reads": 0, "torn": 0, "missing": 0}
    path, over = Path(directory) / "record", Path(directory) / "over"
    _meet(Path(directory), "reader", "writer")
    while not over.exists():
        try:
            found = path.read_bytes()
        except FileNotFoundError:
            seen["missing"] += 1
            continue
        seen["reads"] += 1
        seen["torn"] += len(found) != _RECORD or len(set(found)) != 1
    return seen


def fsync(options: CheckOptions) -> Verdict:
    """Files and their directory, as each record of a session is synced."""
    if (refused := _unnamed(options)) is not None:
        return refused
    seconds = []
    try:
        with _place(options) as place:
            for number in range(_SYNCS):
                began = time.perf_counter()
                descriptor = os.open(place / str(number), os.O_WRONLY | os.O_CREAT, 0o600)
                try:
                    if os.write(descriptor, b"x" * _RECORD) < _RECORD:
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
                if sys.platform != "win32":
                    above = os.open(place, os.O_RDONLY)
                    try:
                        os.fsync(above)
                    finally:
                        os.close(above)
                seconds.append(time.perf_counter() - began)
            kind = filesystem_kind(place)
    except OSError as error:
        return _cannot(options, error)
    median = statistics.median(seconds)
    summary = f"a synced record takes {1e3 * median:.1f} ms (median of {_SYNCS})"
    if median > _SLOW_SYNC:
        return Verdict.warning(
            f"{summary}: a version writes about a dozen",
            "put the session on a faster filesystem, or use a redis:// or tcp:// session",
            seconds=median,
            **kind,
        )
    return Verdict.ok(summary, seconds=median, **kind)


def lock(options: CheckOptions) -> Verdict:
    """Two processes race for names and for a lock; each goes to one of them."""
    if (refused := _unnamed(options)) is not None:
        return refused
    try:
        with _place(options) as place:
            steps = [Step(f"{_NAME}contend", [str(place), who]) for who in ("one", "other")]
            one, other = together(steps, options.scratch, options.seconds - 5)
            kind = filesystem_kind(place)
    except (OSError, RuntimeError) as error:
        return _cannot(options, error)
    won = one["won"] + other["won"]
    if refusal := one["error"] or other["error"]:
        return Verdict.failed(
            f"hard links can't be made here ({refusal})",
            "sessions take names by hard links: choose a filesystem that has them, or a "
            "redis:// or tcp:// session",
            **kind,
        )
    if sorted(won) != list(range(_ROUNDS)):
        return Verdict.failed(
            f"two processes raced for {_ROUNDS} names, and {len(won)} were won",
            "choose a filesystem on which creating a hard link is atomic, or a redis:// session",
            **kind,
        )
    flock = sorted((one["flock"], other["flock"]))
    if flock != ["held", "refused"] and sys.platform != "win32":
        return Verdict.warning(
            f"{_ROUNDS} names were each won once, and flock doesn't exclude here "
            f"({' and '.join(flock)})",
            "nothing for weightwire, which needs no flock; Hugging Face's and Triton's caches do: "
            "keep them elsewhere, or mount with locks (NFS: without nolock)",
            **kind,
        )
    return Verdict.ok(f"{_ROUNDS} names were each won by one of two processes", **kind)


def contend(directory: str, who: str) -> dict[str, object]:
    """One of two: the rounds that it won, and whether flock let it in."""
    place = Path(directory)
    won: list[int] = []
    error = ""
    mine = place / f"mine-{who}"
    mine.write_text(who)
    _meet(place, who, "other" if who == "one" else "one")
    for number in range(_ROUNDS):
        try:
            (place / f"name-{number}").hardlink_to(mine)
            won.append(number)
        except FileExistsError:
            continue
        except OSError as refused:
            error = refused.strerror or type(refused).__name__
            break
    return {"won": won, "error": error, "flock": _try_flock(place, who)}


def _try_flock(place: Path, who: str) -> str:
    """``held``, ``refused`` or why neither; the one that has it waits for the other's try."""
    try:
        import fcntl
    except ImportError:  # Windows
        return "unknown"
    locks: Any = fcntl  # its functions aren't known for Windows
    other = "other" if who == "one" else "one"
    with (place / "flock").open("a") as file:
        if who == "other":
            _meet(place, "second", "first")
        try:
            locks.flock(file, locks.LOCK_EX | locks.LOCK_NB)
            found = "held"
        except BlockingIOError:
            found = "refused"
        except OSError as error:
            found = error.strerror or "failed"
        if who == "one":
            _meet(place, "first", "second")
        _meet(place, f"tried-{who}", f"tried-{other}")
    return found


def _meet(place: Path, mine: str, theirs: str) -> None:
    """Say that this side is here, and wait for the other."""
    (place / f"here-{mine}").touch()
    end = time.monotonic() + _MEETING
    while not (place / f"here-{theirs}").exists():
        if time.monotonic() > end:
            raise TimeoutError(f"{theirs} didn't come within {_MEETING:g} s")
        time.sleep(_NAP)


def filesystem_kind(place: Path) -> dict[str, str]:
    """Kind, mount point and options of the filesystem below a directory."""
    unknown = {"filesystem": "a filesystem of unknown kind", "mount": str(place), "options": ""}
    found, longest = unknown, -1
    here = str(place.resolve())
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
            before, _, after = line.partition(" - ")
            fields, kinds = before.split(), after.split()
            if len(fields) < 6 or len(kinds) < 1:
                continue
            mount = fields[4].encode().decode("unicode_escape")
            inside = here == mount or here.startswith(mount.rstrip("/") + "/")
            if inside and len(mount) >= longest:  # of two at one place the later is on top
                longest = len(mount)
                found = {"filesystem": kinds[0], "mount": mount, "options": fields[5]}
    return found


def _unnamed(options: CheckOptions) -> Verdict | None:
    if options.directory:
        return None
    return Verdict.absent(
        "no directory was named", "name one: --directory DIR, or --session file:///DIR"
    )


@contextlib.contextmanager
def _place(options: CheckOptions) -> Iterator[Path]:
    """A directory of our own in the one that was named, or where that will be made."""
    named = Path(options.directory)
    if not named.exists() and named.absolute().parent.is_dir():
        named = named.absolute().parent  # a session makes its directory, and no more
    place = named / f".weightwire-doctor-{secrets.token_hex(6)}"
    with (Path(options.scratch) / _PLACE).open("a") as file:
        file.write(f"{place.absolute()}\0")  # should this process be killed
    place.mkdir(mode=0o700)
    try:
        yield place
    finally:
        _remove(place)


def remove_places(scratch: Path) -> None:
    """What checks with this scratch directory left where they were sent: they were killed."""
    with contextlib.suppress(OSError):
        for place in (scratch / _PLACE).read_text().split("\0")[:-1]:
            _remove(Path(place))


def _remove(place: Path) -> None:
    """Whatever the checks left there; the filesystem may refuse that, too."""
    with contextlib.suppress(OSError):
        for path in place.iterdir():
            with contextlib.suppress(OSError):
                path.unlink()
        place.rmdir()


def _cannot(options: CheckOptions, error: OSError | RuntimeError) -> Verdict:
    """The latter is what a child says."""
    reason = error.strerror if isinstance(error, OSError) else str(error).partition("\n")[0][:300]
    reason = reason or type(error).__name__
    return Verdict.failed(f"{options.directory} can't be used ({reason})", _CHOOSE)
