"""``file:///shared/run42``: a session in a directory on a shared filesystem."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote

from weightwire.errors import ConfigError, SessionError
from weightwire.session.store import OpenRequest, SessionScheme, SessionStore

__all__ = ["FileScheme", "FileStore"]

_RECORDS = "records"
_MAX_VALUE = 256 << 20
_WRITES = 5

T = TypeVar("T")


class FileStore(SessionStore):
    """One file a record, replaced by rename, created by hard link.

    Both are atomic on local filesystems and on NFS.  Directories are made with
    mode 0700 and files with 0600: the members of a session run as one user.
    Opening is by listing and reading, never by a cached ``stat``.
    """

    def __init__(self, directory: Path, *, read_only: bool = False) -> None:
        self.directory = directory
        self.url = f"file://{directory}"
        self._records = directory / _RECORDS
        if read_only:
            if not self._records.is_dir():
                raise SessionError(
                    f"session {self.url} doesn't exist: correct the URL, or start a sender"
                )
            return
        try:
            if not directory.parent.is_dir():
                raise SessionError(
                    f"session directory {directory}: its parent doesn't exist; "
                    "create it, or mount the shared filesystem"
                )
            if directory.exists() and not directory.is_dir():
                raise SessionError(
                    f"session directory {directory} is a file: choose another, or remove it"
                )
            directory.mkdir(mode=0o700, exist_ok=True)
            self._records.mkdir(mode=0o700, exist_ok=True)
            probe = self._records / f".probe-{secrets.token_hex(6)}"
            probe.touch(mode=0o600)
            probe.unlink()
        except OSError as error:
            raise SessionError(
                f"session directory {directory} can't be written ({_reason(error)}): "
                "fix its permissions or choose another"
            ) from error

    def refuse_open_permissions(self) -> None:
        """Without a token, whoever can write here can forge records.

        Raises:
            SessionError: others than its owner may write the records' directory.
        """
        mode = self._records.stat().st_mode
        if os.name == "posix" and mode & 0o022:
            raise SessionError(
                f"session directory {self._records} can be written by other users (mode "
                f"{stat.S_IMODE(mode):04o}): chmod go-w it, or set WEIGHTWIRE_TOKEN on all members"
            )

    def get(self, key: str) -> bytes | None:
        path = self._records / key
        try:
            # Opening a pipe in a record's place would wait for its writer.
            descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
            with open(descriptor, "rb") as file:  # noqa: PTH123 - by descriptor
                return file.read(_MAX_VALUE)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None
        except OSError as error:
            if error.errno == errno.ESTALE:
                return None
            raise self._error("read", key, error) from error

    def put(self, key: str, value: bytes, *, durable: bool = True) -> None:
        path = self._records / key
        try:
            _despite_deletion(lambda: self._replace(path, value, durable))
        except OSError as error:
            raise self._error("write", key, error) from error

    def create(self, key: str, value: bytes) -> bool:
        path = self._records / key
        try:
            return _despite_deletion(lambda: self._link(path, value))
        except OSError as error:
            raise self._error("create", key, error) from error

    def delete(self, key: str) -> None:
        try:
            (self._records / key).unlink(missing_ok=True)
        except (NotADirectoryError, IsADirectoryError):
            return
        except OSError as error:
            raise self._error("delete", key, error) from error

    def children(self, prefix: str) -> list[str]:
        try:
            names = os.listdir(self._records / prefix)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            if error.errno == errno.ESTALE:
                return []
            raise self._error("list", prefix, error) from error
        return sorted(name for name in names if not name.startswith("."))

    def delete_tree(self, prefix: str) -> None:
        path = self._records / prefix
        try:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        except (NotADirectoryError, IsADirectoryError):
            return  # nothing was there when it was looked at; what came since stays
        except OSError as error:
            raise self._error("delete", prefix, error) from error

    def close(self) -> None:
        """Nothing is held open."""

    def _replace(self, path: Path, value: bytes, durable: bool) -> None:
        temporary = self._write_temporary(path, value, durable)
        try:
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        if durable:
            _sync_directory(path.parent)

    def _link(self, path: Path, value: bytes) -> bool:
        temporary = self._write_temporary(path, value, durable=True)
        try:
            path.hardlink_to(temporary)
        except FileExistsError:
            # Over NFS a link that was made may be answered as one that was there.
            return temporary.stat().st_nlink == 2
        finally:
            temporary.unlink(missing_ok=True)
        _sync_directory(path.parent)
        return True

    def _write_temporary(self, path: Path, value: bytes, durable: bool) -> Path:
        _make_directories(path.parent, self._records)
        temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            view = memoryview(value)
            while view:
                view = view[os.write(descriptor, view) :]
            if durable:
                os.fsync(descriptor)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        return temporary

    def _error(self, verb: str, key: str, error: OSError) -> SessionError:
        return SessionError(
            f"session {self.url}: can't {verb} record {key!r} ({_reason(error)}): "
            "check that the filesystem is mounted, writable and not full"
        )


class FileScheme(SessionScheme):
    """``file:///absolute/path``."""

    scheme = "file"
    summary = "a directory on a filesystem that all members share"

    def open(self, request: OpenRequest) -> FileStore:
        url = request.url
        if url.netloc not in ("", "localhost"):
            raise ConfigError(
                f"session URL {url.geturl()!r} names host {url.netloc!r}: "
                "write file:///absolute/path, with three slashes"
            )
        if "\0" in unquote(url.path):
            raise ConfigError(f"session URL {url.geturl()!r} has a zero byte: take it out")
        path = Path(unquote(url.path))
        if os.name == "nt":
            path = Path(unquote(url.path).lstrip("/"))
        if not path.is_absolute() or path == Path(path.anchor):
            raise ConfigError(
                f"session URL {url.geturl()!r} names no directory: write file:///absolute/path"
            )
        store = FileStore(path, read_only=request.read_only)
        if not request.authenticated:
            store.refuse_open_permissions()
        return store


def _despite_deletion(write: Callable[[], T]) -> T:
    """Write again where ``delete_tree`` took the directory away meanwhile."""
    for _ in range(_WRITES - 1):
        with contextlib.suppress(FileNotFoundError):
            return write()
    return write()


def _make_directories(path: Path, root: Path) -> None:
    """``mkdir -p`` below ``root``."""
    if path.is_dir():
        return
    if path != root:
        _make_directories(path.parent, root)
    path.mkdir(mode=0o700, exist_ok=True)
    _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: OSError) -> str:
    return error.strerror or type(error).__name__
