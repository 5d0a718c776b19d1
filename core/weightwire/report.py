"""What a call tells about the version it moved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

__all__ = ["PHASES", "PhaseName", "Report", "VersionRecord", "together"]

PhaseName = Literal[
    "offer",
    "ready",
    "stage",
    "announce",
    "wait",
    "fetch",
    "replay",
    "finalize",
    "verify",
    "commit",
]
PHASES: tuple[PhaseName, ...] = get_args(PhaseName)
"""The one vocabulary of phases, used by reports, records, metrics and ``inspect``:

======== ====================================================================
offer    tensors are resolved, and the version is agreed on
ready    the roster plans and answers ``receiver_ready``
stage    tensors are cast and copied into slots
announce bytes are handed to the transport: written, posted, announced
wait     for credits, for the peer's announcement, for ``started``
fetch    bytes arrive
verify   digests are computed and compared
replay   arrived tensors are written into the target
finalize post-load processing, derived tensors
commit   the outcome is agreed on and recorded
======== ====================================================================
"""


@dataclass(frozen=True)
class Report:
    """One version, as this rank saw it.

    Attributes:
        nbytes: payload of this rank: sent by it, or read by it.
        seconds: wall time of the call (for a receiver: from the offer on).
        phases: seconds by phase, keys of ``PHASES``.
        digest: hex digest of what this rank sent or received; empty with ``verify="off"``.
        path: which way the bytes took, and why.
        roster: receivers to which the version was offered.
        left_out: those of them that a sender went on without.
        waves: in which it reached them.
        catch_up: where late receivers find it, or why they don't; empty without ``catch_up``
            and the option ``snapshot``.
    """

    role: Literal["sender", "receiver"]
    backend: str
    version: int
    attempt: int
    incarnation: int
    nbytes: int
    seconds: float
    phases: dict[str, float]
    digest: str
    path: str
    roster: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    waves: int = 1
    catch_up: str = ""

    @property
    def gbps(self) -> float:
        """Gigabytes (10**9 bytes) a second over the whole call."""
        return self.nbytes / self.seconds / 1e9 if self.seconds > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "gbps": self.gbps}


def together(
    waves: Sequence[Report], seconds: float, phases: dict[str, float], catch_up: str
) -> Report:
    """One report of all waves of a version."""
    return replace(
        waves[-1],
        nbytes=sum(wave.nbytes for wave in waves),
        seconds=seconds,
        phases=phases,
        roster=tuple(sorted({name for wave in waves for name in wave.roster})),
        left_out=tuple(sorted({name for wave in waves for name in wave.left_out})),
        waves=len(waves),
        catch_up=catch_up,
    )


@dataclass(frozen=True)
class VersionRecord:
    """What observers get, once per version and side.

    Attributes:
        member_id: ``"sender"``, or the receiver's id.
        error: why the version was aborted, or None.
        report: present when it wasn't.
        backend: the backend's name.
        phases: seconds by phase that an aborted version took until then, keys of ``PHASES``;
            of one that wasn't, its report's.
    """

    session_url: str
    role: Literal["sender", "receiver"]
    member_id: str
    version: int
    report: Report | None = None
    error: BaseException | None = field(default=None, compare=False)
    backend: str = ""
    phases: Mapping[str, float] = field(default_factory=dict)
