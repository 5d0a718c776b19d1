"""The transfer pipeline: groups through staging, transport, verification and target.

Core drives it once for every backend.  Memory is bounded by one slot of the
largest group on each side; where a backend can take tensors where they lie, or
land them where they belong, there is no slot at all.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Mapping, Sequence, Set

import torch
from torch import Tensor

from weightwire.contract import Capabilities, ReceiverTransport, Seal, SenderTransport
from weightwire.copying import copy_all
from weightwire.cuts import Cuts
from weightwire.deadline import Watch
from weightwire.digest import Verify, box_digest, sample_digests, tensor_key
from weightwire.errors import TableMismatch, VerificationError
from weightwire.exchange import Exchange, ExchangePlan, Piece
from weightwire.layout import Place, SlotLayout, cut_out, lay_out, slot_layout
from weightwire.materialise import CheckpointTensors
from weightwire.parts import Fetched, PartDigests
from weightwire.report import Phases
from weightwire.table import Region, TensorTable
from weightwire.targets import WeightTarget

__all__ = ["FetchPlan", "SendPlan", "combine"]

_MASK = (1 << 64) - 1


class _Scratch:
    """One buffer that grows to what it must hold and is reused."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def take(
        self, nbytes: int, *, fresh: bool = False, device: torch.device | None = None
    ) -> Tensor:
        if fresh:
            return torch.empty(nbytes, dtype=torch.uint8)
        device = torch.device("cpu") if device is None else device
        if self._buffer.numel() < nbytes or self._buffer.device != device:
            self._buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return self._buffer

    def release(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)


class SendPlan:
    """What one trainer rank sends, group by group: made once per table.

    Args:
        exchange: how tensors that are cut over several ranks come together first.
    """

    def __init__(self, table: TensorTable, rank: int, exchange: ExchangePlan | None = None) -> None:
        self.table = table
        self._exchange = exchange
        self._groups: list[tuple[int, SlotLayout, tuple[Piece, ...]]] = []
        self._held = {
            i: shard
            for i, entry in enumerate(table.tensors)
            for shard in entry.shards
            if shard.owner == rank
        }
        for group in range(len(table.groups)):
            layout = slot_layout(table, group, rank)
            pieces = exchange.of_group(group) if exchange is not None else ()
            if layout.places or any(rank in (piece.holder, piece.owner) for piece in pieces):
                self._groups.append((group, layout, pieces))
        self._rank = rank
        self._keys = [tensor_key(entry.name) for entry in table.tensors]
        self.nbytes = sum(
            place.nbytes for _, layout, _ in self._groups for place in layout.places.values()
        )
        self._scratch = _Scratch()

    def send(
        self,
        tensors: CheckpointTensors,
        transport: SenderTransport,
        capabilities: Capabilities,
        exchange: Exchange,
        *,
        version: int,
        verify: Verify,
        watch: Watch,
        phases: Phases,
    ) -> int:
        """Move every group of this rank; returns the digest of what was sent.

        Args:
            tensors: this rank's tensors by name; of a shard's shape where it is one.
        """
        total = 0
        for group, layout, pieces in self._groups:
            watch.check(f"end of group {group}")
            with phases.timed("wait"):
                slot = transport.slot(group, layout.nbytes) if layout.places else None
            with phases.timed("stage"), torch.no_grad():
                assembled = {p.tensor for p in pieces} & layout.places.keys()
                staged = self._stage(layout, assembled, tensors, slot, transport, capabilities)
                if pieces:
                    whole = {i: staged[i] for i in assembled}
                    exchange.move(self.table, pieces, tensors, whole)
            if not layout.places:
                continue  # this rank only gave its shards to others
            with phases.timed("verify"):
                digests = self._digests(layout, staged, verify, version)
            with phases.timed("announce"):
                transport.put(group, staged, Seal(digests, self._rank))
            total = (total + sum(digests.values())) & _MASK
        with phases.timed("wait"):
            transport.finish()
        return total

    def _stage(
        self,
        layout: SlotLayout,
        assembled: Set[int],
        tensors: Mapping[str, Tensor],
        slot: Tensor | None,
        transport: SenderTransport,
        capabilities: Capabilities,
    ) -> dict[int, Tensor]:
        """Tensors in wire dtype, ready to be sent; for those to be assembled only the memory."""
        staged: dict[int, Tensor] = {}
        copies: list[tuple[int, Place]] = []
        lie_on: set[torch.device] = set()
        for i, place in layout.places.items():
            if i in assembled:
                copies.append((i, place))
                continue
            tensor = self._local(tensors, layout, i)
            as_it_lies = (
                slot is None
                and tensor.dtype == place.dtype
                and tensor.is_contiguous()
                and tensor.device.type in capabilities.devices
                # Lazily conjugated or negated views have other bits than values.
                and not (tensor.is_conj() or tensor.is_neg())
            )
            if as_it_lies:
                staged[i] = tensor
            else:
                copies.append((i, place))
                lie_on.add(tensor.device)
        if copies:
            if slot is None:
                transport.settle()  # it may still send from the buffer's last content
                kept, size = lay_out([(place.dtype, place.shape) for _, place in copies])
                # Casts happen where the tensors lie, if that is where they leave from.
                stays = len(lie_on) == 1 and all(d.type in capabilities.devices for d in lie_on)
                slot = self._scratch.take(size, device=next(iter(lie_on)) if stays else None)
                copies = [(i, place) for (i, _), place in zip(copies, kept, strict=True)]
            views = {i: place.view(slot) for i, place in copies}
            here = [i for i in views if i not in assembled]
            if here:
                values = [self._local(tensors, layout, i) for i in here]
                copy_all([views[i] for i in here], values)
            staged.update(views)
        return staged

    def _local(self, tensors: Mapping[str, Tensor], layout: SlotLayout, i: int) -> Tensor:
        """What this rank holds of a tensor, as far as it travels in the layout's group."""
        here = layout.shards[i]
        tensor = tensors[self.table.tensors[i].name]
        return cut_out(tensor, here.offsets, here.sizes, self._held[i].offsets)

    def _digests(
        self, layout: SlotLayout, staged: Mapping[int, Tensor], verify: Verify, version: int
    ) -> dict[int, int]:
        if verify == "off":
            return {}
        indices, boxes = list(staged), list(staged.values())
        shapes = [self.table.tensors[i].shape for i in indices]
        offsets = [layout.shards[i].offsets for i in indices]
        keys = [self._keys[i] for i in indices]
        return dict(
            zip(indices, _digest(boxes, keys, shapes, offsets, verify, version), strict=True)
        )

    def release(self) -> None:
        """Give the staging buffer back."""
        self._scratch.release()


