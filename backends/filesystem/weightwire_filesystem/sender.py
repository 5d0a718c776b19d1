"""A trainer rank's end: write, hash and publish."""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from weightwire.contract import Context, Offer, Policy, Seal, SenderTransport
from weightwire.errors import ConfigError, TransferError, WeightWireError
from weightwire_filesystem import checksums, files, manifest
from weightwire_filesystem.announcement import Announcement
from weightwire_filesystem.checkpoint import collect_checkpoint_files, index_bytes
from weightwire_filesystem.checksums import CHUNK_NBYTES, Sums
from weightwire_filesystem.config import FilesystemConfig, mode_bits
from weightwire_filesystem.layout import INDEX_NAME, Layout, ShardFile, plan_layout
from weightwire_filesystem.memory import tensor_bytes
from weightwire_filesystem.paths import versions_directory
from weightwire_filesystem.sweeper import Sweeper
from weightwire_filesystem.workers import Job, Workers, shared

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from weightwire.table import TensorTable

__all__ = ["FilesystemSender"]

logger = logging.getLogger("weightwire.filesystem")

_ALONE_NBYTES = 1 << 20  # below this, waking the other threads costs more than it gains


class FilesystemSender(SenderTransport):
    """Writes this rank's tensors to its own files; rank 0 makes the version visible.

    A version is staged in a hidden directory beside the finished ones.  Order on
    disk: every rank's files are synced, then rank 0 writes the index, the
    checkpoint files and the manifest, syncs them and the directory, renames it
    to its final name, and syncs the parent.  Until the rename nothing is visible.

    ``put`` only queues a group, so that groups with few large tensors are
    written beside their neighbours.

    Raises:
        ConfigError: no directory, or one that can't be written.
    """

    def __init__(self, context: Context, config: FilesystemConfig) -> None:
        self.keep = config.keep
        self._context = context
        self._config = config
        self._file_mode = mode_bits(config.file_mode)
        self._directory_mode = mode_bits(config.directory_mode)
        self._root = versions_directory(context, config)
        self._extras = collect_checkpoint_files(config) if context.rank == 0 else []
        self._prepare_root()
        self._workers = Workers(config.thread_count, context.watch)
        self._sweeper = Sweeper()
        self._table: TensorTable | None = None
        self._digest = ""
        self._layout: Layout | None = None
        self._version: _Version | None = None

    def _prepare_root(self) -> None:
        try:
            self._root.parent.mkdir(parents=True, exist_ok=True)
            files.make_directory(self._root, self._directory_mode)
            if self._context.rank == 0:
                self._remove_leftovers()
        except OSError as error:
            raise ConfigError(
                f"directory {self._root} can't be used ({error.strerror}): "
                "set the option `directory` to one that the trainer can write"
            ) from error
        if not os.access(self._root, os.W_OK | os.X_OK):
            raise ConfigError(
                f"directory {self._root} can't be written by this user: change its permissions, "
                "or set the option `directory`"
            )

    def _remove_given_up(self) -> None:
        """Remove what a rank staged of a version that the others had given up already.

        Every rank has finished the version that was just published: none stages another.
        """
        for name in sorted(os.listdir(self._root)):
            incarnation = manifest.leftover_incarnation(name, self._context.session_id)
            if incarnation == self._context.incarnation and name.startswith(".staging-"):
                files.remove_tree(self._root / name)

    def _remove_leftovers(self) -> None:
        """Remove what earlier incarnations of this session were writing or deleting."""
        for name in sorted(os.listdir(self._root)):
            incarnation = manifest.leftover_incarnation(name, self._context.session_id)
            if incarnation is not None and incarnation < self._context.incarnation:
                files.remove_tree(self._root / name)

    def set_table(self, table: TensorTable) -> None:
        self._layout = plan_layout(table, self._config.files_per_rank)
        self._table = table
        self._digest = table.digest()

    def describe(self) -> bytes:
        return Announcement(str(self._root), self._config.files_per_rank).encode()

    def begin(self, offer: Offer, readers: Mapping[str, Sequence[bytes]]) -> None:
        layout, table = self._planned()
        for rank, blob in enumerate(offer.senders):
            other = Announcement.decode(blob, f"trainer rank {rank}")
            if other.files_per_rank != self._config.files_per_rank:
                raise ConfigError(
                    f"trainer rank {rank} has files_per_rank={other.files_per_rank}, rank "
                    f"{self._context.rank} has {self._config.files_per_rank}: set it alike"
                )
        final = self._root / manifest.version_name(offer.policy)
        staging = self._root / manifest.staging_name(offer.policy, self._context.session_id)
        if final.exists():
            raise TransferError(
                f"{final} exists already: give each run a directory of its own, or remove it"
            )
        self._context.watch.until(self._sweeper.idle, "deletion of dropped versions")
        self._version = _Version(offer.policy, staging, final)
        with files.explained("can't stage", staging):
            files.make_directory(staging, self._directory_mode)
            for position, file in enumerate(layout.files):
                if file.owner == self._context.rank:
                    self._version.open(position, file, self._file_mode)
        for tensor, owner in enumerate(layout.owners):
            if owner == self._context.rank and table.tensors[tensor].nbytes:
                self._version.missing.update((tensor, p.group) for p in layout.pieces[tensor])

    def put(self, group: int, tensors: Mapping[int, Tensor], seal: Seal) -> None:
        layout, table = self._planned()
        version = self._running()
        total = 0
        for tensor, value in tensors.items():
            piece = layout.piece(tensor, group)
            if (
                piece is None
                or layout.owners[tensor] != self._context.rank
                or (tensor, group) not in version.missing
            ):
                if table.tensors[tensor].nbytes and value.numel():
                    raise TransferError(
                        f"tensor {table.tensors[tensor].name!r} isn't due from trainer rank "
                        f"{self._context.rank}: it has another owner, or was put before"
                    )
                continue
            place = layout.places[tensor]
            view = tensor_bytes(value, table.tensors[tensor].name)
            if len(view) != piece.nbytes:
                raise TransferError(
                    f"tensor {table.tensors[tensor].name!r} has {len(view)} bytes, its table "
                    f"entry {piece.nbytes}: the trainer published another table"
                )
            sums = checksums.empty(piece.nbytes, CHUNK_NBYTES)
            version.sums[tensor, group] = sums
            version.missing.discard((tensor, group))
            version.queue.add(place.file, _Stream(view, place.offset + piece.begin, sums))
            total += piece.nbytes
        version.seals[group] = seal
        if total > _ALONE_NBYTES:
            self._workers.start(version.take)

    def settle(self) -> None:
        version = self._running()
        with files.explained("can't write to", version.staging):
            self._workers.join(version.take)

    def finish(self) -> None:
        layout, table = self._planned()
        version = self._running()
        self.settle()
        if version.missing:
            names = sorted({table.tensors[tensor].name for tensor, _ in version.missing})
            raise TransferError(
                f"tensor {names[0]!r} was never put (nor {len(names) - 1} others): "
                "the version is incomplete; send it again"
            )
        with files.explained("can't finish", version.staging):
            syncs = [partial(os.fsync, fd) for fd in version.descriptors.values()]
            self._workers.run(shared(syncs))
            version.close()
            part = self._part(version, layout, table)
            files.write_file(
                version.staging / manifest.part_name(self._context.rank),
                msgspec.json.encode(part),
                self._file_mode,
            )
        if self._context.rank != 0:
            self._version = None

    def publish(self) -> None:
        version = self._running()
        with files.explained("can't publish", version.final):
            self._publish(version)
        self._version = None
        self._remove_given_up()

    def abort(self, error: BaseException) -> None:
        self._workers.stop(error)
        version, self._version = self._version, None
        if version is None:
            return
        version.close()
        if self._context.rank == 0:
            files.remove_tree(version.staging)
            return
        layout, _ = self._planned()
        mine = [file.name for file in layout.files if file.owner == self._context.rank]
        for name in [*mine, manifest.part_name(self._context.rank)]:
            with suppress(OSError):
                (version.staging / name).unlink(missing_ok=True)
        with suppress(OSError):  # the last rank to leave removes it
            version.staging.rmdir()

    def drop(self, policy: Policy) -> None:
        trash = self._root / manifest.trash_name(
            policy, self._context.session_id, secrets.token_hex(4)
        )
        path = self._root / manifest.version_name(policy)
        try:
            path.rename(trash)  # at once invisible: nobody meets half a version
        except FileNotFoundError:
            return
        except OSError as error:
            raise files.explain(error, "can't drop", path) from error
        self._sweeper.remove(trash)

    def close(self) -> None:
        if self._version is not None:
            self.abort(TransferError("the sender was closed"))
        self._workers.close()
        self._sweeper.close()

    def _planned(self) -> tuple[Layout, TensorTable]:
        if self._layout is None or self._table is None:
            raise WeightWireError("set_table() comes before a version")
        return self._layout, self._table

    def _running(self) -> _Version:
        if self._version is None:
            raise WeightWireError("begin() comes before put(), finish() and publish()")
        return self._version

    def _part(self, version: _Version, layout: Layout, table: TensorTable) -> manifest.Part:
        sums = {
            table.tensors[tensor].name: "".join(
                checksums.encode(version.sums[tensor, piece.group])
                for piece in layout.pieces[tensor]
                if (tensor, piece.group) in version.sums
            )
            for tensor, owner in enumerate(layout.owners)
            if owner == self._context.rank
        }
        records = tuple(
            manifest.FileRecord(file.name, file.nbytes, file.owner)
            for file in layout.files
            if file.owner == self._context.rank
        )
        return manifest.Part(
            self._context.rank, version.policy, self._digest, records, sums, version.seals
        )

    def _publish(self, version: _Version) -> None:
        layout, table = self._planned()
        parts = self._collect_parts(version, layout)
        for source in self._extras:
            files.write_file(version.staging / source.name, source.read_bytes(), self._file_mode)
        files.write_file(version.staging / INDEX_NAME, index_bytes(table, layout), self._file_mode)
        marker = manifest.Manifest(
            schema=manifest.SCHEMA,
            session=self._context.session_id,
            policy=version.policy,
            table_digest=self._digest,
            files_per_rank=self._config.files_per_rank,
            chunk_nbytes=CHUNK_NBYTES,
            files=tuple(record for part in parts for record in part.files),
            checksums={name: text for part in parts for name, text in part.checksums.items()},
            seals={part.rank: part.seals for part in parts},
            ties=table.ties,
        )
        files.sync_directory(version.staging)
        files.write_file(
            version.staging / manifest.MANIFEST_NAME, msgspec.json.encode(marker), self._file_mode
        )
        files.sync_directory(version.staging)
        version.staging.rename(version.final)
        files.sync_directory(self._root)

    def _collect_parts(self, version: _Version, layout: Layout) -> list[manifest.Part]:
        """Every rank's part, in order, once its files have the sizes that they should have."""
        present = set(os.listdir(version.staging))  # also refreshes a network client's view
        parts = []
        for rank in range(self._context.world_size):
            path = version.staging / manifest.part_name(rank)
            if path.name not in present:
                raise TransferError(
                    f"trainer rank {rank} wrote nothing to {version.staging}: mount the same "
                    "directory on every trainer rank, or set `directory`"
                )
            data = files.read_small(path, manifest.MAX_MANIFEST_NBYTES)
            part = manifest.parse(data, manifest.Part, path)
            manifest.check_part(part, rank, version.policy, self._digest, layout)
            parts.append(part)
        for file in layout.files:
            size = (version.staging / file.name).stat().st_size
            if size != file.nbytes:
                raise TransferError(
                    f"{version.staging / file.name} of trainer rank {file.owner} has {size} "
                    f"bytes, not {file.nbytes}: check the filesystem"
                )
        for rank in range(self._context.world_size):
            (version.staging / manifest.part_name(rank)).unlink()
        return parts


