"""The contract's edge: a backend's transports, with points at which a scenario may act."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from weightwire.contract import (
    Backend,
    Context,
    Offer,
    ReceiverTransport,
    Seal,
    SenderTransport,
)
from weightwire.sources import WeightSource
from weightwire.table import Region, TensorTable
from weightwire.targets import WeightTarget
from weightwire.views import View, record_views
from weightwire_conformance.rig.points import Points

__all__ = ["PartTarget", "PointedSource", "instrument", "point_target"]


def instrument(backend: Backend, points: Points) -> None:
    """Put points into every transport that this backend opens in this process from now on.

    Methods are replaced on the instances: all else stays the plug-in's own.
    """
    open_sender, open_receiver = backend.open_sender, backend.open_receiver

    def sender(context: Context) -> SenderTransport:
        transport = open_sender(context)
        _point_sender(transport, points)
        return transport

    def receiver(context: Context) -> ReceiverTransport:
        transport = open_receiver(context)
        _point_receiver(transport, points)
        return transport

    backend.open_sender = sender  # type: ignore[method-assign]
    backend.open_receiver = receiver  # type: ignore[method-assign]


def _point_sender(transport: SenderTransport, points: Points) -> None:
    begin, slot, put = transport.begin, transport.slot, transport.put
    in_slot = False

    def pointed_begin(offer: Offer, readers: Mapping[str, Sequence[bytes]]) -> None:
        points.reach("sender.begin")
        begin(offer, readers)
        points.reach("sender.begun")

    def pointed_slot(group: int, nbytes: int) -> Tensor | None:
        nonlocal in_slot
        memory = slot(group, nbytes)
        in_slot = memory is not None
        return memory

    def pointed_put(group: int, tensors: Mapping[int, Tensor], seal: Seal) -> None:
        action = points.reach("sender.put")
        if action == "flip":
            if not in_slot:  # they may be the trainer's own
                tensors = {i: tensor.clone() for i, tensor in tensors.items()}
            _flip(tensors)
        elif action == "misseal":
            wrong = {i: digest ^ 1 for i, digest in seal.digests.items()}
            seal = msgspec.structs.replace(seal, digests=wrong)
        put(group, tensors, seal)

    transport.begin = pointed_begin  # type: ignore[method-assign]
    transport.slot = pointed_slot  # type: ignore[method-assign]
    transport.put = pointed_put  # type: ignore[method-assign]
    transport.finish = _pointed("sender.finish", transport.finish, points)  # type: ignore[method-assign]
    transport.publish = _pointed("sender.publish", transport.publish, points)  # type: ignore[method-assign]


def _point_receiver(transport: ReceiverTransport, points: Points) -> None:
    begin, post, fetch = transport.begin, transport.post, transport.fetch

    def pointed_begin(offer: Offer) -> None:
        points.reach("receiver.begin")
        begin(offer)
        points.reach("receiver.begun")

    def pointed_post(group: int, regions: Mapping[int, Tensor]) -> None:
        post(group, regions)
        points.reach("receiver.posted")

    def pointed_fetch(group: int, regions: Mapping[int, Tensor]) -> Sequence[Seal]:
        points.reach("receiver.fetch")
        seals = fetch(group, regions)
        if points.reach("receiver.fetched") == "flip":
            _flip(regions)
        return seals

    transport.begin = pointed_begin  # type: ignore[method-assign]
    transport.post = pointed_post  # type: ignore[method-assign]
    transport.fetch = pointed_fetch  # type: ignore[method-assign]
    transport.finish = _pointed("receiver.finish", transport.finish, points)  # type: ignore[method-assign]


def _pointed(point: str, method: Callable[..., None], points: Points) -> Callable[..., None]:
    def pointed(*arguments: Any) -> None:
        points.reach(point)
        method(*arguments)

    return pointed


def _flip(tensors: Mapping[int, Tensor]) -> None:
    """One bit in the middle of the largest tensor."""
    victim = max(tensors.values(), key=lambda tensor: tensor.nbytes)
    raw = victim.reshape(-1).view(torch.uint8)
    raw[raw.numel() // 2] ^= 4


Convert = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]


class PointedSource(WeightSource):
    """A trainer's tensors.

    Args:
        convert: what the trainer does to save its checkpoints, where those are others.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], points: Points, convert: Convert | None = None
    ) -> None:
        self._tensors = tensors
        self._points = points
        self._convert = convert

    def tensors(self) -> Mapping[str, Tensor]:
        self._points.reach("source.tensors")
        return self._tensors

    def views(self, given: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> Sequence[View]:
        return () if self._convert is None else record_views(given, self._convert)


def point_target(target: WeightTarget, points: Points, *, staged: bool) -> WeightTarget:
    """Put points into an engine's weights; all else stays its own.

    Args:
        staged: if True, nothing lands in place: the pipeline's own memory is used.
    """
    plan, write, commit = target.plan, target.write, target.commit

    def pointed_plan(table: TensorTable) -> Sequence[Region]:
        points.reach("target.plan")
        return plan(table)

    def pointed_write(group: int, tensors: Mapping[Region, Tensor]) -> None:
        points.reach("target.write")
        write(group, tensors)

    def pointed_commit() -> None:
        points.reach("target.commit")
        commit()
        points.reach("target.committed")

    target.plan = pointed_plan  # type: ignore[method-assign]
    target.write = pointed_write  # type: ignore[method-assign]
    target.commit = pointed_commit  # type: ignore[method-assign]
    if staged:
        target.landing = lambda region: None  # type: ignore[method-assign]
    return target


class PartTarget(WeightTarget):
    """Of each tensor a part, as a rank of an engine has it.

    Args:
        tensors: the parts, by name.
        pieces: which part of the whole tensor each is.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], pieces: Mapping[str, tuple[slice, ...]]
    ) -> None:
        self._tensors = tensors
        self._pieces = pieces
        self._names: dict[int, str] = {}

    def plan(self, table: TensorTable) -> Sequence[Region]:
        self._names = {index: name for name, index in table.index().items()}
        return [
            Region(
                index,
                tuple(side.start for side in self._pieces[name]),
                tuple(side.stop - side.start for side in self._pieces[name]),
            )
            for index, name in self._names.items()
        ]

    @property
    def takes_pieces(self) -> bool:
        return True

    def _place(self, region: Region) -> Tensor:
        name = self._names[region.tensor]
        begins = [
            at - side.start for at, side in zip(region.offsets, self._pieces[name], strict=True)
        ]
        sizes = zip(begins, region.sizes, strict=True)
        return self._tensors[name][tuple(slice(begin, begin + size) for begin, size in sizes)]

    def landing(self, region: Region) -> Tensor | None:
        place = self._place(region)
        return place if place.is_contiguous() else None

    def write(self, group: int, tensors: Mapping[Region, Tensor]) -> None:
        for region, value in tensors.items():
            place = self._place(region)
            if place.data_ptr() != value.data_ptr():
                place.copy_(value)
