"""Agreement among the ranks of one side, over the session.

Every rank hands in a report; rank 0 collects them and writes them out again;
every rank reads the same list and so comes to the same end: an error on one is
raised on all, or on none.  The host's process groups are never touched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import replace

from weightwire.errors import PeerLost, WeightWireError
from weightwire.session import keys, process
from weightwire.session.lease import Member, Siblings
from weightwire.session.records import ErrorInfo, RankReport, RankReports
from weightwire.session.session import Session
from weightwire.waiting import Steps, Waiting

__all__ = ["Agreement"]

_OVER = "over"
_GRACE_SECONDS = 0.15
"""How much longer rank 0 waits for the others than they for peers, and they for rank 0 than that:
who is waited for has the same deadline, and knows better what it lacks."""


class Agreement:
    """The ranks of one side, in lockstep.

    Args:
        member: the side's incarnation.
        rank: this process's rank in it.
        siblings: of rank 0, which somebody else bids look; None on the other ranks.
    """

    def __init__(
        self, session: Session, member: Member, rank: int, siblings: Siblings | None
    ) -> None:
        self._session = session
        self._member = member
        self._rank = rank
        self._round = 0
        self._siblings = siblings
        self.world_size = member.record.world_size

    @property
    def leads(self) -> bool:
        """True on rank 0."""
        return self._rank == 0

    @property
    def alone(self) -> bool:
        return self.world_size == 1

    def next_round(self, *, begins: bool = True) -> Steps[None]:
        """Begin a call: rank 0 opens a round, the others enter the newest it has opened.

        A rank that gave up alone, or was slow, so meets the others in their next call.

        Args:
            begins: this is a call's first round: one that rank 0 gave up before the
                call began isn't entered, since rank 0 calls again.
        """
        if self.leads:
            self.open_round()
            return
        while True:
            opened = self._session.read(self._rounds, RankReport)
            number = int.from_bytes(opened.payload, "big") if opened is not None else 0
            if number > self._round:
                self._round = number
                if not (begins and self._session.read(self._key(number, _OVER), RankReport)):
                    return
            begins = False
            yield self._waiting("round", {0})

    def open_round(self) -> None:
        """Rank 0: the others' next call belongs to this round."""
        self._round += 1
        if self.alone:
            return
        if self._round > 2:
            # Everybody has left the round before the last: it was needed to enter the last.
            self._session.delete_tree(self._key(self._round - 2))
        self._session.write(self._rounds, RankReport(self._round.to_bytes(8, "big")))

    @property
    def _rounds(self) -> str:
        return keys.agree(self._member.kind, self._member.incarnation, "round")

    def gather(self, step: str, report: RankReport) -> Steps[tuple[RankReport, ...]]:
        """All ranks' reports of one step, in rank order, the same on every rank."""
        if self.alone:
            return (report,)
        if self._rank == 0:
            reports = {0: report}
            while missing := set(range(self.world_size)) - reports.keys():
                for rank in sorted(missing):
                    found = self._session.read(self._key(self._round, step, str(rank)), RankReport)
                    if found is not None:
                        reports[rank] = found
                if len(reports) < self.world_size:
                    missing = set(range(self.world_size)) - reports.keys()
                    self._refuse_lost(missing)
                    yield self._waiting(step, missing)
            together = RankReports(tuple(reports[rank] for rank in range(self.world_size)))
            self._session.write(self._key(self._round, step, "all"), together)
            return together.reports
        self._session.write(self._key(self._round, step, str(self._rank)), report)
        while True:
            all_reports = self._session.read(self._key(self._round, step, "all"), RankReports)
            if all_reports is not None:
                return all_reports.reports
            self._refuse_lost({0})
            yield self._waiting(step, {0})

    def agree(
        self, step: str, payload: bytes, error: BaseException | None
    ) -> Steps[tuple[bytes, ...]]:
        """All ranks' payloads; or, on every rank, the first rank's error.

        Raises:
            WeightWireError: this rank's own error as it is, or another rank's by name.
        """
        info = None if error is None else ErrorInfo.of(error)
        try:
            reports = yield from self.gather(step, RankReport(payload, info))
        except GeneratorExit:
            raise
        except BaseException as interruption:
            self.fail(step, error or interruption)
            if error is not None:
                raise error from interruption  # what went wrong here comes first
            raise
        if error is not None:
            raise error
        for rank, report in enumerate(reports):
            if report.error is not None:
                raise report.error.to_error(f"{self._name} rank {rank}")
        return tuple(report.payload for report in reports)

    def fail(self, step: str, error: BaseException) -> None:
        """This rank leaves the round: whoever waits for it at ``step`` gets its error at once."""
        if self.alone:
            return
        report = RankReport(error=ErrorInfo.of(error))
        with contextlib.suppress(WeightWireError):  # ``error`` matters more
            if self._rank == 0:
                self._session.write(self._key(self._round, _OVER), RankReport())
                others = (RankReport(),) * (self.world_size - 1)
                self._session.write(
                    self._key(self._round, step, "all"), RankReports((report, *others))
                )
            else:
                self._session.write(self._key(self._round, step, str(self._rank)), report)

    def tell(self, step: str, payload: bytes, error: BaseException | None = None) -> None:
        """Rank 0: hand its decision to the other ranks."""
        if not self.alone:
            info = None if error is None else ErrorInfo.of(error)
            self._session.write(self._key(self._round, step, "0"), RankReport(payload, info))
            if error is not None:
                self._session.write(self._key(self._round, _OVER), RankReport())

    def hear(self, step: str, *, grace: float = 2 * _GRACE_SECONDS) -> Steps[bytes]:
        """Other ranks: rank 0's decision, or its error.

        Args:
            grace: seconds that rank 0 may take longer than the deadline.
        """
        while True:
            report = self._session.read(self._key(self._round, step, "0"), RankReport)
            if report is not None:
                if report.error is not None:
                    raise self.to_error(report.error)
                return report.payload
            self._refuse_lost({0})
            yield replace(self._waiting(step, {0}), grace=grace)

    def acknowledge(self, step: str) -> None:
        """Other ranks: tell rank 0 that no more is read from the session in this round."""
        if self._rank != 0:
            self._session.write(self._key(self._round, step, str(self._rank)), RankReport())

    def acknowledged(self, step: str) -> Steps[None]:
        """Rank 0: wait until every other rank has acknowledged."""
        wanted = set(range(1, self.world_size))
        while missing := wanted - set(self._session.numbers(self._key(self._round, step))):
            self._refuse_lost(missing)
            yield self._waiting(step, missing)

    def _refuse_lost(self, ranks: Iterable[int]) -> None:
        """Raise for a rank that answers no more: it stands still, or its process is gone."""
        siblings, ranks = self._siblings, set(ranks)
        if siblings is not None and (missing := siblings.missing(ranks)):
            raise siblings.describe(missing)
        for rank in sorted(ranks):
            if siblings is not None:
                has_ended = siblings.has_ended(rank)
            else:  # other ranks wait for rank 0 alone
                has_ended = process.is_gone(self._member.record.process)
            if has_ended:
                raise PeerLost(
                    f"{self._name} rank {rank} is gone (its process ended): restart all ranks"
                )

    def to_error(self, info: ErrorInfo) -> WeightWireError:
        return info.to_error(f"{self._name} rank 0")

    @property
    def _name(self) -> str:
        return self._member.record.member_id

    def _key(self, number: int, *rest: str) -> str:
        return keys.agree(self._member.kind, self._member.incarnation, f"{number:09d}", *rest)

    def _waiting(self, step: str, missing: set[int] | Sequence[int]) -> Waiting:
        return Waiting(
            f"agreement {step!r} of {self._name!r}",
            tuple(f"{self._name} rank {rank}" for rank in sorted(missing)),
            grace=_GRACE_SECONDS if self.leads else 2 * _GRACE_SECONDS,
        )
