"""Where received weights go: the target protocol, and mappings and modules as targets."""

from __future__ import annotations

import fnmatch
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from weightwire.blocks import ANY
from weightwire.copying import copy_all
from weightwire.dense import require_dense, require_distinct
from weightwire.devices import device_of
from weightwire.errors import ConfigError, TableMismatch, UnsupportedOperation
from weightwire.fingerprint import Fingerprint
from weightwire.fingerprinting import Fingerprinter
from weightwire.layout import cut_out
from weightwire.names import checkpoint_names
from weightwire.overlap import overlapping_pairs
from weightwire.table import CheckpointTensor, Region, TensorTable, dtype_name
from weightwire.trace.copies import copy_program
from weightwire.trace.program import Program, Run

__all__ = ["MappingTarget", "ModuleTarget", "WeightTarget", "as_target"]


class WeightTarget(ABC):
    """The weights of one inference rank, as the receiver's pipeline sees them.

    Who calls what, all on the thread that called ``receive`` (or ``begin``,
    ``fetch``, ``commit``), on every rank of the replica:

    1. ``plan(table)``: once per tensor table.  Nothing has moved yet.
    2. ``begin(version)``: once per attempt, before the first group.  The engine
       no longer generates.
    3. ``landing(region)``: once per region and attempt, just before its group.
    4. ``write(group, tensors)``: once per group that has regions, in the order
       of the table's groups, after the group has been verified.
    5. ``commit()``: once per attempt, after the last group.  When it returns
       the version is wholly in place.
    6. ``rollback(error)``: instead of what is left of 4 and 5 when anything
       fails after ``begin``.

    A target may raise any error; the receiver reports it to the sender, calls
    ``rollback`` and raises it.
    """

    @abstractmethod
    def plan(self, table: TensorTable) -> Sequence[Region]:
        """The regions of the table's tensors that this rank reads.

        Each lies in one transfer group: what a tensor that is cut over several
        has in each of them, ``Cuts(table).cut(region)`` says.  Not needed with
        ``takes_pieces``.

        Raises:
            TableMismatch: names, shapes or dtypes differ; the message lists
                them.  Every tensor of the table is read or deliberately unused.
        """

    def begin(self, version: int) -> None:
        """Prepare for a version's bytes.  Later failures call ``rollback``."""

    def landing(self, region: Region) -> Tensor | None:
        """The tensor in which the region's bytes may land as they arrive.

        Contiguous, of the region's shape and wire dtype.  ``None`` means that
        the receiver should provide memory and hand the bytes to ``write``:
        then nothing of the target changes before the group is verified.
        """
        return None

    @property
    def takes_pieces(self) -> bool:
        """If True, ``landing`` and ``write`` may be given any box of a planned region.

        Core then cuts regions that lie in several transfer groups, so that a
        group never holds more than its budget.
        """
        return False

    @property
    def device(self) -> torch.device:
        """Where transports should let this rank's regions arrive, unless told otherwise."""
        return torch.device("cpu")

    @property
    def column_slices(self) -> int:
        """In how many equal slices of columns this replica's ranks read matrices.

        The tensor parallel size, or 1 where every rank reads whole rows; 0 where it isn't
        known.  Equal on all ranks, and read when the receiver is opened.  Trainers may lay
        matrices out for it; what is read is the same whatever it says.
        """
        return ANY

    @property
    def keeps_buffers(self) -> bool:
        """If True, tensors handed to ``write`` may be read after it returns.

        The receiver then gives each group fresh memory and drops its own
        reference, instead of reusing one slot.
        """
        return False

    def release_buffers(self) -> None:
        """Give back what is kept for the next version, which ``plan`` precedes; not the weights."""

    @abstractmethod
    def write(self, group: int, tensors: Mapping[Region, Tensor]) -> None:
        """Install one group.

        Args:
            group: index into the table's groups.
            tensors: by region, contiguous, of the region's shape and wire dtype.
                Those that landed in place are the very tensors that
                ``landing`` returned.
        """

    def commit(self) -> None:
        """Finish the version: post-load processing, derived tensors."""

    def prepare_fingerprint(self, version: int) -> None:
        """Do what of ``fingerprint`` doesn't depend on the version's bytes.

        May be called after ``begin``, while the first group is on its way; ``fingerprint`` must
        be right without.
        """

    def fingerprint(self, version: int) -> Fingerprint | None:
        """What the target's memory holds now, to be compared with replicas laid out alike.

        Called after ``commit``.  None: there is nothing to compare.
        """
        return None

    @property
    def path(self) -> str:
        """How regions become weights and why so, for reports; empty when they simply land."""
        return ""

    def rollback(self, error: BaseException) -> bool:
        """Undo as far as possible after a failure.

        Returns:
            True when the target holds exactly what it held before ``begin``;
            False when it is (or may be) mixed: the replica is then tainted.
        """
        return False


