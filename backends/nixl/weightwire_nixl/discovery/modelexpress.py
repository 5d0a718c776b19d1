"""Discovery by a ModelExpress server: metadata lies there, a reference travels in the session.

Each payload is published once, under a worker id of its own; the reference names it, with
its length and checksum, so that a peer can't be given another one's or an older one.  The
bytes are opaque to the server, and framed as everywhere.

The server takes silence for death: a thread says every few seconds that this rank is
there.  It is the only thread, calls nothing but the server, and ends with ``close``.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
import uuid
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgspec
import xxhash
from msgspec import Meta

from weightwire.contract import Context
from weightwire.errors import BackendUnavailable, ConfigError, PeerLost, TransferError
from weightwire_nixl.discovery.base import (
    MAX_PAYLOAD,
    REFERENCE,
    Discovery,
    Side,
    frame,
    name_of,
    unframe,
)

__all__ = ["SCHEME", "ModelExpressDiscovery", "modelexpress"]

SCHEME = "modelexpress://"
HEARTBEAT_SECONDS = 5.0
_GOODBYE_SECONDS = 2.0

T = TypeVar("T")


class _Reference(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """What travels in the session."""

    source: Annotated[str, Meta(min_length=1, max_length=256)]
    worker: Annotated[str, Meta(min_length=1, max_length=256)]
    nbytes: Annotated[int, Meta(ge=0, le=MAX_PAYLOAD)]
    checksum: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


def modelexpress(module: str) -> Any:
    """A module of the client, which is an extra.

    Raises:
        BackendUnavailable: it isn't installed, or can't be imported.
    """
    try:
        return importlib.import_module(f"modelexpress.{module}")
    except ImportError as error:
        raise BackendUnavailable(
            f"discovery by ModelExpress needs its client ({error}): install it with "
            "`pip install 'weightwire[modelexpress]'`"
        ) from error


class ModelExpressDiscovery(Discovery):
    """Publishes to, and asks, the server at ``url``, ``modelexpress://host:port``."""

    def __init__(self, context: Context, url: str) -> None:
        self._context = context
        self._url = url
        self._messages = modelexpress("p2p_pb2")
        self._client = modelexpress("client").MxClient(url.removeprefix(SCHEME))
        self._published: tuple[bytes, bytes] | None = None  # payload, and what refers to it
        self._reference: _Reference | None = None
        self._rank = 0
        self._changing = threading.Lock()  # what the heartbeat speaks of
        self._stop = threading.Event()
        self._heart: threading.Thread | None = None

    def put(self, side: Side, member: str, rank: int, payload: bytes) -> bytes:
        if self._published is not None and self._published[0] == payload:
            return self._published[1]
        framed = frame(payload)
        worker_id = uuid.uuid4().hex
        worker = self._messages.WorkerMetadata(
            worker_rank=rank,
            nixl_metadata=framed,
            status=self._messages.SOURCE_STATUS_READY,
        )
        identity = self._identity(side, member, rank)
        source = self._ask(lambda: self._client.publish_metadata(identity, worker, worker_id))
        reference = _Reference(str(source), worker_id, len(framed), _checksum(framed))
        with self._changing:
            before, self._reference, self._rank = self._reference, reference, rank
        if before is not None:
            self._ask(lambda: self._say(before, self._messages.SOURCE_STATUS_STALE))
        self._start_heart()
        carried = frame(REFERENCE + msgspec.msgpack.encode(reference))
        self._published = (payload, carried)
        return carried

    def get(self, side: Side, member: str, rank: int, carried: bytes) -> bytes:
        who = name_of(side, member, rank)
        payload = unframe(carried, who)
        if not payload.startswith(REFERENCE):
            raise ConfigError(
                f"{who} has its metadata in the session, and this side looks for it at "
                f"{self._url}: give both sides the same nixl option 'discovery'"
            )
        try:
            reference = msgspec.msgpack.decode(payload[len(REFERENCE) :], type=_Reference)
        except msgspec.DecodeError as error:
            raise TransferError(
                f"{who} says in a way that can't be read where its metadata lies ({error}): "
                "run one weightwire version on both sides"
            ) from error
        found = self._ask(lambda: self._client.get_metadata(reference.source, reference.worker))
        if not found.found:
            raise PeerLost(
                f"{who} isn't known to {self._url}: it was restarted, or uses another server; "
                "give both sides the same, and send again"
            )
        self._check_identity(found, side, member, rank, who)
        if found.worker.status == self._messages.SOURCE_STATUS_STALE:
            raise PeerLost(f"{who} is gone, {self._url} says: restart it, and send again")
        framed = bytes(found.worker.nixl_metadata)
        if len(framed) != reference.nbytes:
            raise TransferError(
                f"{who} has truncated metadata at {self._url} ({len(framed)} of "
                f"{reference.nbytes} bytes): restart it"
            )
        if _checksum(framed) != reference.checksum:
            raise TransferError(
                f"{who} has corrupt metadata at {self._url} (wrong checksum): restart it"
            )
        return unframe(framed, who)

    def close(self) -> None:
        self._stop.set()
        heart, self._heart = self._heart, None
        if heart is not None:
            heart.join(_GOODBYE_SECONDS)  # it says goodbye
        self._client.close()

    # ---------------------------------------------------------------------- identity

    def _identity(self, side: Side, member: str, rank: int) -> Any:
        return self._messages.SourceIdentity(
            mx_source_type=self._messages.MX_SOURCE_TYPE_WEIGHTS,
            model_name=f"weightwire/{self._context.session_id}",
            extra_parameters={
                "session": self._context.session_id,
                "side": side,
                "member": member,
                "rank": str(rank),
            },
        )

    def _check_identity(self, found: Any, side: Side, member: str, rank: int, who: str) -> None:
        if not found.HasField("identity"):
            return  # older servers don't repeat it; the payload itself names its session
        wanted = dict(self._identity(side, member, rank).extra_parameters)
        there = dict(found.identity.extra_parameters)
        for name, value in wanted.items():
            if there.get(name) != value:
                raise PeerLost(
                    f"{who} refers to metadata of {name} {there.get(name, '')[:64]!r} at "
                    f"{self._url}, this is {value!r}: restart it"
                )

    # ---------------------------------------------------------------------- the server

    def _ask(self, call: Callable[[], T]) -> T:
        """Call the server on a thread: its client's own timeout is longer than ours may be."""
        answers: list[T] = []
        failures: list[Exception] = []

        def run() -> None:
            try:
                answers.append(call())
            except Exception as error:
                failures.append(error)

        thread = threading.Thread(target=run, name="weightwire-modelexpress", daemon=True)
        thread.start()
        self._context.watch.until(
            lambda: not thread.is_alive(), "answer", lambda: [f"the server at {self._url}"]
        )
        if failures:
            code = getattr(failures[0], "code", None)
            said = code().name if callable(code) else str(failures[0])
            raise TransferError(
                f"the ModelExpress server at {self._url} doesn't answer as it should ({said}): "
                "check that it runs, and the address"
            ) from failures[0]
        return answers[0]

    def _say(self, reference: _Reference, status: Any) -> None:
        self._client.update_status(reference.source, reference.worker, self._rank, status)

    def _start_heart(self) -> None:
        if self._heart is None:
            self._heart = threading.Thread(
                target=self._beat, name="weightwire-modelexpress-heartbeat", daemon=True
            )
            self._heart.start()

    def _beat(self) -> None:
        """Say every few seconds that this rank is there, and at the end that it isn't."""
        stopped = False
        while not stopped:
            stopped = self._stop.wait(HEARTBEAT_SECONDS)
            with self._changing:
                reference = self._reference
            status = (
                self._messages.SOURCE_STATUS_STALE
                if stopped
                else self._messages.SOURCE_STATUS_READY
            )
            if reference is not None:
                # A server that is away for a while hears the next one.
                with contextlib.suppress(Exception):
                    self._say(reference, status)


def _checksum(framed: bytes) -> int:
    return xxhash.xxh3_64_intdigest(framed) >> 1  # a bounded integer has 63 bits
