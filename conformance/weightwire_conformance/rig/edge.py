"""The contract's edge: a backend's transports, with points at which a scenario may act."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from weightwire.contract import (
    Backend,
    Context,
    Offer,
    Policy,
    ReceiverTransport,
    Seal,
    SenderTransport,
)
from weightwire.sources import WeightSource
from weightwire.table import Region, TensorTable
from weightwire.targets import MappingTarget
from weightwire_conformance.rig.points import Points

__all__ = ["PointedSource", "PointedTarget", "instrument"]


def instrument(backend: Backend, points: Points) -> None:
    """Wrap every transport that this backend opens in this process from now on."""
    open_sender, open_receiver = backend.open_sender, backend.open_receiver

    def sender(context: Context) -> SenderTransport:
        return _Sender(open_sender(context), points)

    def receiver(context: Context) -> ReceiverTransport:
        return _Receiver(open_receiver(context), points)

    # On the instance: name, config, capabilities and probe stay the plug-in's own.
    backend.open_sender = sender  # type: ignore[method-assign]
    backend.open_receiver = receiver  # type: ignore[method-assign]


class _Sender(SenderTransport):
    """Passes everything on."""

    def __init__(self, inner: SenderTransport, points: Points) -> None:
        self._inner = inner
        self._points = points
        self._in_slot = False
        self.keep = inner.keep

    def set_table(self, table: TensorTable) -> None:
        self._inner.set_table(table)

    def describe(self) -> bytes:
        return self._inner.describe()

    def begin(self, offer: Offer, readers: Mapping[str, Sequence[bytes]]) -> None:
        self._points.reach("sender.begin")
        self._inner.begin(offer, readers)

    def slot(self, group: int, nbytes: int) -> Tensor | None:
        slot = self._inner.slot(group, nbytes)
        self._in_slot = slot is not None
        return slot

    def put(self, group: int, tensors: Mapping[int, Tensor], seal: Seal) -> None:
        action = self._points.reach("sender.put")
        if action == "flip":
            if not self._in_slot:  # they may be the trainer's own
                tensors = {i: tensor.clone() for i, tensor in tensors.items()}
            _flip(tensors)
        elif action == "misseal":
            seal = Seal({i: digest ^ 1 for i, digest in seal.digests.items()})
        self._inner.put(group, tensors, seal)

    def finish(self) -> None:
        self._points.reach("sender.finish")
        self._inner.finish()

    def publish(self) -> None:
        self._points.reach("sender.publish")
        self._inner.publish()

    def lose(self, receiver_id: str) -> None:
        self._inner.lose(receiver_id)

    def abort(self, error: BaseException) -> None:
        self._inner.abort(error)

    def drop(self, policy: Policy) -> None:
        self._inner.drop(policy)

    def close(self) -> None:
        self._inner.close()


class _Receiver(ReceiverTransport):
    """Passes everything on."""

    def __init__(self, inner: ReceiverTransport, points: Points) -> None:
        self._inner = inner
        self._points = points

    def set_plan(self, table: TensorTable, regions: Sequence[Region]) -> None:
        self._inner.set_plan(table, regions)

    def describe(self) -> bytes:
        return self._inner.describe()

    def begin(self, offer: Offer) -> None:
        self._points.reach("receiver.begin")
        self._inner.begin(offer)

    def slot(self, group: int, nbytes: int) -> Tensor | None:
        return self._inner.slot(group, nbytes)

    def fetch(self, group: int, regions: Mapping[int, Tensor]) -> Sequence[Seal]:
        self._points.reach("receiver.fetch")
        seals = self._inner.fetch(group, regions)
        if self._points.reach("receiver.fetched") == "flip":
            _flip(regions)
        return seals

    def finish(self) -> None:
        self._points.reach("receiver.finish")
        self._inner.finish()

    def abort(self, error: BaseException) -> None:
        self._inner.abort(error)

    def close(self) -> None:
        self._inner.close()


def _flip(tensors: Mapping[int, Tensor]) -> None:
    """One bit in the middle of the largest tensor."""
    victim = max(tensors.values(), key=lambda tensor: tensor.nbytes)
    raw = victim.reshape(-1).view(torch.uint8)
    raw[raw.numel() // 2] ^= 4


class PointedSource(WeightSource):
    """A trainer's tensors."""

    def __init__(self, tensors: Mapping[str, Tensor], points: Points) -> None:
        self._tensors = tensors
        self._points = points

    def tensors(self) -> Mapping[str, Tensor]:
        self._points.reach("source.tensors")
        return self._tensors


class PointedTarget(MappingTarget):
    """An engine's tensors.

    Args:
        staged: if True, nothing lands in place: the pipeline's own memory is used.
    """

    def __init__(self, tensors: Mapping[str, Tensor], points: Points, *, staged: bool) -> None:
        super().__init__(tensors)
        self._points = points
        self._staged = staged

    def plan(self, table: TensorTable) -> Sequence[Region]:
        self._points.reach("target.plan")
        return super().plan(table)

    def landing(self, region: Region) -> Tensor | None:
        return None if self._staged else super().landing(region)

    def write(self, group: int, tensors: Mapping[str, Tensor]) -> None:
        self._points.reach("target.write")
        super().write(group, tensors)

    def commit(self) -> None:
        self._points.reach("target.commit")
        super().commit()
