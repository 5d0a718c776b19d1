"""The two transports without core around them: one step at a time, in one process."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from process_rig import until

from weightwire.config import select
from weightwire.contract import Context, Offer, Policy, Seal
from weightwire.deadline import Deadline, Watch
from weightwire.grouping import make_groups
from weightwire.table import Region, Shard, TensorEntry, TensorTable
from weightwire_nixl.receiver import NixlReceiver
from weightwire_nixl.sender import NixlSender

__all__ = ["Transports", "landing", "offer", "read", "stage", "table_of"]


def table_of(ranks: int = 1) -> TensorTable:
    """One tensor of 64 numbers, cut evenly over the trainer's ranks."""
    size = 64 // ranks
    shards = tuple(Shard(rank, (size * rank,), (size,)) for rank in range(ranks))
    entry = TensorEntry("w", (64,), "float32", shards)
    return TensorTable(ranks, (entry,), make_groups([entry], 1 << 20))


class Transports:
    """Makes and drives them; closes them in the end."""

    def __init__(self) -> None:
        self._opened: list[NixlSender | NixlReceiver] = []

    def sender(
        self,
        table: TensorTable,
        rank: int = 0,
        session: str = "s1",
        seconds: float = 20.0,
        **options: Any,
    ) -> NixlSender:
        context = dataclasses.replace(
            _context("sender", session, seconds, options), rank=rank, world_size=table.world_size
        )
        sender = NixlSender(context, context.config)  # type: ignore[arg-type]
        self._opened.append(sender)
        sender.set_table(table)
        return sender

    def receiver(
        self,
        table: TensorTable,
        name: str = "r0",
        session: str = "s1",
        overlap: bool = False,
        **options: Any,
    ) -> NixlReceiver:
        context = dataclasses.replace(_context(name, session, 20.0, options), overlap=overlap)
        receiver = NixlReceiver(context, context.config)  # type: ignore[arg-type]
        self._opened.append(receiver)
        receiver.set_plan(table, [Region.whole(i, e) for i, e in enumerate(table.tensors)])
        return receiver

    def close(self) -> None:
        for each in reversed(self._opened):
            each.close()


def _context(member: str, session: str, seconds: float, options: dict[str, Any]) -> Context:
    watch = Watch()
    watch.start(Deadline(seconds))
    return Context(
        config=select({"backend": "nixl", **options})[1], session_url="file:///nowhere",
        session_id=session, session_dir=None, rank=0, world_size=1, member_id=member,
        incarnation=1, overlap=False, watch=watch,
    )  # fmt: skip


def offer(
    table: TensorTable, *senders: bytes, version: int = 1, roster: tuple[str, ...] = ("r0",)
) -> Offer:
    return Offer(Policy(1, version, 1), table.digest(), roster, senders, "off")


def stage(sender: NixlSender, values: torch.Tensor) -> None:
    """Put the only group."""
    slot = sender.slot(0, values.nbytes)
    if slot is not None:
        slot.view(values.dtype).copy_(values)
        values = slot.view(values.dtype)
    sender.put(0, {0: values}, Seal({}, 0))


def landing(receiver: NixlReceiver) -> torch.Tensor:
    return receiver.slot(0, 256).view(torch.float32)


def read(receiver: NixlReceiver) -> torch.Tensor:
    """Bring the only group, looking at nothing else than its steps."""
    tensor = landing(receiver)
    receiver.post(0, {0: tensor})
    until(lambda: receiver._advance() or receiver._flights[0].parts[0].landed, "it is read", 20)
    return tensor