class _Version:
    """What a sender holds while a version is being written."""

    def __init__(self, policy: Policy, staging: Path, final: Path) -> None:
        self.policy = policy
        self.staging = staging
        self.final = final
        self.descriptors: dict[int, int] = {}
        self.queue = _Queue()
        self.sums: dict[tuple[int, int], Sums] = {}
        self.seals: dict[int, Seal] = {}
        self.missing: set[tuple[int, int]] = set()

    def open(self, position: int, file: ShardFile, mode: int) -> None:
        fd = files.create_file(self.staging / file.name, mode)
        self.descriptors[position] = fd
        files.write_exactly(fd, memoryview(file.header), 0)

    def take(self) -> Job | None:
        """The next chunk to hash and write."""
        taken = self.queue.take()
        if taken is None:
            return None
        file, stream, chunk = taken
        return partial(self._write, file, stream, chunk)

    def _write(self, file: int, stream: _Stream, chunk: int) -> None:
        begin = chunk * CHUNK_NBYTES
        view = stream.view[begin : begin + CHUNK_NBYTES]
        try:
            stream.sums[chunk] = checksums.checksum(view)
            files.write_exactly(self.descriptors[file], view, stream.offset + begin)
        finally:
            self.queue.done(file)

    def close(self) -> None:
        while self.descriptors:
            _, fd = self.descriptors.popitem()
            with suppress(OSError):
                os.close(fd)
        self.queue = _Queue()


