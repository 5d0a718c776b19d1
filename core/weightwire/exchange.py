"""Moving shards to the one trainer rank that sends each tensor, group by group.

For backends that want whole tensors.  It runs over a process group of our own,
formed through the session at the first version that needs it and after every
failure; the host's groups are neither used nor disturbed.  At most one transfer
group's tensors are held at a time.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weightwire.contract import Policy
from weightwire.copying import raw_bytes
from weightwire.deadline import Watch
from weightwire.errors import PeerLost, UnsupportedOperation, WeightWireError
from weightwire.gloo import end_group
from weightwire.layout import cut_out
from weightwire.materialise import CheckpointTensors, whole_holders
from weightwire.session import keys
from weightwire.session.lease import Member
from weightwire.session.rendezvous import SessionRendezvous
from weightwire.session.session import Session
from weightwire.sources import Spec
from weightwire.table import Part, TensorEntry, TensorTable
from weightwire.trace.cover import Box
from weightwire.trace.extents import box_of
from weightwire.views import View

__all__ = ["Exchange", "ExchangePlan", "Piece"]


@dataclass(frozen=True)
class Piece:
    """A box of a tensor on its way from the rank that holds it to the tensor's owner.

    Attributes:
        tensor: index into the table's tensors.
        offsets, sizes: the box, in the dimensions of the source.
        source: name of the trainer's tensor that it is cut out of.
        held: first index of the larger box that the holder has.
        landed: first index of the box that the owner puts together in this group.
        frame: extent of that box in the dimensions of the source.
    """

    tensor: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    holder: int
    owner: int
    source: str
    held: tuple[int, ...]
    landed: tuple[int, ...]
    frame: tuple[int, ...]


class ExchangePlan:
    """Who sends which box to whom: made once per table, alike on every rank.

    Args:
        table: each tensor has one shard, the whole of it, and so one owner.
        specs: what each rank holds.
        views: tensors of the table that are made of the trainer's.

    Raises:
        UnsupportedOperation: a tensor that no rank can make alone is no box of one source.
    """

    def __init__(
        self, table: TensorTable, specs: Sequence[Spec], views: Sequence[View] = ()
    ) -> None:
        self._views = {view.name: view for view in views}
        self._shapes = {entry.name: entry.shape for spec in specs for entry in spec.entries}
        self._ties = {alias: name for spec in specs for alias, name in spec.ties.items()}
        self._shapes.update({a: self._shapes[n] for a, n in self._ties.items()})
        holders = whole_holders(specs)
        held: dict[str, dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]]] = {}
        for rank, spec in enumerate(specs):
            for entry in spec.entries:
                (box,) = entry.shards
                held.setdefault(entry.name, {}).setdefault((box.offsets, box.sizes), []).append(
                    rank
                )
        self._groups: list[tuple[Piece, ...]] = []
        for group, members in enumerate(table.groups):
            pieces = []
            for i in members.tensors:
                entry = table.tensors[i]
                if not entry.numel:
                    continue
                owner = entry.shards[0].owner
                sources = self._sources(entry.name)
                if all(owner in holders.get(source, ()) for source in sources):
                    continue  # its owner holds it whole
                source, frame = self._frame(entry)
                landed = _in_source(table.part(group, i), entry.shape, frame)
                boxes = {box: ranks for box, ranks in held[source].items() if 0 not in box[1]}
                for (offsets, sizes), ranks in sorted(boxes.items()):
                    # Spread over the replicas of a box, but keep it where it is if it is there.
                    holder = owner if owner in ranks else ranks[i % len(ranks)]
                    here = landed.meet(offsets, sizes)
                    if here is not None:
                        pieces.append(
                            Piece(
                                tensor=i,
                                offsets=here.offsets,
                                sizes=here.sizes,
                                holder=holder,
                                owner=owner,
                                source=source,
                                held=offsets,
                                landed=landed.offsets,
                                frame=landed.sizes,
                            )
                        )
            self._groups.append(tuple(pieces))

    def _sources(self, name: str) -> set[str]:
        view = self._views.get(name)
        sources = {name} if view is None else view.sources()
        return {self._ties.get(source, source) for source in sources}

    def _frame(self, entry: TensorEntry) -> tuple[str, Box]:
        """The one source of a tensor, and the box of it that the tensor is."""
        view = self._views.get(entry.name)
        if view is None:
            (source,) = self._sources(entry.name)
            return source, Box((0,) * len(entry.shape), entry.shape)
        box = box_of(view, self._shapes)
        if box is None:
            raise UnsupportedOperation(
                f"checkpoint tensor {entry.name!r} rearranges tensors that are sharded over the "
                "trainer's ranks, which a backend that writes whole tensors can't do: choose one "
                "with ranged reads from the trainer, or keep those tensors unsharded"
            )
        (source,) = self._sources(entry.name)
        return source, box

    def of_group(self, group: int) -> tuple[Piece, ...]:
        return self._groups[group]

    def assembled(self, group: int) -> frozenset[int]:
        """Tensors of a group that their owner puts together from boxes."""
        return frozenset(piece.tensor for piece in self._groups[group])

    @property
    def needed(self) -> bool:
        return any(self._groups)


class Exchange:
    """This rank's end of the exchange.

    Args:
        member: the sender's incarnation.
        rank: this trainer rank.
    """

    def __init__(self, session: Session, member: Member, rank: int, watch: Watch) -> None:
        self._session = session
        self._member = member
        self._rank = rank
        self._watch = watch
        self._group: Any = None
        self._prefix = ""

    def join(self, policy: Policy) -> None:
        """Form the process group, unless there is one; every rank calls it for one version."""
        if self._group is not None:
            return
        from torch.distributed import ProcessGroupGloo

        name = f"{policy.version}.{policy.attempt}"
        self._prefix = keys.member(self._member.kind, self._member.incarnation, "exchange", name)
        store = SessionRendezvous(self._session, self._prefix, self._watch)
        seconds = max(0.1, self._watch.deadline.remaining())

        def form() -> Any:
            return ProcessGroupGloo(
                store, self._rank, self._member.record.world_size, _timeout(seconds)
            )

        self._group = self._away(form, "process group of the trainer ranks")

    def move(
        self,
        table: TensorTable,
        pieces: Sequence[Piece],
        tensors: CheckpointTensors,
        whole: Mapping[int, Tensor],
    ) -> None:
        """Bring one group's boxes to their owners.

        Args:
            pieces: of the group, in an order that is the same on every rank.
            tensors: this rank's tensors by name.
            whole: by tensor index, the contiguous tensor of the wire dtype that
                this rank puts together: what of it travels in this group.
        """
        works: list[Any] = []
        arrivals: list[tuple[Tensor, Tensor]] = []
        with torch.no_grad():
            for tag, piece in enumerate(pieces):
                entry = table.tensors[piece.tensor]
                if self._rank == piece.owner:
                    box = cut_out(
                        whole[piece.tensor].view(piece.frame),
                        piece.offsets,
                        piece.sizes,
                        piece.landed,
                    )
                    if self._rank == piece.holder:
                        held = tensors.source(piece.source)
                        box.copy_(cut_out(held, piece.offsets, piece.sizes, piece.held))
                        continue
                    landing = (
                        box
                        if box.is_contiguous()
                        else torch.empty_like(box, memory_format=torch.contiguous_format)
                    )
                    arrivals.append((box, landing))
                    works.append(self._group.recv([raw_bytes(landing)], piece.holder, tag))
                elif self._rank == piece.holder:
                    held = tensors.source(piece.source)
                    local = cut_out(held, piece.offsets, piece.sizes, piece.held)
                    # Gloo sends from host memory only.
                    local = local.to(entry.torch_dtype).contiguous().cpu()
                    works.append(self._group.send([raw_bytes(local)], piece.owner, tag))
                    arrivals.append((local, local))  # kept alive until it is sent
            if works:
                seconds = max(0.1, self._watch.deadline.remaining())
                self._away(
                    lambda: [work.wait(_timeout(seconds)) for work in works], "exchanged shards"
                )
            for box, landing in arrivals:
                if box is not landing:
                    box.copy_(landing)

    def leave(self) -> None:
        """Drop the process group: the next version that needs one forms it anew.  Idempotent."""
        group, self._group = self._group, None
        if group is not None:
            end_group(group)

    def _away(self, work: Any, what: str) -> Any:
        """Run what blocks in gloo on a thread, so that this one notices a failed peer."""
        result: list[Any] = []
        failure: list[BaseException] = []

        def run() -> None:
            try:
                result.append(work())
            except BaseException as error:
                failure.append(error)

        thread = threading.Thread(target=run, name="weightwire-exchange", daemon=True)
        thread.start()
        try:
            self._watch.until(lambda: not thread.is_alive(), what, lambda: ["the other ranks"])
        except BaseException:
            self.leave()  # ends what the thread waits for
            raise
        if not failure:
            return result[0]
        self.leave()
        if isinstance(failure[0], WeightWireError):
            raise failure[0]
        raise PeerLost(
            "a trainer rank was lost while shards were exchanged: look at the other ranks' "
            f"errors, and send the version again\n{failure[0]}"
        ) from failure[0]


def _in_source(part: Part, shape: Sequence[int], frame: Box) -> Part:
    """What travels of a tensor, as a box of its source.

    Args:
        part: in the tensor's dimensions.
        shape: of the tensor.
        frame: the box of the source that the tensor is; the two differ in dimensions
            of one element.
    """
    real = [dim for dim, size in enumerate(shape) if size > 1]
    inner = iter((part.offsets[dim], part.sizes[dim]) for dim in real)
    offsets, sizes = [], []
    for begin, end in zip(frame.start, frame.stop, strict=True):
        at, size = next(inner) if end - begin > 1 else (0, 1)
        offsets.append(begin + at)
        sizes.append(size)
    return Part(tuple(offsets), tuple(sizes))


def _timeout(seconds: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=seconds)
