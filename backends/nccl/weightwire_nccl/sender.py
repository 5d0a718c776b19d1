"""The trainer's end of the nccl backend."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial

import msgspec
from torch import Tensor

from weightwire.contract import Context, Offer, Seal, SenderTransport, decode_message
from weightwire.errors import ConfigError, TableMismatch, TransferError, WeightWireError
from weightwire.table import TensorTable
from weightwire_nccl.channels import Channel, Owner, receive_plan, seal_bound
from weightwire_nccl.config import NcclConfig
from weightwire_nccl.epoch import Epoch
from weightwire_nccl.meeting import Server, machine, own_address
from weightwire_nccl.nccl import gpu_here
from weightwire_nccl.pieces import (
    ChannelPlan,
    GroupShards,
    ReadPlan,
    decode_regions,
    shards_by_owner,
)
from weightwire_nccl.records import (
    PROTOCOL,
    Member,
    Opening,
    ReaderInfo,
    SenderInfo,
    digest_of,
)
from weightwire_nccl.route import (
    by_plan,
    choose_library,
    choose_mode,
    refuse_unlike,
    refuse_unreachable,
)
from weightwire_nccl.staging import Staging
from weightwire_nccl.workers import Job

__all__ = ["NcclSender"]


class NcclSender(SenderTransport):
    """Sends its shards, group by group, to the readers whose plans ask for them."""

    put_frees_earlier = True

    def __init__(self, context: Context, config: NcclConfig) -> None:
        self._context = context
        self._config = config
        self._address = own_address(config.host, context.session_url)
        self._gpu, gpu, no_gpu = gpu_here(config.library, context.device)
        self._server = Server(self._address) if context.rank == 0 else None
        self._info = SenderInfo(
            protocol=PROTOCOL,
            nonce=secrets.token_hex(8),
            machine=machine(),
            host=self._server.host if self._server is not None else "",
            port=self._server.port if self._server is not None else 0,
            bucket_bytes=config.bucket_bytes,
            library=config.library,
            mode=config.mode,
            device=str(context.device),
            gpu=gpu,
            no_gpu=no_gpu,
        )
        self._table: TensorTable | None = None
        self._table_digest = ""
        self._shards: GroupShards = ()
        self._seals: list[int] = []
        self._epoch: Epoch | None = None
        self._end: Owner | None = None
        # Those of the version that the group opened last, whose readers won't tell them again,
        # also if a version of another table was refused since; of this rank's shards.
        self._plans: dict[str, ChannelPlan] = {}
        self._under_way: deque[Job[Job[None]]] = deque()
        self._epochs = 0
        self._last_opening = ""

    # ------------------------------------------------------------------ the contract

    def set_table(self, table: TensorTable) -> None:
        rank = self._context.rank
        digest = table.digest()
        if digest == self._table_digest:
            return
        self._table, self._table_digest = table, digest
        self._shards = shards_by_owner(table).get(rank, [{} for _ in table.groups])
        self._seals = [seal_bound(len(shards)) for shards in self._shards]

    def describe(self) -> bytes:
        return msgspec.msgpack.encode(self._info)

    def begin(self, offer: Offer, readers: Mapping[str, Sequence[bytes]]) -> None:
        infos = _members(offer, readers)
        first = next(iter(infos.values()))
        assert isinstance(first, SenderInfo)  # noqa: S101 - trainer ranks come first
        epoch = self._usable_epoch((first.host, first.port))
        job = epoch.submit(partial(self._open, epoch, offer, first.nonce, infos))
        epoch.wait(job, f"member of the group for {offer.policy}")

    def put(self, group: int, tensors: Mapping[int, Tensor], seal: Seal) -> None:
        epoch, end = self._opened()
        if epoch.device.type == "cpu":
            self._refuse_gpu(tensors)
        fence = epoch.payload.fence()
        self._under_way.append(epoch.submit(partial(end.send_group, group, tensors, seal, fence)))
        self._await(1)

    def settle(self) -> None:
        self._await(0)

    def finish(self) -> None:
        epoch, end = self._opened()
        self._await(0)
        epoch.wait(epoch.submit(end.await_credits), "credit for the last group")

    def abort(self, error: BaseException) -> None:
        epoch, self._epoch, self._end = self._epoch, None, None
        self._under_way.clear()
        if epoch is not None:
            epoch.give_up(error)

    def release_buffers(self) -> None:
        self._end = None  # its buckets; the group stays, so that peers needn't form it anew

    def close(self) -> None:
        epoch, self._epoch, self._end = self._epoch, None, None
        self._under_way.clear()
        if epoch is not None:
            epoch.close()
        if self._server is not None:
            self._server.close()
            self._server = None

    @property
    def sent_nbytes(self) -> int:
        """Payload that this rank has sent of the last version; a broadcast counts once."""
        return self._end.sent_nbytes if self._end is not None else 0

    @property
    def staged_nbytes(self) -> int:
        """Bytes that this rank's buckets take."""
        return self._end.staging.nbytes if self._end is not None else 0

    # ------------------------------------------------------------------ opening

    def _usable_epoch(self, server: tuple[str, int]) -> Epoch:
        if self._epoch is not None and self._epoch.failure is None:
            return self._epoch
        if self._epoch is not None:
            self._epoch.close()
        self._epoch = Epoch(self._context.watch, self._address, server, self._gpu)
        return self._epoch

    def _open(
        self,
        epoch: Epoch,
        offer: Offer,
        meeting: str,
        infos: Mapping[Member, SenderInfo | ReaderInfo],
    ) -> None:
        """On the group's thread: agree on the route, form the group, learn the plans."""
        policy = offer.policy
        key = f"opening/{meeting}/{policy.incarnation}.{policy.version}.{policy.attempt}"
        if self._context.rank == 0:
            self._write_opening(epoch, offer, key, infos)
        opening = epoch.opening(key)
        members = tuple(infos)
        if opening.error:
            raise TableMismatch(opening.error)
        if opening.members != members or opening.table != self._table_digest:
            raise TableMismatch(
                f"sender rank {self._context.rank} has another roster or table than rank 0 for "
                f"{policy}: call send alike on all ranks"
            )
        fresh = opening.epoch != epoch.id
        epoch.enter(opening, members[self._context.rank])
        self._learn_plans(epoch, members, fresh=fresh)
        channels = self._channels(epoch, opening)
        staging = Staging(epoch.device, epoch.join)
        if self._end is not None and not fresh:
            staging = self._end.staging
        self._end = Owner(epoch, staging, channels, self._shards, self._seals)
        self._end.start(policy)
        self.path = describe_route(opening, epoch, fresh=fresh)

    def _write_opening(
        self,
        epoch: Epoch,
        offer: Offer,
        key: str,
        infos: Mapping[Member, SenderInfo | ReaderInfo],
    ) -> None:
        client = epoch.client
        if self._last_opening:
            client.forget(self._last_opening)
        self._last_opening = key
        try:
            opening = self._decide(epoch, offer, infos)
        except WeightWireError as error:
            client.put(key, msgspec.msgpack.encode(Opening(offer.policy, error=str(error)[:4000])))
            raise
        if opening.generation == 1 and epoch.id:
            client.forget_all(f"epoch/{epoch.id}/")
        client.put(key, msgspec.msgpack.encode(opening))

    def _decide(
        self,
        epoch: Epoch,
        offer: Offer,
        infos: Mapping[Member, SenderInfo | ReaderInfo],
    ) -> Opening:
        assert self._table is not None  # noqa: S101 - set_table() comes first
        others = {str(member): info for member, info in infos.items()}
        refuse_unlike(self._info, "sender rank 0", others)
        refuse_unreachable(self._info, others)
        library, because = choose_library(self._config, infos)
        mode, reason = choose_mode(self._config, infos, self._context.world_size)
        members = tuple(infos)
        held = {info.epoch for info in infos.values() if isinstance(info, ReaderInfo)}
        stays = (
            bool(epoch.id)
            and held <= {epoch.id}
            and [member.nonce for member in epoch.members] == [m.nonce for m in members]
        )
        if not stays:
            self._epochs += 1
        return Opening(
            policy=offer.policy,
            epoch=epoch.id if stays else f"{self._info.nonce}.{self._epochs}",
            generation=epoch.generation + 1 if stays else 1,
            table=self._table_digest,
            mode=mode,
            library=library,
            reason=f"{reason}; {because}",
            bucket_bytes=self._config.bucket_bytes,
            members=members,
        )

    def _learn_plans(self, epoch: Epoch, members: Sequence[Member], *, fresh: bool) -> None:
        """Those who read the same send their plan once for each group and table."""
        table = self._table
        assert table is not None  # noqa: S101 - set_table() comes first
        classes = by_plan(members)
        known = {} if fresh else self._plans
        self._plans = {}
        for digest, ranks in classes.items():
            if digest in known:
                self._plans[digest] = known[digest]
                continue
            payload = receive_plan(epoch, ranks[0])
            who = str(members[ranks[0]])
            if plan_digest(self._table_digest, payload) != digest:
                raise TableMismatch(f"{who} sent another plan than it announced: send again")
            regions = decode_regions(payload, table, who)
            plan = ReadPlan(table, regions, self._config.bucket_bytes)
            self._plans[digest] = plan.channel(self._shards)

    def _channels(self, epoch: Epoch, opening: Opening) -> list[Channel]:
        rank = self._context.rank
        channels = []
        for digest, ranks in by_plan(opening.members).items():
            plan = self._plans[digest]
            if not plan.groups:
                continue
            short = bytes.fromhex(digest)
            if opening.mode == "broadcast" and len(ranks) > 1:
                wire = epoch.shared_wire((rank, *ranks))
                channels.append(Channel(rank, ranks, plan, short, wire))
            else:
                channels += [Channel(rank, (reader,), plan, short) for reader in ranks]
        return channels

    # ------------------------------------------------------------------ moving

    def _await(self, most: int) -> None:
        """Return when at most so many groups are under way."""
        epoch, _ = self._opened()
        while len(self._under_way) > most:
            epoch.wait_settled(self._under_way.popleft(), "end of a group's transfer")

    def _refuse_gpu(self, tensors: Mapping[int, Tensor]) -> None:
        assert self._table is not None  # noqa: S101 - set_table() comes first
        for i, tensor in tensors.items():
            if tensor.device.type != "cpu":
                raise ConfigError(
                    f"tensor {self._table.tensors[i].name!r} lies on {tensor.device}, and this "
                    f"group runs Gloo ({self.path}): open this handle with device='cuda'"
                )

    def _opened(self) -> tuple[Epoch, Owner]:
        if self._epoch is None or self._end is None:
            raise TransferError("the nccl sender is in no version: begin() comes first")
        return self._epoch, self._end