class FetchPlan:
    """What one inference rank reads, group by group: made once per table.

    Args:
        regions: what the target has planned.
        pieces: whether the target takes pieces of its regions; then regions of tensors
            that are cut over several groups are cut likewise.
        overlap: let a group arrive while the one before it is verified and written.

    Attributes:
        regions: what is read, each in one group.
    """

    def __init__(
        self,
        table: TensorTable,
        regions: Sequence[Region],
        *,
        pieces: bool = False,
        overlap: bool = False,
    ) -> None:
        self.table = table
        _validate(table, regions)
        cuts = Cuts(table)
        cut = [
            piece
            for region in regions
            for piece in (cuts.cut(region) if pieces else [(cuts.group_of(region), region)])
        ]
        self.regions = tuple(region for _, region in cut)
        by_group: dict[int, dict[int, list[int]]] = {}
        for position, (group, region) in enumerate(cut):
            by_group.setdefault(group, {}).setdefault(region.tensor, []).append(position)
        self._whole = {
            (group, i)
            for group, by_tensor in by_group.items()
            for i, positions in by_tensor.items()
            if table.part(group, i).is_tiled_by(
                [(self.regions[p].offsets, self.regions[p].sizes) for p in positions]
            )
        }
        self._groups = [
            (group, [p for i in table.groups[group].tensors for p in by_group[group].get(i, ())])
            for group in sorted(by_group)
        ]
        self._parts = [(table.tensors[r.tensor].torch_dtype, r.sizes) for r in self.regions]
        self._keys = {r.tensor: tensor_key(table.tensors[r.tensor].name) for r in self.regions}
        self.nbytes = sum(math.prod(shape) * dtype.itemsize for dtype, shape in self._parts)
        self._overlap = overlap
        self._scratches = [_Scratch() for _ in range(2 if overlap else 1)]

    def fetch(
        self,
        transport: ReceiverTransport,
        target: WeightTarget,
        capabilities: Capabilities,
        *,
        version: int,
        verify: Verify,
        watch: Watch,
        phases: Phases,
    ) -> Fetched:
        """Bring, verify and write every group; returns the digests of what arrived.

        Raises:
            VerificationError: a tensor isn't what its owner sealed.
        """
        total = 0
        parts: list[PartDigests] = []
        posted: deque[tuple[int, dict[int, Tensor], frozenset[int]]] = deque()
        upcoming = iter(range(len(self._groups)))
        for _ in self._groups:
            for turn in itertools.islice(upcoming, len(self._scratches) - len(posted)):
                group = self._groups[turn][0]
                watch.check(f"end of group {group}")
                with phases.timed("wait"):
                    memory, reused = self._memory(turn, transport, target, capabilities)
                    transport.post(group, memory)
                posted.append((group, memory, reused))
            group, memory, reused = posted.popleft()
            keep = reused if target.keeps_buffers else frozenset()
            with phases.timed("fetch"):
                seals = transport.fetch(group, memory)
            with phases.timed("verify"):
                arrived = self._verify(group, memory, seals, verify, version, parts)
                total = (total + arrived) & _MASK
            with phases.timed("replay"):
                target.write(group, self._by_region(memory, keep))
        with phases.timed("commit"):
            transport.finish()
        return Fetched(total, tuple(parts))

    def _memory(
        self,
        turn: int,
        transport: ReceiverTransport,
        target: WeightTarget,
        capabilities: Capabilities,
    ) -> tuple[dict[int, Tensor], frozenset[int]]:
        """Where each region of this rank's ``turn``-th group arrives, and which in a slot."""
        group, positions = self._groups[turn]
        memory: dict[int, Tensor] = {}
        if capabilities.lands_in_place:
            for position in positions:
                landing = target.landing(self.regions[position])
                if landing is not None and landing.device.type in capabilities.devices:
                    memory[position] = landing
        rest = [position for position in positions if position not in memory]
        places, nbytes = lay_out([self._parts[position] for position in rest])
        if not rest:
            return memory, frozenset()
        slot = transport.slot(group, nbytes)
        reused = frozenset(rest) if slot is not None else frozenset()
        if slot is None:
            scratch = self._scratches[turn % len(self._scratches)]
            slot = scratch.take(nbytes, fresh=target.keeps_buffers)
        for position, place in zip(rest, places, strict=True):
            memory[position] = place.view(slot)
        return memory, reused

    def _by_region(
        self, memory: Mapping[int, Tensor], copied: frozenset[int]
    ) -> dict[Region, Tensor]:
        """Arrived tensors; those a target may keep are copied out of reused memory."""
        return {
            self.regions[position]: tensor.clone() if position in copied else tensor
            for position, tensor in memory.items()
        }

    def _verify(
        self,
        group: int,
        memory: Mapping[int, Tensor],
        seals: Sequence[Seal],
        verify: Verify,
        version: int,
        parts: list[PartDigests],
    ) -> int:
        """Compare what this rank holds wholly with its owners' digests, from its own memory.

        What it holds in part is appended to ``parts``, to be compared
        together with the parts of the replica's other ranks.
        """
        if verify == "off":
            return 0
        expected: dict[int, int] = {}
        for seal in seals:
            for i, value in seal.digests.items():
                expected[i] = (expected.get(i, 0) + value) & _MASK
        regions = [self.regions[position] for position in memory]
        arrivals = _digest(
            list(memory.values()),
            [self._keys[region.tensor] for region in regions],
            [self.table.tensors[region.tensor].shape for region in regions],
            [region.offsets for region in regions],
            verify,
            version,
        )
        found: dict[int, list[tuple[Region, int]]] = {}
        for region, arrived in zip(regions, arrivals, strict=True):
            found.setdefault(region.tensor, []).append((region, arrived))
        for i, boxes in found.items():
            entry = self.table.tensors[i]
            if entry.numel == 0:
                continue
            if (group, i) not in self._whole:
                digests = tuple((region.offsets, region.sizes, value) for region, value in boxes)
                sealed = {seal.owner: seal.digests[i] for seal in seals if i in seal.digests}
                parts.append(PartDigests(group, i, digests, sealed))
                continue
            if i not in expected:
                raise VerificationError(
                    f"tensor {entry.name!r} of version {version} came without a digest: "
                    "run one weightwire version on both sides"
                )
            arrived = sum(value for _, value in boxes) & _MASK
            if arrived != expected[i]:
                raise VerificationError(
                    f"tensor {entry.name!r} of version {version} isn't what was sent (digest "
                    f"{arrived:016x}, sealed {expected[i]:016x}): send it again"
                )
        return sum(arrivals) & _MASK

    def release(self) -> None:
        """Give the receive buffers back."""
        for scratch in self._scratches:
            scratch.release()


