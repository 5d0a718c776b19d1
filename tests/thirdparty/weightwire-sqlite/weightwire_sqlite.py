"""``sqlite:///path/to/run42.db``: a weightwire session in one SQLite file.

Every operation is one statement, and so one transaction.  The write-ahead log lets
members read while another writes; it needs shared memory, so that all members must
run on one host.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from weightwire import ConfigError, SessionError, hookimpl
from weightwire.deadline import Deadline, patience
from weightwire.session import OpenRequest, SessionScheme, SessionStore

__all__ = ["SqliteScheme", "SqliteStore"]

BUSY_SECONDS = 5.0
BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
PAUSE_SECONDS = 0.002
SCHEMA = "CREATE TABLE IF NOT EXISTS records (key TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID"


class SqliteStore(SessionStore):
    """One row a record."""

    def __init__(self, path: Path, deadline: Deadline) -> None:
        self.url = f"sqlite://{path}"
        self._path = path
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        try:
            # Made here rather than by SQLite: its log files inherit the mode.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            self._inode = path.stat().st_ino
            self._connection = sqlite3.connect(
                path, timeout=0, isolation_level=None, check_same_thread=False
            )
            for statement in ("PRAGMA journal_mode=WAL", "PRAGMA synchronous=FULL", SCHEMA):
                self._execute(self._connection, statement, deadline)
        except (OSError, sqlite3.Error) as error:
            self.close()
            raise SessionError(
                f"session {self.url} can't be opened ({error}): give a file in a directory that "
                "exists and can be written"
            ) from error
        except BaseException:
            self.close()
            raise

    def get(self, key: str) -> bytes | None:
        rows, _ = self._run("SELECT value FROM records WHERE key = ?", key)
        return rows[0][0] if rows else None

    def put(self, key: str, value: bytes, *, durable: bool = True) -> None:
        self._run("REPLACE INTO records VALUES (?, ?)", key, value, durable=durable)

    def create(self, key: str, value: bytes) -> bool:
        _, changed = self._run("INSERT OR IGNORE INTO records VALUES (?, ?)", key, value)
        return changed == 1

    def delete(self, key: str) -> None:
        self._run("DELETE FROM records WHERE key = ?", key)

    def children(self, prefix: str) -> list[str]:
        begin, end = _below(prefix)
        rows, _ = self._run("SELECT key FROM records WHERE key > ? AND key < ?", begin, end)
        return sorted({key[len(begin) :].partition("/")[0] for (key,) in rows})

    def delete_tree(self, prefix: str) -> None:
        self._run(
            "DELETE FROM records WHERE key = ? OR key > ? AND key < ?", prefix, *_below(prefix)
        )

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _run(
        self, statement: str, *values: Any, durable: bool = True
    ) -> tuple[list[tuple[Any, ...]], int]:
        """Rows, and the number of rows that were changed."""
        with self._lock:
            if self._connection is None:
                raise SessionError(f"session {self.url} is closed: open it again")
            try:
                if self._path.stat().st_ino != self._inode:
                    raise FileNotFoundError("another file has its name")
                if not durable:
                    self._connection.execute("PRAGMA synchronous=OFF")
                deadline = Deadline(patience(BUSY_SECONDS))
                return self._execute(self._connection, statement, deadline, values)
            except (OSError, sqlite3.Error) as error:
                raise SessionError(
                    f"session {self.url} can't be used ({error}): was its file deleted, is the "
                    "disk full, or does a member on another host hold it?"
                ) from error
            finally:
                if not durable:
                    with contextlib.suppress(sqlite3.Error):
                        self._connection.execute("PRAGMA synchronous=FULL")

    def _execute(
        self,
        connection: sqlite3.Connection,
        statement: str,
        deadline: Deadline,
        values: tuple[Any, ...] = (),
    ) -> tuple[list[tuple[Any, ...]], int]:
        """Run a statement, again while others hold the file.

        SQLite's own busy timeout doesn't do: where waiting might be a deadlock, as when
        several members switch a new file to the log at once, it fails without waiting.
        """
        while True:
            try:
                cursor = connection.execute(statement, values)
                return cursor.fetchall(), cursor.rowcount
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF not in BUSY:  # the rest says how it is busy
                    raise
                if deadline.passed():
                    raise SessionError(
                        f"session {self.url} is locked, and was for {deadline.seconds:g} s "
                        f"({error}): end the process that holds its file"
                    ) from error
            time.sleep(min(PAUSE_SECONDS, deadline.remaining()))


def _below(prefix: str) -> tuple[str, str]:
    """The keys below a prefix lie between these: "0" follows "/"."""
    return f"{prefix}/", f"{prefix}0"


class SqliteScheme(SessionScheme):
    """``sqlite:///absolute/path``."""

    scheme = "sqlite"
    summary = "one SQLite file, for members of one host"

    def open(self, request: OpenRequest) -> SqliteStore:
        path = Path(unquote(request.url.path))
        if request.url.netloc or not path.is_absolute() or path == Path(path.anchor):
            raise ConfigError(
                f"session URL {request.url.geturl()!r} names no file: "
                "write sqlite:///absolute/path, with three slashes"
            )
        return SqliteStore(path, request.deadline)


@hookimpl
def weightwire_describe_session_scheme() -> SqliteScheme:
    return SqliteScheme()
