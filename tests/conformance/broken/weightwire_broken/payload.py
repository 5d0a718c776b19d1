"""What arrives isn't what was sent."""

from __future__ import annotations

import math
import threading
import time

import torch

from weightwire.contract import Seal
from weightwire.digest import box_digest, tensor_key
from weightwire.layout import slot_layout
from weightwire.memory.config import MemoryConfig
from weightwire.memory.receiver import MemoryReceiver
from weightwire.memory.sender import MemorySender
from weightwire_broken import BrokenFilesystem, BrokenMemory, broken
from weightwire_filesystem import manifest
from weightwire_filesystem.receiver import FilesystemReceiver


def raw(tensor):
    return tensor.reshape(-1).view(torch.uint8)


def last_with_bytes(regions):
    return max(i for i, region in enumerate(regions) if 0 not in region.sizes)


@broken
class DropsATensor(BrokenMemory):
    """The last tensor never arrives."""

    class receiver_class(MemoryReceiver):  # noqa: N801
        def fetch(self, group, regions):
            lost = last_with_bytes(self._regions)
            return super().fetch(group, {i: t for i, t in regions.items() if i != lost})


@broken
class DropsFromFiles(BrokenFilesystem):
    """The last tensor is never read."""

    class receiver_class(FilesystemReceiver):  # noqa: N801
        def fetch(self, group, regions):
            lost = last_with_bytes(self._regions)
            scratch = {i: t.clone() if i == lost else t for i, t in regions.items()}
            return super().fetch(group, scratch)


@broken
class SwapsTwo(BrokenMemory):
    """Two tensors of one shape change places."""

    class receiver_class(MemoryReceiver):  # noqa: N801
        def fetch(self, group, regions):
            seals = super().fetch(group, regions)
            seen = {}
            for tensor in regions.values():
                other = seen.setdefault((tensor.shape, tensor.dtype), tensor)
                if other is not tensor and tensor.numel():
                    kept = raw(other).clone()
                    raw(other).copy_(raw(tensor))
                    raw(tensor).copy_(kept)
                    break
            return seals


@broken
class SwapsWithAGroupAhead(BrokenMemory):
    """Once the next group is posted, two tensors of one shape change places."""

    class receiver_class(SwapsTwo.receiver_class):  # noqa: N801
        ahead = 0

        def post(self, group, regions):
            self.ahead = group

        def fetch(self, group, regions):
            if group < self.ahead:
                return super().fetch(group, regions)
            return MemoryReceiver.fetch(self, group, regions)


@broken
class ServesStale(BrokenMemory):
    """Every version is the first one, seals included."""

    class receiver_class(MemoryReceiver):  # noqa: N801
        after = 1

        def set_plan(self, table, regions):
            super().set_plan(table, regions)
            self.kept = {}
            self.versions = 0

        def begin(self, offer):
            super().begin(offer)
            self.versions += 1

        def fetch(self, group, regions):
            seals = super().fetch(group, regions)
            if self.versions <= self.after:
                self.kept[group] = ({i: t.clone() for i, t in regions.items()}, seals)
                return seals
            old, seals = self.kept[group]
            for i, tensor in regions.items():
                if tensor.numel():
                    raw(tensor).copy_(raw(old[i]))
            return seals


@broken
class CountsToEight(BrokenMemory):
    """A counter that is too narrow: from the ninth version on, the eighth is served."""

    class receiver_class(ServesStale.receiver_class):  # noqa: N801
        after = 8


@broken
class OneBehind(BrokenFilesystem):
    """The oldest version that is still there is read."""

    class receiver_class(FilesystemReceiver):  # noqa: N801
        def begin(self, offer):
            import os

            import msgspec

            there = [manifest.version_policy(name) for name in os.listdir(self._root)]
            oldest = min([p for p in there if p is not None], default=offer.policy)
            super().begin(msgspec.structs.replace(offer, policy=min(oldest, offer.policy)))


@broken
class LaundersFloats(BrokenMemory):
    """Floats go through arithmetic: -0.0 comes out as 0.0."""

    class receiver_class(MemoryReceiver):  # noqa: N801
        def fetch(self, group, regions):
            seals = super().fetch(group, regions)
            for tensor in regions.values():
                if tensor.is_floating_point() and tensor.itemsize > 1:
                    tensor.add_(0.0)
            return seals


@broken
class ThinsFloats(BrokenMemory):
    """float32 travels as bfloat16, whatever was asked for."""

    class receiver_class(MemoryReceiver):  # noqa: N801
        def fetch(self, group, regions):
            seals = super().fetch(group, regions)
            for tensor in regions.values():
                if tensor.dtype == torch.float32:
                    tensor.copy_(tensor.bfloat16())
            return seals