def plan_digest(table_digest: str, payload: bytes) -> str:
    return digest_of(table_digest.encode() + payload)


def describe_route(opening: Opening, epoch: Epoch, *, fresh: bool) -> str:
    """For reports: the mode, the library, why, and what the group cost."""
    group = f"group of {len(opening.members)}"
    cost = f"{group} formed in {epoch.formed_in:.2f} s" if fresh else f"{group} kept"
    return f"{opening.mode} over {opening.library}: {opening.reason}; {cost}"


def _members(
    offer: Offer, readers: Mapping[str, Sequence[bytes]]
) -> dict[Member, SenderInfo | ReaderInfo]:
    """Everybody who takes part, in the order of their ranks in the group."""
    infos: dict[Member, SenderInfo | ReaderInfo] = {}
    for rank, blob in enumerate(offer.senders):
        sender = decode_message(blob, SenderInfo, f"sender rank {rank}")
        infos[Member("sender", True, rank, sender.nonce, "")] = sender
    for receiver_id in sorted(readers):
        for rank, blob in enumerate(readers[receiver_id]):
            reader = decode_message(blob, ReaderInfo, f"receiver {receiver_id!r} rank {rank}")
            infos[Member(receiver_id, False, rank, reader.nonce, reader.plan)] = reader
    return infos
