"""Session stores that break one promise each: ``broken:///path/to/file/FAULT/name``."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

from weightwire import hookimpl
from weightwire.session import OpenRequest, SessionScheme, SessionStore

SCHEMA = "CREATE TABLE IF NOT EXISTS records (key TEXT PRIMARY KEY, value BLOB)"


class BrokenStore(SessionStore):
    """Sound, but for its fault."""

    def __init__(self, directory: Path, fault: str, name: str) -> None:
        self.url = f"broken://{directory}/{fault}/{name}"
        self._fault = fault
        self._path = directory / ("one.db" if fault == "one-for-all" else f"{name}.db")
        self._cache: dict[str, bytes] = {}
        self._run(SCHEMA)

    def _run(self, statement: str, *values: object) -> list:
        connection = sqlite3.connect(self._path, timeout=30, isolation_level=None)
        try:
            connection.execute("PRAGMA synchronous=OFF")
            cursor = connection.execute(statement, values)
            return [*cursor.fetchall(), cursor.rowcount]
        finally:
            connection.close()

    def get(self, key: str) -> bytes | None:
        if self._fault == "caches" and key in self._cache:
            return self._cache[key]
        rows = self._run("SELECT value FROM records WHERE key = ?", key)[:-1]
        if not rows:
            return b"" if self._fault == "never-absent" else None
        value = rows[0][0]
        if self._fault == "empty-is-absent" and not value:
            return None
        self._cache[key] = value
        return value

    def put(self, key: str, value: bytes, *, durable: bool = True) -> None:
        match self._fault:
            case "text":
                value = value.decode("utf-8", "replace").encode()
            case "keeps-the-first" if self.get(key):
                return
            case "drops-leases" if not durable:
                return
            case "cuts":
                value = value[: 1 << 20]
            case "tears":
                half = value[: len(value) // 2]
                self._run("REPLACE INTO records VALUES (?, ?)", key, half)
        self._run("REPLACE INTO records VALUES (?, ?)", key, value)
        self._cache[key] = value

    def create(self, key: str, value: bytes) -> bool:
        match self._fault:
            case "looks-then-creates":
                if self._run("SELECT 1 FROM records WHERE key = ?", key)[:-1]:
                    return False
                time.sleep(0.005)  # another one looks meanwhile
                self._run("REPLACE INTO records VALUES (?, ?)", key, value)
                return True
            case "creates-over":
                self._run("REPLACE INTO records VALUES (?, ?)", key, value)
                return True
            case "equal-is-mine" if self.get(key) == value:
                return True
        return self._run("INSERT OR IGNORE INTO records VALUES (?, ?)", key, value)[-1] == 1

    def delete(self, key: str) -> None:
        self._cache.pop(key, None)
        if self._fault == "deletes-below":
            self._run("DELETE FROM records WHERE key LIKE ?", f"{key}/%")
        if self._fault != "never-deletes":
            self._run("DELETE FROM records WHERE key = ?", key)

    def children(self, prefix: str) -> list[str]:
        start = prefix if self._fault == "lists-neighbours" else f"{prefix}/"
        rows = self._run("SELECT key FROM records WHERE substr(key, 1, ?) = ?", len(start), start)
        names = {key[len(prefix) + 1 :].partition("/")[0] for (key,) in rows[:-1]}
        if self._fault == "lists-100":
            return sorted(names)[:100]
        return list(names) if self._fault == "unsorted" else sorted(names)

    def delete_tree(self, prefix: str) -> None:
        self._cache.clear()
        below = f"{prefix}%" if self._fault == "deletes-neighbours" else f"{prefix}/%"
        self._run("DELETE FROM records WHERE key LIKE ?", below)
        if self._fault != "leaves-the-top":
            self._run("DELETE FROM records WHERE key = ?", prefix)

    def close(self) -> None:
        if self._fault == "forgets":
            self._run("DELETE FROM records")


class BrokenScheme(SessionScheme):
    scheme = "broken"
    summary = "wrong on purpose"

    def open(self, request: OpenRequest) -> SessionStore:
        path = Path(request.url.path)
        return BrokenStore(path.parent.parent, path.parent.name, path.name)


@hookimpl
def weightwire_describe_session_scheme() -> SessionScheme:
    return BrokenScheme()
