"""A trainer rank's end of the transfer pipeline: groups through staging to the transport.

Core drives it once for every backend.  Memory is bounded by one slot of the largest
group; where a backend can take tensors where they lie, there is no slot at all.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace

import torch
from torch import Tensor

from weightwire.contract import Capabilities, Seal, SenderTransport
from weightwire.copying import leaving_bandwidth
from weightwire.deadline import Watch
from weightwire.digest import Box, Digester, Verify, tensor_key
from weightwire.errors import PluginError, TableMismatch
from weightwire.exchange import Exchange, ExchangePlan, Piece
from weightwire.layout import Place, SlotLayout, cut_out, lay_out, places_in, slot_layout
from weightwire.materialise import CheckpointTensors
from weightwire.phases import Phases
from weightwire.staging import Scratch, Stager
from weightwire.streaming import Stream
from weightwire.table import TensorEntry, TensorTable

__all__ = ["SendPlan"]

_MASK = (1 << 64) - 1


_CPU = torch.device("cpu")


class SendPlan:
    """What one trainer rank sends, group by group: made once per table.

    Args:
        exchange: how tensors that are cut over several ranks come together first.
        overlap: stage a group while the transport still sends the one before it.
    """

    def __init__(
        self,
        table: TensorTable,
        rank: int,
        exchange: ExchangePlan | None = None,
        *,
        overlap: bool = False,
    ) -> None:
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
            if not any(rank in (piece.holder, piece.owner) for piece in pieces):
                pieces = ()
            self._groups.append((group, layout, pieces))
        self._rank = rank
        self._digester: Digester | None = None
        self._owners: list[list[int]] = []
        self._cut: list[set[int]] = []
        self.nbytes = sum(
            place.nbytes for _, layout, _ in self._groups for place in layout.places.values()
        )
        self._index = table.index()
        self._scratches = [Scratch() for _ in range(2 if overlap else 1)]
        self._staged = 0  # groups, in memory of our own
        self._stager = Stager()

    def prepare(self, version: int, verify: Verify) -> None:
        """Before ``send``: what of the first group's digests doesn't depend on its bytes."""
        if self._digester is not None and self._groups:
            self._digester.prepare(0, verify, version)

    def send(
        self,
        tensors: CheckpointTensors | Stream,
        transport: SenderTransport,
        capabilities: Capabilities,
        exchange: Exchange,
        *,
        version: int,
        of: int,
        verify: Verify,
        watch: Watch,
        phases: Phases,
    ) -> int:
        """Move every group of this rank; returns the digest of what was sent.

        Args:
            of: the version's ``stamp``.
            tensors: this rank's tensors by name, of a shard's shape where it is one; or
                a stream that yields full ones.
        """
        total = 0
        is_under_way = False  # a group, while the next one is staged
        for turn, (group, layout, pieces) in enumerate(self._groups):
            watch.check(f"end of group {group}")
            if not layout.places and not pieces:
                if isinstance(tensors, Stream):
                    with phases.timed("stage"):
                        self._step_through(group, tensors)
                continue
            with phases.timed("wait"):
                slot = transport.slot(group, layout.nbytes) if layout.places else None
            staged_before = self._staged
            try:
                sparing = leaving_bandwidth(is_under_way and transport.slowed_by_copies)
                with phases.timed("stage"), torch.no_grad(), sparing:
                    staged = self._stage_group(
                        group, layout, pieces, tensors, slot, transport, capabilities, exchange
                    )
                if not layout.places:
                    continue  # this rank only gave its shards to others
                with phases.timed("verify"):
                    look = self._look(turn, layout, staged, verify, version)
            except BaseException:
                self._stager.wait()  # what is queued reads tensors that may change from here on
                raise
            with phases.timed("stage"):
                self._stager.wait()  # the digests are queued behind the copies
            with phases.timed("verify"):
                digests = look()
            is_staged = self._staged > staged_before and len(self._scratches) > 1
            is_made = slot is None and self._makes(tensors, layout)
            if (is_staged or is_made) and not transport.put_frees_earlier:
                with phases.timed("wait"):
                    # The next group may take the memory of the one before; and of what is made
                    # for it, transports that queue would hold as much as they like.
                    transport.settle()
            with phases.timed("announce"):
                transport.put(group, staged, Seal(digests, self._rank, of))
            is_under_way = len(self._scratches) > 1
            total = (total + sum(digests.values())) & _MASK
        if isinstance(tensors, Stream):
            with phases.timed("stage"):
                tensors.finish()
        with phases.timed("wait"):
            transport.finish()
        return total

    def _makes(self, tensors: CheckpointTensors | Stream, layout: SlotLayout) -> bool:
        """Whether some of a group's tensors were made for it alone."""
        return isinstance(tensors, CheckpointTensors) and any(
            tensors.makes(self.table.tensors[i].name) for i in layout.places
        )

    def _stage_group(
        self,
        group: int,
        layout: SlotLayout,
        pieces: Sequence[Piece],
        tensors: CheckpointTensors | Stream,
        slot: Tensor | None,
        transport: SenderTransport,
        capabilities: Capabilities,
        exchange: Exchange,
    ) -> dict[int, Tensor]:
        """A group's tensors where they are sent from; copies between GPUs may only be queued."""
        if isinstance(tensors, Stream):
            on_device = tensors.device.type in capabilities.devices
            device = tensors.device if on_device else _CPU
            if slot is None and layout.places:
                self._next_scratch(transport)
            places, memory = self._memory(layout, list(layout.places), slot, device)
            return self._stage_stream(group, layout, tensors, places, memory)
        assembled = {p.tensor for p in pieces} & layout.places.keys()
        staged = self._stage(layout, assembled, tensors, slot, transport, capabilities)
        if pieces:
            whole = {i: staged[i] for i in assembled}
            exchange.move(self.table, pieces, tensors, whole)
        return staged

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
        copies: dict[torch.device, dict[int, Tensor | None]] = {}
        for i, place in layout.places.items():
            if i in assembled:
                copies.setdefault(_CPU, {})[i] = None
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
                continue
            near = tensor.device if tensor.device.type in capabilities.devices else _CPU
            copies.setdefault(near, {})[i] = tensor
        if copies and slot is None:
            self._next_scratch(transport)
        destinations: list[Tensor] = []
        sources: list[Tensor] = []
        for device, values in copies.items():
            places, memory = self._memory(layout, list(values), slot, device)
            plain = [i for i in values if not places[i].borders]
            views = places_in(memory, [places[i] for i in plain])
            in_rows = dict(zip(plain, views, strict=True))
            for i, value in values.items():
                place = places[i]
                staged[i] = in_rows[i] if i in in_rows else place.flat(memory)
                if value is None:
                    continue
                for to, source in (
                    _tiles(place, memory, value) if place.borders else [(staged[i], value)]
                ):
                    destinations.append(to)
                    sources.append(source)
        if destinations:
            self._stager.copy(destinations, sources, wait=False)
        return staged

    def _stage_stream(
        self,
        group: int,
        layout: SlotLayout,
        stream: Stream,
        places: Mapping[int, Place],
        memory: Tensor,
    ) -> dict[int, Tensor]:
        """Copy a group's tensors to where they are sent from, as they come."""
        missing = set(places)
        for name, tensor in stream.take(group, self._names(group)):
            i = self._index[name]
            if i in missing:
                missing.discard(i)
                pairs = _tiles(places[i], memory, self._local({name: tensor}, layout, i))
                self._stager.copy([to for to, _ in pairs], [source for _, source in pairs])
        if missing:
            raise TableMismatch(
                f"tensor {self.table.tensors[min(missing)].name!r} wasn't kept for its group: "
                "send again"
            )
        return {i: _as_staged(place, memory) for i, place in places.items()}

    def _next_scratch(self, transport: SenderTransport) -> None:
        """Stage into the buffer that nothing is sent from, or into the only one once it is free."""
        self._staged += 1
        if len(self._scratches) == 1:
            transport.settle()

    def _step_through(self, group: int, stream: Stream) -> None:
        """Take part in a group of which this rank serves nothing."""
        for _ in stream.take(group, self._names(group)):
            pass

    def _names(self, group: int) -> list[str]:
        return [self.table.tensors[i].name for i in self.table.groups[group].tensors]

    def _memory(
        self,
        layout: SlotLayout,
        indices: Sequence[int],
        slot: Tensor | None,
        device: torch.device,
    ) -> tuple[dict[int, Place], Tensor]:
        """Where tensors are staged: in the slot, or one after another in memory of our own."""
        places = [layout.places[i] for i in indices]
        if slot is not None:
            return dict(zip(indices, places, strict=True)), slot
        if any(place.borders for place in places):
            raise PluginError(
                "a transport with column_blocks gave no slot: it must, for such tensors"
            )
        kept, size = lay_out([(place.dtype, place.shape) for place in places])
        return dict(zip(indices, kept, strict=True)), self._scratches[
            self._staged % len(self._scratches)
        ].take(size, device)

    def _local(self, tensors: Mapping[str, Tensor], layout: SlotLayout, i: int) -> Tensor:
        """What this rank holds of a tensor, as far as it travels in the layout's group."""
        here = layout.shards[i]
        tensor = tensors[self.table.tensors[i].name]
        part = cut_out(tensor, here.offsets, here.sizes, self._held[i].offsets)
        # Without elements it may be cut otherwise: an empty tensor's owner has all of it.
        return part if part.numel() else part.new_empty(here.sizes)

    def _look(
        self,
        turn: int,
        layout: SlotLayout,
        staged: Mapping[int, Tensor],
        verify: Verify,
        version: int,
    ) -> Callable[[], dict[int, int]]:
        """Begin to take a group's digests; returns what gives them, by tensor."""
        if verify == "off":
            return dict
        if self._digester is None:
            # What is sampled is read by address, in whatever order it lies there.
            one = verify == "sample"
            held = [self._boxes(layout, one=one) for _, layout, _ in self._groups]
            self._digester = Digester([[box for _, box in boxes] for boxes in held])
            self._owners = [[i for i, _ in boxes] for boxes in held]
            counts = [Counter(owners) for owners in self._owners]
            self._cut = [{i for i, n in count.items() if n > 1} for count in counts]
        owners = self._owners[turn]
        boxes: list[Tensor] = []
        for i, place in layout.places.items():
            if i in self._cut[turn]:  # only this place of the slot
                tiles = replace(place, begin=0).tile_views(staged[i].view(torch.uint8))
                boxes += [tile for _, tile in tiles]
            else:
                boxes.append(staged[i])
        looked = self._digester.start(turn, boxes, verify, version)

        def found() -> dict[int, int]:
            digests = dict.fromkeys(layout.places, 0)
            for i, value in zip(owners, looked(), strict=True):
                digests[i] = (digests[i] + value) & _MASK
            return digests

        return found

    def _boxes(self, layout: SlotLayout, *, one: bool) -> list[tuple[int, Box]]:
        """A group's boxes, each with its tensor."""
        return [
            (i, box)
            for i, place in layout.places.items()
            for box in _boxes_of(place, layout.shards[i].offsets, self.table.tensors[i], one=one)
        ]

    def release(self) -> None:
        """Give the staging memory back."""
        for scratch in self._scratches:
            scratch.release()
        self._stager.release()


