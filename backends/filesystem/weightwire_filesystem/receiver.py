"""An inference rank's end: check what is there, read what is needed, verify it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightwire.contract import Context, Offer, Policy, ReceiverTransport, Seal
from weightwire.errors import (
    TableMismatch,
    TransferError,
    VerificationError,
    WeightWireError,
)
from weightwire_filesystem import files, manifest
from weightwire_filesystem.announcement import Announcement
from weightwire_filesystem.boxes import Rows, box_rows
from weightwire_filesystem.layout import Layout, plan_layout
from weightwire_filesystem.memory import tensor_bytes
from weightwire_filesystem.paths import versions_directory
from weightwire_filesystem.reader import VersionReader
from weightwire_filesystem.workers import Source, Workers, shared

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from weightwire.table import Region, TensorTable
    from weightwire_filesystem.config import FilesystemConfig

__all__ = ["FilesystemReceiver"]

_ALONE_NBYTES = 1 << 20  # below this, waking the other threads costs more than it gains


@dataclass(frozen=True)
class _Reads:
    """The reads of one group: their jobs, their bytes, and who owns these."""

    source: Source
    nbytes: int
    owners: tuple[int, ...]


class FilesystemReceiver(ReceiverTransport):
    """Reads the regions that its rank needs straight into the tensors it is given.

    ``begin`` checks all that can be wrong with a version before a byte lands:
    the manifest against the offer and the table, and name, size and header of
    every file that this rank reads.  The files stay open until ``finish``, so
    that a version deleted meanwhile can be read to its end on a local disk.

    Raises:
        ConfigError: no directory.
    """

    def __init__(self, context: Context, config: FilesystemConfig) -> None:
        self._context = context
        self._config = config
        self._root = versions_directory(context, config)
        self._workers = Workers(config.thread_count, context.watch)
        self._table: TensorTable | None = None
        self._digest = ""
        self._regions: tuple[Region, ...] = ()
        self._rows: tuple[Rows, ...] = ()
        self._layouts: dict[int, Layout] = {}
        self._reader: VersionReader | None = None
        self._reads: dict[int, _Reads] = {}

    def set_plan(self, table: TensorTable, regions: Sequence[Region]) -> None:
        self._rows = tuple(
            box_rows(
                table.tensors[region.tensor].shape,
                region.offsets,
                region.sizes,
                table.tensors[region.tensor].torch_dtype.itemsize,
            )
            for region in regions
        )
        self._regions = tuple(regions)
        self._table = table
        self._digest = table.digest()
        self._layouts = {}

    def begin(self, offer: Offer) -> None:
        table = self._planned()
        self._close_reader()
        if offer.table_digest != self._digest:
            raise TableMismatch(
                f"{offer.policy} follows table {offer.table_digest}, this rank planned for "
                f"{self._digest}: plan again"
            )
        path = self._locate(offer)
        with files.explained("can't open", path):
            self._reader = self._open(path, offer.policy, table)

    def post(self, group: int, regions: Mapping[int, Tensor]) -> None:
        """Let the other threads begin to read a group, while the one before it is written."""
        if self._context.overlap:
            self._reads[group] = reads = self._jobs(group, regions)
            if reads.nbytes > _ALONE_NBYTES:
                self._workers.start(reads.source)

    def fetch(self, group: int, regions: Mapping[int, Tensor]) -> Sequence[Seal]:
        posted = self._reads.pop(group, None)
        reads = posted or self._jobs(group, regions)
        if posted is not None:
            self._workers.join(reads.source)
        else:
            self._workers.run(reads.source, alone=reads.nbytes <= _ALONE_NBYTES)
        return [self._opened().seal(owner, group) for owner in reads.owners]

    def _jobs(self, group: int, regions: Mapping[int, Tensor]) -> _Reads:
        table, reader = self._planned(), self._opened()
        jobs = []
        total = 0
        owners: dict[int, None] = {}
        for position, target in regions.items():
            region, rows = self._regions[position], self._rows[position]
            entry = table.tensors[region.tensor]
            view = tensor_bytes(target, entry.name)
            if len(view) != len(rows.starts) * rows.row:
                raise TransferError(
                    f"the target of tensor {entry.name!r} has {len(view)} bytes, its region "
                    f"{len(rows.starts) * rows.row}: give it the region's shape and wire dtype"
                )
            if view:
                owners[reader.layout.owners[region.tensor]] = None
                jobs.append(reader.jobs(region.tensor, group, rows, view))
                total += len(view)
        return _Reads(shared(job for some in jobs for job in some), total, tuple(owners))

    def _opened(self) -> VersionReader:
        if self._reader is None:
            raise WeightWireError("begin() comes before fetch()")
        return self._reader

    def finish(self) -> None:
        self._close_reader()

    def abort(self, error: BaseException) -> None:
        self._workers.stop(error)
        self._close_reader()

    def close(self) -> None:
        self._close_reader()
        self._workers.close()

    def _planned(self) -> TensorTable:
        if self._table is None:
            raise WeightWireError("set_plan() comes before a version")
        return self._table

    def _close_reader(self) -> None:
        self._reads = {}
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _locate(self, offer: Offer) -> Path:
        """The version's directory, once a directory listing shows it."""
        name = manifest.version_name(offer.policy)
        # Before the call's deadline, which would say less.
        patience = min(self._config.visible_within, 0.9 * self._context.watch.deadline.remaining())
        late = time.monotonic() + patience

        def look() -> str | None:
            try:
                names = os.listdir(self._root)  # a listing refreshes a network client's view
            except FileNotFoundError:
                names = []
            except OSError as error:
                raise files.explain(error, "can't list", self._root) from error
            if name in names:
                return "found"
            if any(_is_newer(other, offer.policy) for other in names):
                return "dropped"
            return "absent" if time.monotonic() >= late else None

        seen = self._context.watch.until(look, f"directory {self._root / name}")
        if seen == "dropped":
            raise TransferError(
                f"{offer.policy} is no longer in {self._root}, newer ones are: receive the "
                "newest version, and raise the sender's `keep` if receivers are slow"
            )
        if seen == "absent":
            raise TransferError(
                f"{offer.policy} isn't in {self._root}: {_where(offer)}; set `directory` to "
                "where this host mounts it, or raise `visible_within`"
            )
        return self._root / name

    def _open(self, path: Path, policy: Policy, table: TensorTable) -> VersionReader:
        names = set(os.listdir(path))
        marker = path / manifest.MANIFEST_NAME
        if marker.name not in names:
            raise VerificationError(
                f"{path} has no {marker.name}: it isn't a finished version; send a newer one"
            )
        data = files.read_small(marker, manifest.MAX_MANIFEST_NBYTES)
        content = manifest.parse(data, manifest.Manifest, marker)
        session = self._context.session_id
        manifest.check_manifest(content, marker, session, policy, table, self._digest)
        layout = self._layouts.get(content.files_per_rank)
        if layout is None:
            layout = plan_layout(table, content.files_per_rank)
            self._layouts[content.files_per_rank] = layout
        manifest.check_files(content, marker, layout, table)
        reader = VersionReader(path, policy, content, layout, table)
        try:
            needed = {
                layout.places[region.tensor].file
                for region, rows in zip(self._regions, self._rows, strict=True)
                if len(rows.starts)
            }
            for position in sorted(needed):
                reader.open(position, names)
        except BaseException:
            reader.close()
            raise
        return reader


def _is_newer(name: str, policy: Policy) -> bool:
    other = manifest.version_policy(name)
    return other is not None and other > policy


def _where(offer: Offer) -> str:
    if not offer.senders:
        return "the sender writes elsewhere"
    return f"the sender writes to {Announcement.decode(offer.senders[0], 'sender').directory}"
