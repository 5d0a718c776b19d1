"""Files and directories: durable writes, exact reads, permissions, and what errors mean."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
from contextlib import contextmanager
from typing import TYPE_CHECKING

from weightwire.errors import PeerLost, TransferError, VerificationError, WeightWireError
from weightwire_filesystem import posix

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = [
    "create_file",
    "explain",
    "explained",
    "make_directory",
    "open_for_reading",
    "read_exactly",
    "read_small",
    "remove_tree",
    "sync_directory",
    "write_exactly",
    "write_file",
]

logger = logging.getLogger("weightwire.filesystem")

_REMEDIES = {
    errno.ENOSPC: "no space is left: free some, lower `keep`, or set `directory` elsewhere",
    errno.EDQUOT: "the quota is used up: free some, lower `keep`, or set `directory` elsewhere",
    errno.EACCES: "permission denied: run both sides as one user, or set `file_mode` and "
    "`directory_mode` on the sender",
    errno.EPERM: "not permitted: check the owner of the directory",
    errno.EROFS: "the filesystem is read-only: set `directory` elsewhere",
    errno.EIO: "input/output error: check the disk or the mount",
    errno.EMFILE: "too many open files: raise `ulimit -n`",
    errno.ENFILE: "too many open files on this host: raise fs.file-max",
    errno.ENOTEMPTY: "it exists already: give each run a directory of its own",
    errno.EEXIST: "it exists already: give each run a directory of its own",
}
_GONE = {errno.ENOENT, errno.ESTALE, errno.ENOTDIR}


def explain(error: OSError, doing: str, path: Path) -> TransferError:
    """The weightwire error for an ``OSError``: its first line has the path and the remedy."""
    code = error.errno or 0
    if code in _GONE:
        return PeerLost(
            f"{doing} {path}: it was deleted meanwhile; take or send the newest version, and "
            "leave deleting to weightwire (`keep` says how many versions stay)"
        )
    remedy = _REMEDIES.get(code, f"{error.strerror or error}: check the filesystem")
    return TransferError(f"{doing} {path}: {remedy}")


@contextmanager
def explained(doing: str, path: Path) -> Iterator[None]:
    """Turn an ``OSError`` of the block into weightwire's; see ``explain``."""
    try:
        yield
    except WeightWireError:  # a TransferTimeout is a TimeoutError, and that an OSError
        raise
    except OSError as error:
        raise explain(error, doing, path) from error


def create_file(path: Path, mode: int) -> int:
    """Create a file that isn't there yet; return a descriptor for writing.

    ``mode`` holds whatever the umask.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | posix.NOFOLLOW, 0o600)
    try:
        posix.fchmod(fd, mode)
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_for_reading(path: Path) -> int:
    """Open a regular file of a version; anything else in its place is refused."""
    try:
        # Opening a pipe would wait for its writer.
        fd = os.open(path, os.O_RDONLY | posix.NOFOLLOW | posix.NONBLOCK)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise VerificationError(f"{path} is a symbolic link: send a newer version") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise VerificationError(f"{path} isn't a regular file: send a newer version")
    return fd


def make_directory(path: Path, mode: int) -> bool:
    """Create one directory with these permissions; False when it was there."""
    try:
        path.mkdir(0o700)
    except FileExistsError:
        return False
    path.chmod(mode)
    return True


def sync_directory(path: Path) -> None:
    """Make the directory's entries durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some network filesystems have no fsync of directories.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def write_file(path: Path, data: bytes, mode: int) -> None:
    """Create a small file with these bytes, durably."""
    fd = create_file(path, mode)
    try:
        write_exactly(fd, memoryview(data), 0)
        os.fsync(fd)
    finally:
        os.close(fd)


def write_exactly(fd: int, view: memoryview, offset: int) -> None:
    """Write all of ``view`` (bytes) at ``offset``."""
    done = posix.pwrite(fd, view, offset)
    while done < len(view):
        done += posix.pwrite(fd, view[done:], offset + done)


def read_exactly(fd: int, view: memoryview, offset: int) -> bool:
    """Fill ``view`` (bytes) from ``offset``; False when the file ends before."""
    done = 0
    while done < len(view):
        got = posix.preadv(fd, [view[done:] if done else view], offset + done)
        if got == 0:
            return False
        done += got
    return True


def read_small(path: Path, limit: int) -> bytes:
    """The content of a file of at most ``limit`` bytes.

    Raises:
        TransferError: it is larger; nothing has been allocated for it.
        OSError: as the filesystem says.
    """
    fd = open_for_reading(path)
    try:
        size = os.fstat(fd).st_size
        if size > limit:
            raise TransferError(
                f"{path} has {size} bytes, more than the {limit} that it can have: "
                "it isn't weightwire's, or is damaged; remove the version"
            )
        data = bytearray(size)
        if not read_exactly(fd, memoryview(data), 0):
            raise TransferError(f"{path} ends before {size} bytes: it is being replaced; retry")
        return bytes(data)
    finally:
        os.close(fd)


def remove_tree(path: Path) -> None:
    """Remove a directory and what is in it; what can't be removed is logged, not raised."""

    def failed(_function: object, name: str, info: tuple[object, BaseException, object]) -> None:
        if not isinstance(info[1], FileNotFoundError):
            logger.warning("can't remove %s: %s", name, info[1])

    shutil.rmtree(path, onerror=failed)