@broken
class ThinsHalves(BrokenMemory):
    """float16 goes through bfloat16."""

    class receiver_class(MemoryReceiver):  # noqa: N801
        def fetch(self, group, regions):
            seals = super().fetch(group, regions)
            for tensor in regions.values():
                if tensor.dtype == torch.float16:
                    tensor.copy_(tensor.bfloat16())
            return seals


@broken
class ForgesSeals(BrokenMemory):
    """Seals are made on arrival, from whatever arrived."""

    class receiver_class(MemoryReceiver):  # noqa: N801
        def change(self, tensor):
            pass

        def fetch(self, group, regions):
            (of,) = {seal.of for seal in super().fetch(group, regions)}
            digests = {}
            for i, tensor in regions.items():
                self.change(tensor)
                region = self._regions[i]
                entry = self._table.tensors[region.tensor]
                digests[region.tensor] = digests.get(region.tensor, 0) + box_digest(
                    tensor,
                    key=tensor_key(entry.name),
                    shape=entry.shape,
                    offsets=region.offsets,
                    verify="full",
                    version=self._policy.version,
                )
            return [Seal({i: digest & ((1 << 64) - 1) for i, digest in digests.items()}, of=of)]


@broken
class LiesThroughout(ForgesSeals):
    """One bit of every tensor is wrong, and sealed as it is."""

    class receiver_class(ForgesSeals.receiver_class):  # noqa: N801
        def change(self, tensor):
            if tensor.numel() and tensor.dtype != torch.bool:
                raw(tensor)[0] ^= 1


@broken
class SpoilsSeals(BrokenMemory):
    """Good bytes come with a wrong digest."""

    class receiver_class(MemoryReceiver):  # noqa: N801
        def fetch(self, group, regions):
            return [
                Seal({i: digest ^ 1 for i, digest in seal.digests.items()}, seal.owner, seal.of)
                for seal in super().fetch(group, regions)
            ]


@broken
class WrapsAtTwoGibibytes(BrokenMemory):
    """Offsets within a tensor have 32 bits, one of them a sign."""

    class receiver_class(MemoryReceiver):  # noqa: N801
        def fetch(self, group, regions):
            def begin(i):
                region = self._regions[i]
                entry = self._table.tensors[region.tensor]
                row = math.prod(entry.shape[1:]) * entry.torch_dtype.itemsize
                return region.offsets[0] * row if region.offsets else 0

            return super().fetch(group, {i: t for i, t in regions.items() if begin(i) < 1 << 31})


@broken
class CountsInAByte(BrokenMemory):
    """The 257th tensor is taken for the first, which has arrived already."""

    class receiver_class(MemoryReceiver):  # noqa: N801
        def fetch(self, group, regions):
            known = {i: t for i, t in regions.items() if self._regions[i].tensor < 256}
            return super().fetch(group, known)


@broken
class Truncates(BrokenMemory):
    """Of each tensor only the first mebibyte arrives."""

    class receiver_class(MemoryReceiver):  # noqa: N801
        def fetch(self, group, regions):
            seals = super().fetch(group, regions)
            for i, tensor in regions.items():
                if tensor.dim() and tensor.numel():
                    begin = self._regions[i].offsets[0] * tensor[0].nbytes
                    raw(tensor)[max(0, (1 << 20) - begin) :] = 0
            return seals


@broken
class MutatesAfterCommit(BrokenMemory):
    """Writes once more when nobody expects it."""

    class receiver_class(MemoryReceiver):  # noqa: N801
        def fetch(self, group, regions):
            self.last = regions
            return super().fetch(group, regions)

        def finish(self):
            victim = next(t for t in self.last.values() if t.numel())
            threading.Timer(0.15, lambda: raw(victim).bitwise_not_()).start()
            super().finish()


@broken
class WritesLate(BrokenMemory):
    """What arrived of a version that is given up is written again, a little later."""

    class receiver_class(MemoryReceiver):  # noqa: N801
        last = ()

        def fetch(self, group, regions):
            seals = super().fetch(group, regions)
            self.last = [(raw(t), raw(t).clone()) for t in regions.values() if t.numel()]
            return seals

        def abort(self, error):
            def write(last=self.last):
                for _ in range(10):  # whenever the next version has come
                    time.sleep(0.1)
                    for memory, arrived in last:
                        memory.copy_(arrived)

            threading.Thread(target=write).start()
            super().abort(error)


@broken
class LosesScalars(BrokenMemory):
    """Tensors without dimensions are left out."""

    class receiver_class(MemoryReceiver):  # noqa: N801
        def fetch(self, group, regions):
            return super().fetch(group, {i: t for i, t in regions.items() if t.dim()})