def _as_staged(place: Place, memory: Tensor) -> Tensor:
    """A tensor as ``put`` is given it."""
    return place.flat(memory) if place.borders else place.view(memory)


def _tiles(place: Place, memory: Tensor, value: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Where a tensor goes in staging memory, block by block, and what goes there."""
    if not place.borders:
        return [(place.view(memory), value)]
    folded = place.folded
    if folded is not None:  # all blocks by one copy
        blocks = value.unflatten(-1, folded[-2:]).movedim(-2, 0)  # type: ignore[no-untyped-call]
        return [(place.flat(memory).view(blocks.shape), blocks)]
    return [
        (tile, value.narrow(-1, column, tile.shape[-1]))
        for column, tile in place.tile_views(memory)
    ]


def _boxes_of(
    place: Place, offsets: tuple[int, ...], entry: TensorEntry, *, one: bool
) -> Iterator[Box]:
    """What is digested of a place: its blocks of columns, or all of it as ``one`` box."""
    key, width = tensor_key(entry.name), place.dtype.itemsize
    folded = place.folded
    if one and folded is not None and entry.shape[-1] == place.shape[-1]:
        *rows, blocks, columns = folded
        steps = [columns * math.prod(rows[dim + 1 :]) for dim in range(len(rows))]
        strides = (*steps, columns * math.prod(rows), 1)
        shape = (*entry.shape[:-1], blocks, columns)
        yield Box(key, shape, (*offsets[:-1], 0, 0), folded, width, strides)
        return
    for tile in place.tiles():
        at = (*offsets[:-1], offsets[-1] + tile.column) if offsets else ()
        yield Box(key, entry.shape, at, tile.shape, width)
