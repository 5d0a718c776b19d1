"""An inference rank's end of the transfer pipeline: groups through verification to the target.

Core drives it once for every backend.  Memory is bounded by one slot of the
largest group; where a backend can land bytes where they belong, there is no slot.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, NoReturn

from torch import Tensor

from weightwire.contract import Capabilities, ReceiverTransport, Seal
from weightwire.copying import leaving_bandwidth
from weightwire.cuts import Cuts
from weightwire.deadline import Watch
from weightwire.digest import Box, Digester, Verify, tensor_key
from weightwire.errors import TableMismatch, VerificationError
from weightwire.layout import Place, lay_out, places_in
from weightwire.parts import Fetched, PartDigests
from weightwire.phases import Phases
from weightwire.staging import Scratch
from weightwire.table import Region, TensorTable
from weightwire.targets import WeightTarget

__all__ = ["FetchPlan"]

_MASK = (1 << 64) - 1


class _Posted(NamedTuple):
    """A group that is on its way.

    Attributes:
        turn: of this rank's groups.
        memory: where each region arrives.
        reused: those of them that lie in a slot.
    """

    turn: int
    group: int
    memory: dict[int, Tensor]
    reused: frozenset[int]


class _Arrived(NamedTuple):
    """A group that is here, and not yet looked through.

    Attributes:
        seals: its owners'.
        digests: gives those of its regions.
    """

    posted: _Posted
    seals: Sequence[Seal]
    digests: Callable[[], list[int]]


class FetchPlan:
    """What one inference rank reads, group by group: made once per table.

    Args:
        regions: what the target has planned.
        pieces: whether the target takes pieces of its regions; then regions of tensors
            that are cut over several groups are cut likewise,
        blocks: and those of tensors that lie in blocks of columns by these.
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
        blocks: bool = False,
        overlap: bool = False,
    ) -> None:
        self.table = table
        _validate(table, regions)
        cuts = Cuts(table)
        cut = [
            (group, piece)
            for region in regions
            for group, part in (cuts.cut(region) if pieces else [(cuts.group_of(region), region)])
            for piece in (cuts.cut_blocks(part) if pieces and blocks else [part])
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
        self._digester = Digester([self._boxes(positions) for _, positions in self._groups])
        self.nbytes = sum(math.prod(shape) * dtype.itemsize for dtype, shape in self._parts)
        self._laid: dict[int, tuple[list[Place], int]] = {}  # groups that arrive in a slot whole
        self._scratches = [Scratch() for _ in range(2 if overlap else 1)]

    def _boxes(self, positions: Sequence[int]) -> list[Box]:
        found = []
        for position in positions:
            region, entry = (
                self.regions[position],
                self.table.tensors[self.regions[position].tensor],
            )
            key, width = tensor_key(entry.name), entry.torch_dtype.itemsize
            found.append(Box(key, entry.shape, region.offsets, region.sizes, width))
        return found

    def fetch(
        self,
        transport: ReceiverTransport,
        target: WeightTarget,
        capabilities: Capabilities,
        *,
        version: int,
        of: int,
        verify: Verify,
        watch: Watch,
        phases: Phases,
    ) -> Fetched:
        """Bring, verify and write every group; returns the digests of what arrived.

        Args:
            of: the version's ``stamp``.

        Raises:
            VerificationError: a tensor isn't what its owner sealed, or was sealed as of another
                version.
        """
        total = 0
        parts: list[PartDigests] = []
        posted: deque[_Posted] = deque()
        here: _Arrived | None = None
        prepared = False
        upcoming = iter(range(len(self._groups)))
        for _ in self._groups:
            free = len(self._scratches) - len(posted) - (here is not None)
            for ahead in itertools.islice(upcoming, free):
                group = self._groups[ahead][0]
                watch.check(f"end of group {group}")
                with phases.timed("wait"):
                    memory, reused = self._memory(ahead, transport, target, capabilities)
                    transport.post(group, memory)
                posted.append(_Posted(ahead, group, memory, reused))
            if not prepared and verify != "off":  # while the first group is on its way
                with phases.timed("verify"):
                    self._digester.prepare(posted[0].turn, verify, version)
                    target.prepare_fingerprint(version)
                prepared = True
            if here is None:
                here = self._arrive(posted.popleft(), transport, of, verify, version, phases)
            with phases.timed("verify"):
                arrived = self._verify(here, verify, version, parts)
                total = (total + arrived) & _MASK
            with phases.timed("replay"):
                _, group, memory, reused = here.posted
                keep = reused if target.keeps_buffers else frozenset()
                with leaving_bandwidth(bool(posted) and transport.slowed_by_copies):
                    target.write(group, self._by_region(memory, keep))
            here = None
            with phases.timed("fetch"):
                landed = bool(posted) and transport.landed(posted[0].group)
            if landed:
                # Its digests are queued right behind what was written, not after a wait for that:
                # where another process shares the GPU, each wait is for its turn.
                here = self._arrive(posted.popleft(), transport, of, verify, version, phases)
        with phases.timed("commit"):
            transport.finish()
        return Fetched(total, tuple(parts))

    def _arrive(
        self,
        posted: _Posted,
        transport: ReceiverTransport,
        of: int,
        verify: Verify,
        version: int,
        phases: Phases,
    ) -> _Arrived:
        """Wait for a group, and begin to look at what came."""
        with phases.timed("fetch"):
            seals = transport.fetch(posted.group, posted.memory)
        for seal in seals:
            if seal.of != of:
                raise VerificationError(
                    f"group {posted.group} of version {version} came with the seal of another "
                    f"version or session, from trainer rank {seal.owner}: send it again; if it "
                    "stays so, the backend mixes versions up"
                )
        with phases.timed("verify"):
            held = [posted.memory[position] for position in self._groups[posted.turn][1]]
            digests = self._digester.start(posted.turn, held, verify, version)
        return _Arrived(posted, seals, digests)

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
        if not rest:
            return memory, frozenset()
        places, nbytes = self._lay_out(turn, rest)
        slot = transport.slot(group, nbytes)
        reused = frozenset(rest) if slot is not None else frozenset()
        if slot is None:
            scratch = self._scratches[turn % len(self._scratches)]
            slot = scratch.take(nbytes, fresh=target.keeps_buffers)
        memory.update(zip(rest, places_in(slot, places), strict=True))
        return memory, reused

    def _lay_out(self, turn: int, positions: Sequence[int]) -> tuple[list[Place], int]:
        parts = [self._parts[position] for position in positions]
        if len(positions) < len(self._groups[turn][1]):
            return lay_out(parts)
        if turn not in self._laid:
            self._laid[turn] = lay_out(parts)
        return self._laid[turn]

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
        arrived: _Arrived,
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
        for seal in arrived.seals:
            for i, value in seal.digests.items():
                expected[i] = (expected.get(i, 0) + value) & _MASK
        group, positions = self._groups[arrived.posted.turn]
        arrivals = arrived.digests()
        regions = [self.regions[position] for position in positions]
        whole: dict[int, int] = {}
        found: dict[int, list[tuple[Region, int]]] = {}
        for region, value in zip(regions, arrivals, strict=True):
            i = region.tensor
            if (group, i) in self._whole:
                whole[i] = whole.get(i, 0) + value
            else:
                found.setdefault(i, []).append((region, value))
        for i, value in whole.items():
            if expected.get(i) != value & _MASK and self.table.tensors[i].numel:
                self._refuse(i, version, value & _MASK, expected.get(i))
        for i, boxes in found.items():
            if not self.table.tensors[i].numel:
                continue
            digests = tuple((region.offsets, region.sizes, value) for region, value in boxes)
            sealed = {seal.owner: seal.digests[i] for seal in arrived.seals if i in seal.digests}
            parts.append(PartDigests(group, i, digests, sealed))
        return sum(arrivals) & _MASK

    def _refuse(self, tensor: int, version: int, arrived: int, expected: int | None) -> NoReturn:
        name = self.table.tensors[tensor].name
        if expected is None:
            raise VerificationError(
                f"tensor {name!r} of version {version} came without a digest: "
                "run one weightwire version on both sides"
            )
        raise VerificationError(
            f"tensor {name!r} of version {version} isn't what was sent (digest "
            f"{arrived:016x}, sealed {expected:016x}): send it again"
        )

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
