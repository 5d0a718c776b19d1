"""A session: a store, a codec, and an identity."""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from collections.abc import Callable
from typing import Literal, TypeAlias, TypeVar
from urllib.parse import SplitResult, urlsplit

from weightwire.deadline import Deadline
from weightwire.errors import AuthenticationError, ConfigError, SessionError
from weightwire.session import keys
from weightwire.session.freshness import Freshness
from weightwire.session.records import Codec, Record, SessionRecord
from weightwire.session.silence import Silence
from weightwire.session.store import OpenRequest, PartOfStore, SessionStore
from weightwire.session.urls import shown

__all__ = ["Session", "TOKEN_VARIABLE", "blob_digest"]

TOKEN_VARIABLE = "WEIGHTWIRE_TOKEN"  # noqa: S105 - the variable's name
_PART = 2 << 20
_MAX_PARTS = 1 << 12

R = TypeVar("R", bound=Record)

Bell: TypeAlias = Literal["senders", "receivers"]
"""Who rings."""


def _split(url: object) -> SplitResult:
    try:
        parts = urlsplit(url) if isinstance(url, str) else None
    except ValueError:
        parts = None
    if parts is None or not parts.scheme:
        raise ConfigError(
            f"session {shown(url)} is no URL: write file:///directory or tcp://host:port/name"
        )
    if any(character < " " for character in str(url)):
        raise ConfigError(
            f"session URL {shown(url)} has a control character, which would be left out: "
            "write it as a %xx escape, or choose another name"
        )
    if any("\ud800" <= character <= "\udfff" for character in str(url)):
        raise ConfigError(
            f"session URL {shown(url)} isn't valid Unicode: write other bytes as %xx escapes"
        )
    if parts.query or parts.fragment:
        raise ConfigError(
            f"session URL {shown(url)} has a '?' or '#', which would cut it short: "
            "write %3F or %23 instead"
        )
    return parts