def _validate(table: TensorTable, regions: Sequence[Region]) -> None:
    """Refuse regions that don't lie in the table's tensors: a target made them."""
    if len(set(regions)) != len(regions):
        raise TableMismatch("the target plans one region twice: return each region once")
    for region in regions:
        inside = 0 <= region.tensor < len(table.tensors) and (
            len(region.offsets) == len(region.sizes) == len(table.tensors[region.tensor].shape)
        )
        if not inside or any(
            offset < 0 or size < 0 or offset + size > extent
            for offset, size, extent in zip(
                region.offsets, region.sizes, table.tensors[region.tensor].shape, strict=True
            )
        ):
            raise TableMismatch(
                f"the target plans {region}, which lies in no tensor of the table: "
                "plan from the table that it is given"
            )


def _digest(
    boxes: Sequence[Tensor],
    keys: Sequence[int],
    shapes: Sequence[tuple[int, ...]],
    offsets: Sequence[tuple[int, ...]],
    verify: Verify,
    version: int,
) -> list[int]:
    """Digests of boxes; those of whole tensors, when sampled, all at once."""
    digests = [0] * len(boxes)
    together: dict[torch.device, list[int]] = {}
    for i, box in enumerate(boxes):
        if verify == "sample" and tuple(box.shape) == shapes[i]:
            together.setdefault(box.device, []).append(i)
        else:
            digests[i] = box_digest(
                box,
                key=keys[i],
                shape=shapes[i],
                offsets=offsets[i],
                verify=verify,
                version=version,
            )
    for chosen in together.values():
        sampled = sample_digests([boxes[i] for i in chosen], [keys[i] for i in chosen], version)
        for i, digest in zip(chosen, sampled, strict=True):
            digests[i] = digest
    return digests


def combine(digest: int, verify: Verify) -> str:
    """A digest as reports show it."""
    return "" if verify == "off" else f"{digest:016x}"
