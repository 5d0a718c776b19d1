"""The inference rank's end of the ``memory`` backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from weightwire.contract import Context, Offer, Policy, ReceiverTransport, Seal, decode_message
from weightwire.cuts import Cuts
from weightwire.errors import ConfigError, PeerLost, TransferError
from weightwire.layout import ALIGNMENT, SlotLayout, intersection, slot_layout, views
from weightwire.memory.config import MemoryConfig
from weightwire.memory.segment import PAGE, Segment, default_directory, remove_orphans, segment_name
from weightwire.memory.wire import ReaderInfo, SenderInfo, session_path
from weightwire.table import Region, TensorTable

__all__ = ["MemoryReceiver"]


class MemoryReceiver(ReceiverTransport):
    """Copies regions out of the owners' slots, and credits each group."""

    def __init__(self, context: Context) -> None:
        config = context.config
        assert isinstance(config, MemoryConfig)  # noqa: S101 - core validated it
        self._context = context
        self._directory = config.directory or default_directory()
        if not self._directory.is_dir():
            raise ConfigError(
                f"memory option 'directory' {self._directory} doesn't exist: create it"
            )
        self._table: TensorTable | None = None
        self._regions: tuple[Region, ...] = ()
        self._layouts: dict[tuple[int, int], SlotLayout] = {}
        self._segment: Segment | None = None
        self._reads: dict[int, tuple[int, ...]] = {}
        self._owners: dict[int, tuple[Segment, SenderInfo]] = {}
        self._policy = Policy(0, 0)
        remove_orphans(self._directory, context.session_id)

    def set_plan(self, table: TensorTable, regions: Sequence[Region]) -> None:
        self._table, self._regions = table, tuple(regions)
        self._layouts = {}
        cuts = Cuts(table)
        reads: dict[int, set[int]] = {}
        for region in regions:
            group = cuts.group_of(region)
            for shard in table.tensors[region.tensor].shards:
                if intersection(region, shard) is not None:
                    reads.setdefault(shard.owner, set()).add(group)
        self._reads = {owner: tuple(sorted(groups)) for owner, groups in reads.items()}
        self._release_segment()
        name = segment_name(
            self._context.session_id, f"r-{self._context.member_id}-{self._context.rank}"
        )
        nbytes = PAGE + max(PAGE, 8 * table.world_size)
        self._segment = Segment(self._directory / name, nbytes, create=True)

    def describe(self) -> bytes:
        segment = self._own()
        return msgspec.msgpack.encode(ReaderInfo(str(segment.path), segment.nbytes, self._reads))

    def begin(self, offer: Offer) -> None:
        self._policy = offer.policy
        self._own().give_up(None)
        owners = {}
        for owner in self._reads:
            info = decode_message(offer.senders[owner], SenderInfo, f"sender rank {owner}")
            known = self._owners.get(owner)
            if known is not None and known[1] == info:
                owners[owner] = known
                continue
            self._check(owner, info)
            path = session_path(info.path, self._context.session_id, f"sender rank {owner}")
            owners[owner] = (Segment(path, info.nbytes, create=False), info)
        self._owners = owners

    def fetch(self, group: int, regions: Mapping[int, Tensor]) -> Sequence[Seal]:
        table = self._planned()
        seals = []
        owners = [owner for owner, groups in self._reads.items() if group in groups]
        # Each receiver starts at a different owner.
        turn = self._context.rank % max(1, len(owners))
        for owner in owners[turn:] + owners[:turn]:
            segment, info = self._owners[owner]
            found = self._context.watch.until(
                lambda s=segment, i=info: self._announced(s, i, group),  # type: ignore[misc]
                f"announcement of group {group}",
                lambda o=owner: [f"sender rank {o}"],  # type: ignore[misc]
            )
            seals.append(self._read(table, owner, found, group, regions))
        return seals

    def finish(self) -> None:
        """Every group has been credited as it was read."""

    def abort(self, error: BaseException) -> None:
        del error
        if self._segment is not None:
            self._segment.give_up(self._policy)

    def release_buffers(self) -> None:
        self._owners = {}  # their slots are mapped here

    def close(self) -> None:
        self._release_segment()
        self._owners = {}

    def _announced(self, segment: Segment, info: SenderInfo, group: int) -> _Announced | None:
        """The slot that holds the group, and the generation in which it does, or None."""
        policy = self._policy
        if segment.has_given_up(policy):
            raise PeerLost(f"the sender gave up {policy}: its own error says why")
        wanted = (policy.incarnation, policy.version, policy.attempt, group)
        for index, header in enumerate(info.headers):
            word = header // 8
            generation = int(segment.words[word])
            found = tuple(int(value) for value in segment.words[word + 1 : word + 5])
            # Read again: the words belong together only if the slot didn't move meanwhile.
            if generation and found == wanted and int(segment.words[word]) == generation:
                return _Announced(index, generation)
        return None

    def _read(
        self,
        table: TensorTable,
        owner: int,
        found: _Announced,
        group: int,
        regions: Mapping[int, Tensor],
    ) -> Seal:
        segment, info = self._owners[owner]
        index, generation = found.slot, found.generation
        word = info.headers[index] // 8
        if (group, owner) not in self._layouts:
            self._layouts[group, owner] = slot_layout(table, group, owner)
        layout = self._layouts[group, owner]
        slot = segment.tensor(info.slots[index], layout.nbytes)
        length = min(int(segment.words[word + 5]), info.seal_bytes)
        sealed = segment.read(info.headers[index] + 64, length)
        with torch.no_grad():
            for position, memory in regions.items():
                region = self._regions[position]
                for destination, source in views(layout, region.tensor, slot, region, memory):
                    destination.copy_(source)
        if int(segment.words[word]) != generation:
            raise PeerLost(
                f"sender rank {owner} reused the slot of group {group} while it was read: "
                "this receiver was stopped for longer than its lease; receive the next version"
            )
        seal = decode_message(sealed, Seal, f"sender rank {owner}")
        self._own().words[PAGE // 8 + owner] = generation
        return seal

    def _check(self, owner: int, info: SenderInfo) -> None:
        table = self._planned()
        needed = max(
            (slot_layout(table, group, owner).nbytes for group in self._reads[owner]), default=0
        )
        ends = [*(h + 64 + info.seal_bytes for h in info.headers)]
        ends += [slot + info.slot_bytes for slot in info.slots]
        if (
            len(info.headers) != len(info.slots)
            or needed > info.slot_bytes
            or max(ends) > info.nbytes
            or any(header % 8 for header in info.headers)
            or any(slot % ALIGNMENT for slot in info.slots)
            or min(info.headers) < PAGE
        ):
            raise TransferError(
                f"sender rank {owner} describes shared memory that doesn't fit the table: "
                "run one weightwire version on both sides"
            )

    def _planned(self) -> TensorTable:
        if self._table is None:
            raise TransferError("the memory receiver has no plan: set_plan() comes first")
        return self._table

    def _own(self) -> Segment:
        if self._segment is None:
            raise TransferError("the memory receiver has no plan: set_plan() comes first")
        return self._segment

    def _release_segment(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None


class _Announced(NamedTuple):
    """A slot whose header names the group that is waited for, in this generation."""

    slot: int
    generation: int
