"""Ranged, verified reads of one finished version."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from weightwire.errors import TransferError, VerificationError
from weightwire_filesystem import checksums, files

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from weightwire.contract import Policy, Seal
    from weightwire.table import TensorTable
    from weightwire_filesystem.boxes import Rows
    from weightwire_filesystem.layout import Layout
    from weightwire_filesystem.manifest import Manifest
    from weightwire_filesystem.workers import Job

__all__ = ["VersionReader"]

_READ_THROUGH = 16 << 10
"""A gap shorter than this is read along: that costs less than one more system call."""


class VersionReader:
    """The open files of one version.

    Args:
        path: its directory, for messages and opening.
        policy: its identity, for messages.
        content: its manifest, checked.
        layout: its files.
        table: its tensors.
    """

    def __init__(
        self, path: Path, policy: Policy, content: Manifest, layout: Layout, table: TensorTable
    ) -> None:
        self.layout = layout
        self._path = path
        self._policy = policy
        self._content = content
        self._table = table
        self._chunk = content.chunk_nbytes
        self._descriptors: dict[int, int] = {}
        self._scratch = threading.local()

    def open(self, position: int, names: set[str]) -> None:
        """Open a file and check that it is what the manifest says.

        Args:
            position: index into the layout's files.
            names: what a listing of the directory showed.

        Raises:
            VerificationError: missing, of another size, or with another header.
        """
        file = self.layout.files[position]
        path = self._path / file.name
        if file.name not in names:
            raise VerificationError(f"{path} is missing: send a newer version")
        fd = files.open_for_reading(path)
        self._descriptors[position] = fd
        size = os.fstat(fd).st_size
        if size != file.nbytes:
            raise VerificationError(
                f"{path} has {size} bytes, not {file.nbytes}: it is truncated or was replaced; "
                "send a newer version"
            )
        header = bytearray(len(file.header))
        if not files.read_exactly(fd, memoryview(header), 0) or header != file.header:
            raise VerificationError(
                f"{path} has another header than its table gives: it is damaged or was replaced; "
                "send a newer version"
            )

    def seal(self, owner: int, group: int) -> Seal:
        """The seal that a trainer rank gave its part of a group."""
        try:
            return self._content.seals[owner][group]
        except KeyError:
            raise VerificationError(
                f"{self._path} has no seal of trainer rank {owner} for group {group}: "
                "send a newer version"
            ) from None

    def jobs(self, tensor: int, group: int, rows: Rows, target: memoryview) -> Iterator[Job]:
        """The reads that bring a box of a tensor into ``target``, its bytes in order.

        Args:
            group: in which the box travels.
        """
        grid = self._grid(tensor, group)
        if rows.count > 1 and rows.stride - rows.run < _READ_THROUGH:
            for i, start in enumerate(rows.starts.tolist()):
                row = target[i * rows.row : (i + 1) * rows.row]
                for begin, end, expected in grid.chunks(start, start + rows.span):
                    yield partial(
                        self._read_through, tensor, rows, start, begin, end, row, expected
                    )
            return
        done = 0
        for start in rows.starts.tolist():
            for i in range(rows.count):
                first = start + i * rows.stride
                for begin, end, expected in grid.chunks(first, first + rows.run):
                    view = target[done : done + end - begin]
                    yield partial(self._read, tensor, begin, view, expected)
                    done += end - begin

    def close(self) -> None:
        """Close the files.  Idempotent."""
        while self._descriptors:
            _, fd = self._descriptors.popitem()
            with suppress(OSError):
                os.close(fd)

    def _grid(self, tensor: int, group: int) -> _Grid:
        """The chunks of what travels of a tensor in a group."""
        sums = checksums.decode(self._content.checksums[self._table.tensors[tensor].name])
        before = 0
        for piece in self.layout.pieces[tensor]:
            count = checksums.chunk_count(piece.nbytes, self._chunk)
            if piece.group == group:
                own = sums[before : before + count]
                return _Grid(piece.begin, piece.begin + piece.nbytes, self._chunk, own)
            before += count
        raise TransferError(
            f"tensor {self._table.tensors[tensor].name!r} isn't in group {group}: plan again"
        )

    def _read(self, tensor: int, begin: int, view: memoryview, expected: int | None) -> None:
        place = self.layout.places[tensor]
        path = self._path / self.layout.files[place.file].name
        with files.explained("can't read", path):
            whole = files.read_exactly(self._descriptors[place.file], view, place.offset + begin)
        if not whole:
            raise TransferError(
                f"{path} ended while tensor {self._table.tensors[tensor].name!r} was read: "
                f"it was truncated meanwhile; send {self._policy} again"
            )
        if expected is not None and checksums.checksum(view) != expected:
            raise VerificationError(
                f"tensor {self._table.tensors[tensor].name!r} in {path} of {self._policy} has "
                f"wrong bytes in {len(view)} bytes from {begin}: check the disk, and send a "
                "newer version"
            )

    def _read_through(
        self,
        tensor: int,
        rows: Rows,
        start: int,
        begin: int,
        end: int,
        row: memoryview,
        expected: int | None,
    ) -> None:
        """Read ``[begin, end)`` with its gaps, and copy out what belongs to the row."""
        scratch = self._buffer()[: end - begin]
        self._read(tensor, begin, scratch.data, expected)
        _scatter(rows, begin - start, scratch, np.frombuffer(row, np.uint8))

    def _buffer(self) -> npt.NDArray[np.uint8]:
        buffer: npt.NDArray[np.uint8] | None = getattr(self._scratch, "buffer", None)
        if buffer is None:
            buffer = np.empty(self._chunk, np.uint8)
            self._scratch.buffer = buffer
        return buffer


@dataclass(frozen=True)
class _Grid:
    """Bytes ``[begin, end)`` of a tensor in chunks, each with its checksum."""

    begin: int
    end: int
    chunk: int
    sums: checksums.Sums

    def chunks(self, begin: int, end: int) -> Iterator[tuple[int, int, int | None]]:
        """``[begin, end)`` cut where chunks meet; with the checksum, if it is a whole chunk."""
        while begin < end:
            index, inside = divmod(begin - self.begin, self.chunk)
            chunk_end = min(self.end, begin - inside + self.chunk)
            stop = min(end, chunk_end)
            yield begin, stop, int(self.sums[index]) if not inside and stop == chunk_end else None
            begin = stop


def _scatter(
    rows: Rows, first: int, block: npt.NDArray[np.uint8], row: npt.NDArray[np.uint8]
) -> None:
    """Copy the runs in ``block``, which starts at byte ``first`` of a row's span."""
    stride, run = rows.stride, rows.run
    last = first + len(block)
    head = -(-first // stride)  # the runs [head, tail) lie wholly in the block
    tail = max(head, min(rows.count, (last - run) // stride + 1))
    if tail > head:
        begin = head * stride - first
        whole = np.lib.stride_tricks.as_strided(
            block[begin:], shape=(tail - head, run), strides=(stride, 1)
        )
        row[head * run : tail * run].reshape(tail - head, run)[:] = whole
    for i in {first // stride, tail}:  # those that stick out at either end
        begin, end = max(i * stride, first), min(i * stride + run, last)
        if not head <= i < tail and i < rows.count and begin < end:
            offset = i * run - i * stride
            row[begin + offset : end + offset] = block[begin - first : end - first]