class Session:
    """Typed access to a session's records.

    Args:
        store: where they are kept.
        token: shared secret; by default the environment's ``WEIGHTWIRE_TOKEN``.
        read_only: it must exist already.
    """

    def __init__(self, store: SessionStore, token: str | None, *, read_only: bool = False) -> None:
        self.store = store
        self._token = token
        self.silence = Silence()
        self._read_only = read_only
        self._codec = Codec(token)
        self._freshness = Freshness()
        self.id = self._join()

    @classmethod
    def open(
        cls,
        url: str,
        *,
        deadline: Deadline,
        serve: bool = False,
        token: str | None = None,
        read_only: bool = False,
    ) -> Session:
        """Open a session by URL.

        Args:
            url: ``file:///directory``, ``tcp://host:port/name``, ``redis://host/name``, or
                another installed scheme.
            deadline: for connecting.
            serve: this process serves the store, where the scheme has a server in a member.
            token: shared secret; by default ``WEIGHTWIRE_TOKEN``.
            read_only: look at a session that exists, and write nothing.

        Raises:
            ConfigError: the URL or its scheme is unknown or malformed.
            AuthenticationError: wrong, empty or one-sided token.
            SessionError: it can't be reached or written.
            BackendUnavailable: its scheme needs a library that isn't installed.
        """
        from weightwire.plugins import registry  # the registry loads the schemes, which load us

        token = os.environ.get(TOKEN_VARIABLE) if token is None else token
        authenticated = Codec(token).authenticates
        parts = _split(url)
        scheme = registry().session_scheme(parts.scheme)
        store = scheme.open(OpenRequest(parts, serve, authenticated, deadline, read_only))
        try:
            return cls(store, token, read_only=read_only)
        except BaseException:
            store.close()
            raise

    def within(self, name: str) -> Session:
        """A session of its own inside this one; it ends with it."""
        return Session(PartOfStore(self.store, keys.validate_key(name)), self._token)

    @property
    def url(self) -> str:
        return self.store.url

    def read(self, key: str, kind: type[R], *, ordered: bool = True) -> R | None:
        """The record at ``key``, authenticated and decoded, or None.

        Args:
            ordered: if False, it may be older than what was read here before: a store may
                lose what isn't durable, and the caller tells old from new itself.

        Raises:
            AuthenticationError: its HMAC is missing or wrong, or it is older than what
                was read here before.
            SessionError: malformed, or of another session.
        """
        keys.validate_key(key)
        known_writer, known_sequence = self._freshness.newest(key)
        with self.silence.asked():
            payload = self.store.get(key)
        if payload is None:
            return None
        record, writer, sequence = self._codec.open_dated(key, payload, kind)
        if ordered and writer == known_writer and sequence < known_sequence:
            raise AuthenticationError(
                f"record {key!r} of session {self.url} is older than one that was read before: "
                "something puts old records back; find out who else can write to the session"
            )
        self._freshness.note(key, writer, sequence)
        return record

    def write(self, key: str, record: Record, *, durable: bool = True) -> None:
        sealed = self._codec.seal(keys.validate_key(key), record)
        with self.silence.asked():
            self.store.put(key, sealed, durable=durable)

    def create(self, key: str, record: Record) -> bool:
        """Write ``key`` only if it is absent; True for exactly one caller."""
        sealed = self._codec.seal(keys.validate_key(key), record)
        with self.silence.asked():
            return self.store.create(key, sealed)

    def delete(self, key: str) -> None:
        self.store.delete(keys.validate_key(key))

    def delete_tree(self, prefix: str) -> None:
        self.store.delete_tree(keys.validate_key(prefix))

    def children(self, prefix: str) -> list[str]:
        """Sorted next components below ``prefix``; names that can't be ours are left out."""
        keys.validate_key(prefix)
        with self.silence.asked():
            names = self.store.children(prefix)
        return [name for name in names if keys.is_component(name)]

    def numbers(self, prefix: str) -> list[int]:
        """Those children of ``prefix`` that are numbers, rising."""
        return sorted(int(name) for name in self.children(prefix) if name.isdecimal())

    def put_blob(self, payload: bytes) -> str:
        """Store bytes under their digest; returns it.  Bytes already there aren't written again."""
        digest = blob_digest(payload)
        prefix = keys.table(digest)
        pieces = [payload[at : at + _PART] for at in range(0, len(payload), _PART)] or [b""]
        if len(pieces) > _MAX_PARTS:
            raise SessionError(f"{len(payload)} bytes are too many for a session record")
        names = [f"{i:04d}" for i in range(len(pieces))]
        names[-1] += ".last"  # says that it is the last, and is written last
        if self.children(prefix) == names:
            return digest
        for name, piece in zip(names, pieces, strict=True):
            self.store.put(f"{prefix}/{name}", piece)
        return digest

    def get_blob(self, digest: str) -> bytes | None:
        """The bytes with this digest, or None when they aren't (wholly) there."""
        prefix = keys.table(keys.validate_key(digest))
        names = self.children(prefix)
        if not names or len(names) > _MAX_PARTS or not names[-1].endswith(".last"):
            return None
        pieces = [self.store.get(f"{prefix}/{name}") for name in names]
        payload = b"".join(piece for piece in pieces if piece is not None)
        if blob_digest(payload) != digest:
            return None
        return payload

    def has_blob(self, digest: str) -> bool:
        """Whether all of it was stored under this digest, whatever it is now."""
        names = self.children(keys.table(keys.validate_key(digest)))
        return bool(names) and names[-1].endswith(".last")

    def is_replaced(self) -> bool:
        """True when the store now holds another session than the one that was opened."""
        payload = self.store.get(keys.SESSION)
        return payload is None or self._peek(payload).id != self.id

    def ring(self, bell: Bell) -> None:
        """Tell the others that this side is about to write what they may wait for."""
        with self.silence.asked():
            self.store.ring(bell)

    def bell(self, bell: Bell) -> Callable[[], int] | None:
        """For ``Waiting``: how often that side has rung, where the store counts it."""
        if not self.store.counts_rings:
            return None

        def rings() -> int:
            with self.silence.asked():
                return self.store.rings(bell)

        return rings

    def close(self) -> None:
        self.store.close()

    def _peek(self, payload: bytes) -> SessionRecord:
        return self._codec.open(keys.SESSION, payload, SessionRecord, any_session=True)

    def _join(self) -> str:
        record = SessionRecord(id=secrets.token_hex(8), created=time.time())
        if (payload := self.store.get(keys.SESSION)) is None:
            if self._read_only:
                raise SessionError(
                    f"session {self.url} doesn't exist: correct the URL, or start a sender"
                )
            self.store.create(keys.SESSION, self._codec.seal(keys.SESSION, record))
            payload = self.store.get(keys.SESSION)
        if payload is None:
            raise SessionError(
                f"session {self.url} lost its first record: is something deleting it?"
            )
        self._codec.session_id = self._peek(payload).id
        return self._codec.session_id


def blob_digest(payload: bytes) -> str:
    """The name under which ``put_blob`` stores these bytes."""
    return hashlib.blake2b(payload, digest_size=16).hexdigest()