@broken
class ChokesOnEmpty(BrokenMemory):
    """An empty tensor is an error of its own kind."""

    class receiver_class(MemoryReceiver):  # noqa: N801
        def fetch(self, group, regions):
            for tensor in regions.values():
                raw(tensor)[0]
            return super().fetch(group, regions)


@broken
class WidensIntegers(BrokenMemory):
    """Small integers come back without their sign."""

    class receiver_class(MemoryReceiver):  # noqa: N801
        def fetch(self, group, regions):
            seals = super().fetch(group, regions)
            for tensor in regions.values():
                if tensor.dtype in (torch.int16, torch.int32, torch.int64):
                    tensor.abs_()
            return seals


@broken
class MistakesNames(BrokenMemory):
    """Names that aren't ASCII can't be sent."""

    class receiver_class(MemoryReceiver):  # noqa: N801
        def set_plan(self, table, regions):
            for entry in table.tensors:
                entry.name.encode("ascii")
            super().set_plan(table, regions)


@broken
class ReadsOneOwner(BrokenMemory):
    """What other trainer ranks serve is never read."""

    class receiver_class(MemoryReceiver):  # noqa: N801
        def fetch(self, group, regions):
            mine = {
                i: t
                for i, t in regions.items()
                if self._table.tensors[self._regions[i].tensor].shards[0].owner == 0
            }
            return super().fetch(group, mine)


@broken
class FillsOneRank(BrokenMemory):
    """Of a replica, only the first rank gets anything."""

    class receiver_class(MemoryReceiver):  # noqa: N801
        def fetch(self, group, regions):
            if self._context.rank:
                regions = {i: t.clone() for i, t in regions.items()}
            return super().fetch(group, regions)


@broken
class MistakesShards(BrokenMemory):
    """Of a tensor that lies on several ranks, the last element never arrives."""

    class receiver_class(MemoryReceiver):  # noqa: N801
        def fetch(self, group, regions):
            seals = super().fetch(group, regions)
            for i, tensor in regions.items():
                if len(self._table.tensors[self._regions[i].tensor].shards) > 1 and tensor.numel():
                    raw(tensor)[-1] ^= 255
            return seals


@broken
class TakesOneExpert(BrokenMemory):
    """Each of a tensor's experts is its first."""

    class receiver_class(MemoryReceiver):  # noqa: N801
        def fetch(self, group, regions):
            seals = super().fetch(group, regions)
            for tensor in regions.values():
                if tensor.dim() == 3 and tensor.numel():
                    experts = raw(tensor).view(len(tensor), -1)
                    experts[1:] = experts[:1].clone()
            return seals


class ZeroCopyConfig(MemoryConfig):
    zero_copy: bool = False


@broken
class KeepsItsPointers(BrokenMemory):
    """With zero_copy, tensors are read for ever where they were at first."""

    config = ZeroCopyConfig

    class sender_class(MemorySender):  # noqa: N801
        def __init__(self, context):
            super().__init__(context)
            self._first = {}

        def set_table(self, table):
            super().set_table(table)
            self._planned = table

        def slot(self, group, nbytes):
            self._memory = super().slot(group, nbytes)
            return None if self._context.config.zero_copy else self._memory

        def put(self, group, tensors, seal):
            if self._context.config.zero_copy:
                for i, tensor in tensors.items():
                    self._first.setdefault(i, tensor)
                layout = slot_layout(self._planned, group, self._context.rank)
                staged = {i: place.view(self._memory) for i, place in layout.places.items()}
                for i, memory in staged.items():
                    memory.copy_(self._first[i])
                tensors = staged
            super().put(group, tensors, seal)


class AlwaysZeroCopyConfig(ZeroCopyConfig):
    zero_copy: bool = True


@broken
class ReadsWhereItReadFirst(KeepsItsPointers):
    """Tensors that got new memory are read in their old."""

    config = AlwaysZeroCopyConfig


@broken
class KeepsWhatItPosted(BrokenMemory):
    """A group that was posted and not fetched is handed out with the next version."""

    class receiver_class(MemoryReceiver):  # noqa: N801
        def __init__(self, context):
            super().__init__(context)
            self._ahead = {}

        def post(self, group, regions):
            if group not in self._ahead:
                scratch = {i: tensor.clone() for i, tensor in regions.items()}
                self._ahead[group] = (super().fetch(group, scratch), scratch)

        def fetch(self, group, regions):
            seals, scratch = self._ahead.pop(group)
            for i, tensor in regions.items():
                if tensor.numel():
                    raw(tensor).copy_(raw(scratch[i]))
            return seals
