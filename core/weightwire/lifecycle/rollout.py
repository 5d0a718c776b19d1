"""Who gets a version, and when: rosters, waves, and replicas that may stay behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from weightwire.contract import Policy
from weightwire.errors import TransferError
from weightwire.session.lease import Member
from weightwire.session.records import Status
from weightwire.session.session import Session

__all__ = ["Replica", "Rollout", "Terms", "replica_of"]


@dataclass(frozen=True)
class Terms:
    """What a sender demands of its pool; see ``open_sender``.

    Attributes:
        on_receiver_loss: ``fail`` the version, or ``continue`` without the lost receiver.
        min_receivers: how many must have joined, where live receivers are needed.
        max_receivers: how many get an offer: those of the last one, then those that
            joined first.  None: all.
        max_unavailable: how many that serve a version may be out of service at a time.
            None: all.
        max_version_lag: by how many finished versions one that isn't ready may fall
            behind.  None: it is waited for.
        ready_within: seconds that one has to get ready before it is left behind.
    """

    on_receiver_loss: str = "fail"
    min_receivers: int = 1
    max_receivers: int | None = None
    max_unavailable: int | None = None
    max_version_lag: int | None = None
    ready_within: float = 5.0


@dataclass(frozen=True)
class Replica:
    """A live receiver, and what it serves by its own word."""

    member: Member
    status: Status | None

    @property
    def serving(self) -> Policy | None:
        return self.status.serving if self.status is not None else None

    def lag(self, incarnation: int, finished: Sequence[int]) -> int:
        """Finished versions of this sender that are newer than what it serves.

        Args:
            incarnation: the sender's.
            finished: its finished versions, rising.
        """
        if self.serving is None:
            return 0  # it serves nothing: it can't be behind
        if self.serving.incarnation != incarnation:
            return len(finished)
        return sum(1 for version in finished if version > self.serving.version)


def replica_of(session: Session, member: Member) -> Replica:
    return Replica(member, session.read(member.key("status"), Status))


@dataclass
class Rollout:
    """One version on its way through the pool, wave by wave.

    Attributes:
        done: receivers whose wave is over, with their incarnations: they have applied
            the version, or it went on without them.
        alike: by layout, a receiver and the bits that it holds.
    """

    done: dict[str, int] = field(default_factory=dict)
    alike: dict[str, tuple[str, str]] = field(default_factory=dict)

    def is_done(self, receiver_id: str, member: Member) -> bool:
        return self.done.get(receiver_id) == member.incarnation

    def next_wave(
        self, version: int, pool: Mapping[str, Replica], most: int | None
    ) -> dict[str, Member]:
        """Those that get the version now; empty when everybody has had it.

        One that serves nothing isn't taken out of service, so that it never waits; it
        counts as out of service while it is.

        Args:
            most: how many may be out of service at a time; None for all.

        Raises:
            TransferError: so many are out of service that no other may be.
        """
        todo = {
            name: replica.member
            for name, replica in pool.items()
            if not self.is_done(name, replica.member)
        }
        if most is None:
            return todo
        out = sorted(name for name, replica in pool.items() if replica.serving is None)
        serving = sorted(todo.keys() - set(out))
        wave = [*(name for name in out if name in todo), *serving[: max(0, most - len(out))]]
        if not wave and todo:
            raise TransferError(
                f"version {version} stopped after {len(self.done)} of {len(pool)} receivers: "
                f"{_reasons(pool, out)}, and max_unavailable={most}: repair or close them, then "
                "send it again"
            )
        return {name: todo[name] for name in wave}


def _reasons(pool: Mapping[str, Replica], out: Sequence[str]) -> str:
    reasons = []
    for name in out:
        status = pool[name].status
        why = f" ({status.error.message})" if status is not None and status.error else ""
        reasons.append(f"{name!r} serves nothing any more{why}")
    return ", ".join(reasons)
