"""Session records: typed bodies in one authenticated envelope.

A record is JSON.  The envelope holds the schema number, the session it belongs
to, who wrote it, a sequence number that rises with each of that writer's
records, the body, and an HMAC-SHA256 over all of it and the record's key where
there is a token.  Bodies are decoded into the types below and nothing else;
nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from weightwire import errors
from weightwire.contract import Offer, Policy
from weightwire.errors import AuthenticationError, PeerLost, SessionError, WeightWireError
from weightwire.fingerprint import Fingerprint
from weightwire.report import PHASES, PhaseName

__all__ = [
    "Applied",
    "Codec",
    "Closed",
    "ErrorInfo",
    "Lease",
    "MAX_RECORD",
    "MemberRecord",
    "OfferRecord",
    "Outcome",
    "PhaseSeconds",
    "RankReport",
    "RankReports",
    "Reading",
    "Ready",
    "Record",
    "Retired",
    "SessionRecord",
    "Started",
    "Status",
    "Turn",
    "TurnOver",
    "recorded",
    "unpack",
]

SCHEMA = 1
MAX_RECORD = 64 << 20
"""Bytes of the largest record that is read."""

Text = Annotated[str, Meta(max_length=64 << 10)]
Name = Annotated[str, Meta(max_length=256)]
Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


PhaseSeconds = Annotated[
    dict[PhaseName, Annotated[float, Meta(ge=0, le=1e9)]], Meta(max_length=len(PHASES))
]
"""Seconds by phase, for whoever looks on; see ``report.PHASES``."""


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all record bodies."""


class SessionRecord(Record, frozen=True):
    """Written once, by whoever comes first."""

    id: Annotated[str, Meta(pattern=r"\A[0-9a-f]{1,64}\Z")]
    """It becomes part of file names."""

    created: float


class MemberRecord(Record, frozen=True):
    """A trainer incarnation or a replica incarnation has joined.

    Attributes:
        process: identity of the process on its host, see ``process.py``.
        resume_from: a sender's last version of earlier incarnations that stays readable.
        column_slices: of a receiver's target (``WeightTarget.column_slices``).
    """

    member_id: Name
    incarnation: Count
    world_size: Annotated[int, Meta(ge=1, le=1 << 20)]
    backend: Name
    lease_ttl: Annotated[float, Meta(gt=0, le=86400)]
    host: Name
    pid: Count
    process: Name
    created: float
    nonce: Name
    resume_from: Count | None = None
    column_slices: Annotated[int, Meta(ge=0, le=1 << 20)] = 0


class Closed(Record, frozen=True):
    """The member left in good order."""


class Lease(Record, frozen=True):
    """Alive as long as the counter changes; judged on the observer's own clock."""

    counter: Count


class ErrorInfo(Record, frozen=True):
    """An error of another process, by its name in the tree."""

    type: Name
    message: Text

    @classmethod
    def of(cls, error: BaseException) -> ErrorInfo:
        message = str(error) or type(error).__name__
        return cls(type(error).__name__[:256], message[: 16 << 10])

    def to_error(self, who: str) -> WeightWireError:
        """The same class of the tree, or ``PeerLost`` for anything else."""
        kind = getattr(errors, self.type, None)
        # That the other side was closed or cancelled says nothing of this one.
        of_its_own = kind in (errors.Cancelled, errors.HandleError)
        if isinstance(kind, type) and issubclass(kind, WeightWireError) and not of_its_own:
            return kind(f"{who}: {self.message}")
        return PeerLost(f"{who}: {self.type}: {self.message}")


class Status(Record, frozen=True):
    """What a replica serves right now; written before the first byte changes, and after."""

    state: Literal["idle", "installing", "serving", "tainted", "left"]
    serving: Policy | None = None
    error: ErrorInfo | None = None
    digest: Name = ""


class OfferRecord(Record, frozen=True):
    """``sender_ready``.

    Attributes:
        max_receivers: how many the sender takes; whoever isn't in the roster may read why.
        max_unavailable: how many readers of a stored version may install it at a time.
    """

    offer: Offer
    backend: Name
    nbytes: Count
    waits_for: Literal["applied", "published"]
    created: float
    max_receivers: Annotated[int, Meta(ge=1)] | None = None
    max_unavailable: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None


class Ready(Record, frozen=True):
    """``receiver_ready``, or declined."""

    transports: Annotated[tuple[bytes, ...], Meta(max_length=1 << 20)] = ()
    declined: ErrorInfo | None = None


class Started(Record, frozen=True):
    """``started``.

    Attributes:
        readers: the receivers that the transfer waits for, with their incarnations:
            one that restarted meanwhile isn't among them.
    """

    readers: Annotated[dict[Name, Count], Meta(max_length=1 << 20)] = {}


class Applied(Record, frozen=True):
    """``receiver_applied``, or failed."""

    nbytes: Count = 0
    seconds: Annotated[float, Meta(ge=0)] = 0.0
    digest: Name = ""
    fingerprint: Fingerprint | None = None
    error: ErrorInfo | None = None
    tainted: bool = False
    phases: PhaseSeconds = {}


class Outcome(Record, frozen=True):
    """``finished`` when there is no error, else ``aborted``.

    Attributes:
        more: finished for this wave; the version is offered to others in the next attempt.
    """

    error: ErrorInfo | None = None
    seconds: Annotated[float, Meta(ge=0)] = 0.0
    created: float = 0.0
    more: bool = False
    phases: PhaseSeconds = {}


class Turn(Record, frozen=True):
    """A receiver's turn to be out of service; nobody else has it until it is over."""

    receiver_id: Name
    incarnation: Count


class TurnOver(Record, frozen=True):
    """The turn was given back."""


