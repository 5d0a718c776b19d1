"""The inference rank's end of the nccl backend."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from functools import partial

import msgspec
import torch
from torch import Tensor

from weightwire.contract import Context, Offer, ReceiverTransport, Seal, decode_message
from weightwire.errors import ConfigError, TableMismatch, TransferError
from weightwire.table import Region, TensorTable
from weightwire_nccl.channels import Channel, Reader, seal_bound, send_plan
from weightwire_nccl.config import NcclConfig
from weightwire_nccl.epoch import Epoch
from weightwire_nccl.meeting import machine, own_address
from weightwire_nccl.nccl import gpu_here
from weightwire_nccl.pieces import ChannelPlan, ReadPlan, encode_regions, shards_by_owner
from weightwire_nccl.records import PROTOCOL, Member, Opening, ReaderInfo, SenderInfo
from weightwire_nccl.route import by_plan, owners_of, refuse_unlike, refuse_unreachable
from weightwire_nccl.sender import describe_route, plan_digest
from weightwire_nccl.staging import Staging
from weightwire_nccl.workers import Job

__all__ = ["NcclReceiver"]


class NcclReceiver(ReceiverTransport):
    """Receives its regions, group by group, from the owners of their shards."""

    def __init__(self, context: Context, config: NcclConfig) -> None:
        self._context = context
        self._config = config
        self._address = own_address(config.host, context.session_url)
        self._gpu, self._gpu_id, self._no_gpu = gpu_here(config.library, context.device)
        self._nonce = secrets.token_hex(8)
        self._table_digest = ""
        self._table: TensorTable | None = None
        self._regions: tuple[Region, ...] = ()
        self._encoded = b""
        self._plan = ""
        self._plans: dict[int, ChannelPlan] = {}
        self._seals: dict[int, list[int]] = {}
        self._epoch: Epoch | None = None
        self._end: Reader | None = None
        self._known: frozenset[str] = frozenset()
        self._posted: dict[int, Job[Job[list[Seal]]]] = {}
        self._arenas: list[Tensor] = []
        self._turn = 0

    # ------------------------------------------------------------------ the contract

    def check(self, offer: Offer) -> None:
        ranks = {f"sender rank {rank}": blob for rank, blob in enumerate(offer.senders)}
        senders = {who: decode_message(blob, SenderInfo, who) for who, blob in ranks.items()}
        me = f"receiver {self._context.member_id!r} rank {self._context.rank}"
        mine = self._info()
        refuse_unlike(mine, me, senders)
        refuse_unreachable(senders["sender rank 0"], {me: mine})

    def set_plan(self, table: TensorTable, regions: Sequence[Region]) -> None:
        self._table, self._regions = table, tuple(regions)
        self._table_digest = table.digest()
        self._encoded = encode_regions(self._regions)
        self._plan = plan_digest(self._table_digest, self._encoded) if self._regions else ""
        plan = ReadPlan(table, self._regions, self._config.bucket_bytes)
        self._plans, self._seals = {}, {}
        for owner, held in sorted(shards_by_owner(table).items()):
            channel = plan.channel(held)
            if channel.groups:
                self._plans[owner] = channel
                self._seals[owner] = [seal_bound(len(shards)) for shards in held]

    def describe(self) -> bytes:
        return msgspec.msgpack.encode(self._info())

    def _info(self) -> ReaderInfo:
        healthy = self._epoch is not None and self._epoch.failure is None
        return ReaderInfo(
            protocol=PROTOCOL,
            nonce=self._nonce,
            machine=machine(),
            epoch=self._epoch.id if healthy and self._epoch is not None else "",
            plan=self._plan,
            bucket_bytes=self._config.bucket_bytes,
            library=self._config.library,
            mode=self._config.mode,
            device=str(self._context.device),
            gpu=self._gpu_id,
            no_gpu=self._no_gpu,
        )

    def begin(self, offer: Offer) -> None:
        first = decode_message(offer.senders[0], SenderInfo, "sender rank 0")
        self._posted.clear()
        epoch = self._usable_epoch((first.host, first.port))
        job = epoch.submit(partial(self._open, epoch, offer, first.nonce))
        epoch.wait(job, f"member of the group for {offer.policy}")

    def slot(self, group: int, nbytes: int) -> Tensor | None:
        device = self._context.device
        if device.type == "cpu":
            return None
        slots = 2 if self._context.overlap else 1
        while len(self._arenas) < slots:
            self._arenas.append(torch.empty(0, dtype=torch.uint8, device=device))
        self._turn = (self._turn + 1) % slots
        if self._arenas[self._turn].numel() < nbytes:
            self._arenas[self._turn] = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return self._arenas[self._turn]

    def post(self, group: int, regions: Mapping[int, Tensor]) -> None:
        epoch, end = self._opened()
        if epoch.device.type == "cpu":
            self._refuse_gpu(regions)
        fence = epoch.payload.fence()
        self._posted[group] = epoch.submit(partial(end.fetch_group, group, regions, fence))

    def fetch(self, group: int, regions: Mapping[int, Tensor]) -> Sequence[Seal]:
        epoch, _ = self._opened()
        if group not in self._posted:
            self.post(group, regions)
        return epoch.wait_settled(self._posted.pop(group), f"message of group {group}")

    def finish(self) -> None:
        """Every owner has its credits since the last group arrived."""

    def abort(self, error: BaseException) -> None:
        epoch, self._epoch, self._end = self._epoch, None, None
        self._posted.clear()
        if epoch is not None:
            epoch.give_up(error)

    def release_buffers(self) -> None:
        self._end = None  # its buckets; the group stays, so that peers needn't form it anew
        self._arenas.clear()

    def close(self) -> None:
        epoch, self._epoch, self._end = self._epoch, None, None
        self._posted.clear()
        self._arenas.clear()
        if epoch is not None:
            epoch.close()

    @property
    def staged_nbytes(self) -> int:
        """Bytes that this rank's buckets take."""
        return self._end.staging.nbytes if self._end is not None else 0

    # ------------------------------------------------------------------ opening

    def _usable_epoch(self, server: tuple[str, int]) -> Epoch:
        epoch = self._epoch
        if epoch is not None and epoch.failure is None and epoch.server == server:
            return epoch
        if epoch is not None:
            epoch.close()
        self._epoch = Epoch(self._context.watch, self._address, server, self._gpu)
        return self._epoch

    def _open(self, epoch: Epoch, offer: Offer, meeting: str) -> None:
        """On the group's thread: hear the route, form the group, tell the plan."""
        policy = offer.policy
        key = f"opening/{meeting}/{policy.incarnation}.{policy.version}.{policy.attempt}"
        opening = epoch.opening(key)
        if opening.error:
            raise TableMismatch(opening.error)
        if (opening.policy, opening.table) != (policy, self._table_digest):
            raise TableMismatch(
                f"sender rank 0 sends {opening.policy} of table {opening.table}, this receiver "
                f"has planned {policy} of {self._table_digest}: receive again"
            )
        fresh = opening.epoch != epoch.id
        context = self._context
        me = Member(context.member_id, False, context.rank, self._nonce, self._plan)
        epoch.enter(opening, me)
        self._tell_plan(epoch, opening, fresh=fresh)
        channels = self._channels(epoch, opening)
        staging = Staging(epoch.device, epoch.join)
        if self._end is not None and not fresh:
            staging = self._end.staging
        self._end = Reader(epoch, staging, channels, self._regions, self._seals)
        self._end.start(policy)
        self.path = describe_route(opening, epoch, fresh=fresh)

    def _tell_plan(self, epoch: Epoch, opening: Opening, *, fresh: bool) -> None:
        classes = by_plan(opening.members)
        known = frozenset() if fresh else self._known
        self._known = frozenset(classes)
        if self._plan and self._plan not in known and classes[self._plan][0] == epoch.rank:
            send_plan(epoch, self._encoded, owners_of(opening.members))

    def _channels(self, epoch: Epoch, opening: Opening) -> list[Channel]:
        if not self._plan:
            return []
        ranks = by_plan(opening.members)[self._plan]
        short = bytes.fromhex(self._plan)
        channels = []
        for owner, plan in self._plans.items():
            if opening.mode == "broadcast" and len(ranks) > 1:
                wire = epoch.shared_wire((owner, *ranks))
                channels.append(Channel(owner, ranks, plan, short, wire))
            else:
                channels.append(Channel(owner, (epoch.rank,), plan, short))
        return channels

    def _refuse_gpu(self, regions: Mapping[int, Tensor]) -> None:
        assert self._table is not None  # noqa: S101 - set_plan() comes first
        for position, tensor in regions.items():
            if tensor.device.type != "cpu":
                name = self._table.tensors[self._regions[position].tensor].name
                raise ConfigError(
                    f"tensor {name!r} lies on {tensor.device}, and this group runs Gloo "
                    f"({self.path}): open this handle with device='cuda'"
                )

    def _opened(self) -> tuple[Epoch, Reader]:
        if self._epoch is None or self._end is None:
            raise TransferError("the nccl receiver is in no version: begin() comes first")
        return self._epoch, self._end