@dataclass
class _Stream:
    """A tensor on its way into a file."""

    view: memoryview
    offset: int
    sums: Sums
    taken: int = 0


class _Queue:
    """Chunks to write, dealt out so that threads write to different files.

    Most filesystems lock a file for each write: two threads in one file are
    hardly faster than one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: dict[int, deque[_Stream]] = {}
        self._left: dict[int, int] = {}
        self._writers: dict[int, int] = {}

    def add(self, file: int, stream: _Stream) -> None:
        with self._lock:
            self._streams.setdefault(file, deque()).append(stream)
            self._left[file] = self._left.get(file, 0) + len(stream.view)

    def take(self) -> tuple[int, _Stream, int] | None:
        """A chunk of the file with the fewest writers, then the most bytes left."""
        with self._lock:
            if not self._streams:
                return None
            file = min(self._streams, key=lambda f: (self._writers.get(f, 0), -self._left[f]))
            streams = self._streams[file]
            stream = streams[0]
            chunk = stream.taken
            stream.taken += 1
            self._left[file] -= CHUNK_NBYTES
            if stream.taken == len(stream.sums):
                streams.popleft()
                if not streams:
                    del self._streams[file], self._left[file]
            self._writers[file] = self._writers.get(file, 0) + 1
            return file, stream, chunk

    def done(self, file: int) -> None:
        with self._lock:
            self._writers[file] -= 1