class Reading(Record, frozen=True):
    """A receiver reads this version: don't delete it."""

    policy: Policy


class Retired(Record, frozen=True):
    """No reader may start on this version any more."""


class RankReport(Record, frozen=True):
    """One rank's part of an agreement."""

    payload: bytes = b""
    error: ErrorInfo | None = None


class RankReports(Record, frozen=True):
    """All ranks' parts, as rank 0 collected them."""

    reports: Annotated[tuple[RankReport, ...], Meta(max_length=1 << 20)]


class _Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    schema: int
    kind: Name
    session: Name
    writer: Name
    sequence: Count
    body: msgspec.Raw
    mac: Name = ""


R = TypeVar("R", bound=Record)
T = TypeVar("T")


class Codec:
    """Seals and opens the records of one member.

    Args:
        token: shared secret of the session, or None.

    Raises:
        AuthenticationError: the token is empty.
    """

    def __init__(self, token: str | None) -> None:
        if token is not None and not token.strip():
            raise AuthenticationError(
                "the session token is empty: unset WEIGHTWIRE_TOKEN or give it a secret"
            )
        self._key = hashlib.sha256(token.encode()).digest() if token else None
        self._writer = secrets.token_hex(8)
        self._sequence = itertools.count(1)
        self.session_id = ""

    @property
    def authenticates(self) -> bool:
        return self._key is not None

    def seal(self, key: str, record: Record) -> bytes:
        """Encode a record for the place ``key``."""
        body = msgspec.json.encode(record)
        envelope = _Envelope(
            schema=SCHEMA,
            kind=type(record).__name__,
            session=self.session_id,
            writer=self._writer,
            sequence=next(self._sequence),
            body=msgspec.Raw(body),
        )
        sealed = msgspec.structs.replace(envelope, mac=self._mac(key, envelope))
        payload = msgspec.json.encode(sealed)
        if len(payload) > MAX_RECORD:
            raise SessionError(
                f"record {key!r} has {len(payload)} bytes, more than {MAX_RECORD}: "
                "too many members, or descriptions that are too long"
            )
        return payload

    def open(self, key: str, payload: bytes, kind: type[R], *, any_session: bool = False) -> R:
        """Decode the record found at ``key``; see ``open_dated``."""
        return self.open_dated(key, payload, kind, any_session=any_session)[0]

    def open_dated(
        self, key: str, payload: bytes, kind: type[R], *, any_session: bool = False
    ) -> tuple[R, str, int]:
        """Decode the record found at ``key``, with its writer and sequence number.

        Args:
            any_session: accept a record of another session than ours.

        Raises:
            AuthenticationError: its HMAC is missing or wrong for our token.
            SessionError: malformed, of another kind, or of another session.
        """
        if len(payload) > MAX_RECORD:
            raise SessionError(f"record {key!r} has {len(payload)} bytes: more than {MAX_RECORD}")
        try:
            envelope = msgspec.json.decode(payload, type=_Envelope)
        except (msgspec.DecodeError, RecursionError) as error:
            raise SessionError(
                f"record {key!r} can't be read ({error}): "
                "is something else writing to this session?"
            ) from error
        if envelope.schema != SCHEMA:
            raise SessionError(
                f"record {key!r} has schema {envelope.schema}, this weightwire writes {SCHEMA}: "
                "run one version on all members"
            )
        self._authenticate(key, envelope)
        if not any_session and envelope.session != self.session_id:
            raise SessionError(
                f"record {key!r} belongs to session {envelope.session!r}, not to "
                f"{self.session_id!r}: the session was made anew, open it again"
            )
        if envelope.kind != kind.__name__:
            raise SessionError(
                f"record {key!r} is a {envelope.kind!r}, not a {kind.__name__}: "
                "is something else writing to this session?"
            )
        try:
            record = msgspec.json.decode(envelope.body, type=kind)
        except (msgspec.DecodeError, RecursionError) as error:
            raise SessionError(
                f"record {key!r} is malformed ({error}): run one weightwire version on all members"
            ) from error
        return record, envelope.writer, envelope.sequence

    def _authenticate(self, key: str, envelope: _Envelope) -> None:
        if self._key is None:
            if envelope.mac:
                raise AuthenticationError(
                    f"record {key!r} is signed, and this process has no token: set WEIGHTWIRE_TOKEN"
                )
            return
        if not envelope.mac:
            raise AuthenticationError(
                f"record {key!r} isn't signed: set WEIGHTWIRE_TOKEN on the process that wrote it"
            )
        if not hmac.compare_digest(envelope.mac.encode(), self._mac(key, envelope).encode()):
            raise AuthenticationError(
                f"record {key!r} was signed with another token: "
                "give all members the same WEIGHTWIRE_TOKEN"
            )

    def _mac(self, key: str, envelope: _Envelope) -> str:
        if self._key is None:
            return ""
        parts: list[Any] = [
            key,
            envelope.schema,
            envelope.kind,
            envelope.session,
            envelope.writer,
            envelope.sequence,
        ]
        # A JSON list delimits its parts unambiguously; the body follows as it travels.
        message = msgspec.json.encode(parts) + bytes(envelope.body)
        return hmac.new(self._key, message, hashlib.sha256).hexdigest()


def recorded(phases: Mapping[str, float]) -> dict[PhaseName, float]:
    """Seconds by phase as a record holds them."""
    return {phase: max(0.0, seconds) for phase, seconds in phases.items() if phase in PHASES}


def unpack(payload: bytes, kind: type[T], who: str) -> T:
    """What a rank of one's own side says in an agreement, as its type.

    Raises:
        SessionError: it can't be read; names ``who``.
    """
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise SessionError(
            f"what {who} says can't be read ({error}): run one weightwire version on all ranks"
        ) from error