class MappingTarget(WeightTarget):
    """Tensors that are filled in place, by name.

    The names are the trainer's own, or those of its checkpoints: then what the table
    says of checkpoint tensors is replayed.

    Args:
        mapping: names to tensors; they keep their storage.  Several names may
            share one tensor (ties).
        unused: shell patterns of sent names that this target deliberately ignores.
        untouched: shell patterns of own names that the trainer doesn't send.
    """

    def __init__(
        self,
        mapping: Mapping[str, Tensor],
        *,
        unused: Iterable[str] = (),
        untouched: Iterable[str] = (),
    ) -> None:
        self._mapping = mapping
        self._unused = (unused,) if isinstance(unused, str) else tuple(unused)
        self._untouched = (untouched,) if isinstance(untouched, str) else tuple(untouched)
        self._table: TensorTable | None = None
        self._destinations: dict[int, list[Tensor]] = {}
        self._boxes: dict[Region, list[Tensor]] = {}
        self._landed: dict[int, Tensor] = {}
        self._places: list[tuple[object, ...]] = []
        self._program: Program | None = None
        self._run: Run | None = None
        self._written = False
        self._fingerprinter = Fingerprinter()

    def current(self) -> Mapping[str, Tensor]:
        """The tensors to fill, as they are now."""
        return self._mapping

    @property
    def device(self) -> torch.device:
        return device_of(self.current().values())

    @property
    def column_slices(self) -> int:
        return 1

    def plan(self, table: TensorTable) -> Sequence[Region]:
        current = self.current()
        own = {name: _require_plain(name, tensor) for name, tensor in current.items()}
        carriers = {**{name: name for name in table.index()}, **table.ties}
        self._program = self._run = None
        made: dict[str, Tensor] = {}  # what is replayed, where names are of checkpoint tensors
        offered = {name: entry for name, entry in _offered(table).items() if name in own}
        if any(name not in carriers for name in offered):
            known = {tensor.name for tensor in table.checkpoint()}
            made = {name: own[name] for name in offered}
            carriers = {name: carriers.get(name, name) for name in known}
        self._check_names(own, carriers)
        self._check_tensors(own, carriers, table, made)
        self._check_aliases(own, carriers)
        if made:
            self._program = copy_program(made, table)
        index = table.index()
        destinations: dict[int, list[Tensor]] = {}
        for name, tensor in own.items():
            carrier = carriers.get(name)
            if carrier is None or name in made:
                continue
            places = destinations.setdefault(index[carrier], [])
            if not any(_same_memory(tensor, place) for place in places):
                places.append(tensor)
        self._table, self._destinations, self._boxes = table, destinations, {}
        self._places = _places(current)
        regions = [Region.whole(i, table.tensors[i]) for i in sorted(destinations)]
        return [*regions, *(self._program.regions if self._program is not None else ())]

    def begin(self, version: int) -> None:
        self._written = False
        self._landed.clear()
        if self._table is None:
            return
        if self._places != _places(self.current()):
            self._plan_again(self._table)
        if self._program is not None:
            held = {name: tensor.detach() for name, tensor in self.current().items()}
            self._run = Run(self._program, held.__getitem__)

    def _plan_again(self, table: TensorTable) -> None:
        planned = list(self._destinations)
        self.plan(table)  # parameters were rebound since the last version
        if sorted(planned) != sorted(self._destinations):
            changed = sorted(set(planned) ^ set(self._destinations))
            raise TableMismatch(
                f"tensor {table.tensors[changed[0]].name!r} came to the target, or left it, "
                "since it was planned: receive again, and it is planned anew"
            )

    @property
    def takes_pieces(self) -> bool:
        return self._program is None  # a replay plans its own

    def landing(self, region: Region) -> Tensor | None:
        boxes = self._boxes_of(region)
        if not boxes or not boxes[0].is_contiguous():
            return None
        self._written = True
        if len(boxes) == 1:
            self._landed[id(boxes[0])] = boxes[0]
        return boxes[0]

    def write(self, group: int, tensors: Mapping[Region, Tensor]) -> None:
        into, of = [], []
        with torch.no_grad():
            for region, value in tensors.items():
                if self._landed.pop(id(value), None) is value:
                    continue  # it is where it belongs, and belongs nowhere else
                for place in self._boxes_of(region):
                    if not _same_memory(place, value):
                        into.append(place)
                        of.append(value)
        if into:
            self._written = True
            _copy_across(into, of)
        if self._run is not None:
            self._written = True
            self._run.feed(
                group, {r: t for r, t in tensors.items() if r.tensor not in self._destinations}
            )

    def _boxes_of(self, region: Region) -> list[Tensor]:
        """Where a region belongs."""
        boxes = self._boxes.get(region)
        if boxes is None:
            places = self._destinations.get(region.tensor, ())
            boxes = self._boxes[region] = [_box_of(place, region) for place in places]
        return boxes

    def commit(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish()
        if self.device.type != "cpu":  # in place is what whoever uses another stream sees, too
            torch.accelerator.current_stream(self.device).synchronize()

    def prepare_fingerprint(self, version: int) -> None:
        self._fingerprinter.prepare(version)

    def fingerprint(self, version: int) -> Fingerprint | None:
        if self._table is None:
            return None
        filled = {
            f"{self._table.tensors[i].name} {number}": place
            for i, places in self._destinations.items()
            for number, place in enumerate(places)
        }
        return self._fingerprinter.of(filled, version)

    def rollback(self, error: BaseException) -> bool:
        return not self._written

    def _check_names(self, own: Mapping[str, Tensor], carriers: Mapping[str, str]) -> None:
        _refuse_unmatched(self._unused, carriers, "unused", "no sent tensor")
        _refuse_unmatched(self._untouched, own, "untouched", "no tensor of the target")
        missing = [
            name for name in own if name not in carriers and not _matches(name, self._untouched)
        ]
        extra = [name for name in carriers if name not in own and not _matches(name, self._unused)]
        if missing or extra:
            raise TableMismatch(
                _list("the trainer doesn't send", missing, "name it in untouched=")
                + ("; " if missing and extra else "")
                + _list("the target doesn't have", extra, "name it in unused=")
                + " (of weightwire.ModuleTarget or MappingTarget)"
            )

    def _check_tensors(
        self,
        own: Mapping[str, Tensor],
        carriers: Mapping[str, str],
        table: TensorTable,
        made: Iterable[str],
    ) -> None:
        named = table.named()
        offered = _offered(table) if made else {}
        wrong = []
        for name, tensor in own.items():
            if name not in carriers:
                continue
            if name in made:
                shape, dtype = offered[name].shape, dtype_name(offered[name].dtype)
            else:
                shape, dtype = named[name].shape, named[name].dtype
            if tuple(tensor.shape) != shape:
                wrong.append(
                    f"{name!r} has shape {shape} at the trainer and "
                    f"{tuple(tensor.shape)} here: pad or cut one side"
                )
            elif dtype_name(tensor.dtype) != dtype:
                wrong.append(
                    f"{name!r} is {dtype} on the wire and {dtype_name(tensor.dtype)} here: "
                    "set wire_dtype (and keep_dtype) at the sender, or change the target"
                )
        if wrong:
            more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
            raise TableMismatch("\n".join([f"tensor {wrong[0]}{more}", *wrong[1:20]]))

    def _check_aliases(self, own: Mapping[str, Tensor], carriers: Mapping[str, str]) -> None:
        """Two values can't live in one memory: the target tied what the trainer didn't."""
        sent = ((name, tensor) for name, tensor in own.items() if name in carriers)
        for other, name in overlapping_pairs(sent):
            if carriers[other] != carriers[name] or own[other].shape != own[name].shape:
                raise TableMismatch(
                    f"tensors {other!r} and {name!r} share memory here and are two at the trainer: "
                    "tie them at the trainer, or untie them here"
                )


class ModuleTarget(MappingTarget):
    """A module whose parameters and persistent buffers are filled in place."""

    def __init__(
        self,
        module: nn.Module,
        *,
        unused: Iterable[str] = (),
        untouched: Iterable[str] = (),
    ) -> None:
        super().__init__({}, unused=unused, untouched=untouched)
        self._module = module

    def current(self) -> Mapping[str, Tensor]:
        state = self._module.state_dict(keep_vars=True)
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        names = checkpoint_names(tensors)
        return {names[name]: value for name, value in tensors.items()}


def as_target(target: nn.Module | Mapping[str, Tensor] | WeightTarget) -> WeightTarget:
    """Wrap what ``open_receiver`` was given."""
    if isinstance(target, WeightTarget):
        return target
    if isinstance(target, nn.Module):
        return ModuleTarget(target)
    if isinstance(target, Mapping):
        return MappingTarget(target)
    raise ConfigError(
        f"target is a {type(target).__name__}: give an nn.Module, a mapping of names to tensors, "
        "or a WeightTarget"
    )


def _copy_across(into: Sequence[Tensor], of: Sequence[Tensor]) -> None:
    """Copy what arrived; what comes from host memory has left it when this returns."""
    copy_all(into, of, non_blocking=True)
    pairs = zip(into, of, strict=True)
    crossed = {to.device for to, value in pairs if to.device != value.device}
    for device in crossed:
        torch.accelerator.current_stream(device if device.type != "cpu" else None).synchronize()


def _places(tensors: Mapping[str, Tensor]) -> list[tuple[object, ...]]:
    """Where each tensor lies and how it is laid out: while that is the same, so is a plan."""
    return [
        (name, type(t), t.layout, t.is_meta or t.data_ptr(), t.shape, t.stride(), t.dtype, t.device)
        if type(t).__name__ != "DTensor" and isinstance(t, Tensor) and t.layout is torch.strided
        else (name, id(t))
        for name, t in tensors.items()
    ]


def _require_plain(name: str, tensor: Tensor) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise ConfigError(f"target tensor {name!r} is a {type(tensor).__name__}, not a tensor")
    if type(tensor).__name__ == "DTensor":
        raise UnsupportedOperation(
            f"target tensor {name!r} is a DTensor: sharded targets aren't supported yet; "
            "give each rank's local tensors"
        )
    require_dense(f"target tensor {name!r}", tensor)
    require_distinct(f"target tensor {name!r}", tensor)
    return tensor.detach()


def _offered(table: TensorTable) -> dict[str, CheckpointTensor]:
    return {tensor.name: tensor for tensor in table.checkpoint()} if table.views else {}


def _box_of(tensor: Tensor, region: Region) -> Tensor:
    return cut_out(tensor, region.offsets, region.sizes, (0,) * tensor.dim())


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.device == b.device


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _refuse_unmatched(
    patterns: Iterable[str], names: Iterable[str], option: str, what: str
) -> None:
    names = list(names)
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            raise TableMismatch(f"{option} pattern {pattern!r} matches {what}: correct it")


def _list(what: str, names: Sequence[str], remedy: str) -> str:
    if not names:
        return ""
    shown = ", ".join(repr(name) for name in names[:5])
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{what} {shown}{more}: correct the name, or {remedy}"
