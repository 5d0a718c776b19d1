"""Shared files and the words in them by which two processes signal.

Each word is written by one process and polled by others.  An aligned store of
eight bytes is seen whole, and in program order, on the machines this runs on.

A sender's segment::

    0     magic; incarnation, version and attempt that was given up
    512   who made it (its process identity)
    4096  one header a slot: generation, incarnation, version, attempt, group,
          seal length, seal
    ...   the slots

A receiver's segment holds, by owner, the generation that it has credited, and
the version that it gave up.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weightwire.contract import Policy
from weightwire.errors import PeerLost, TransferError
from weightwire.session import process
from weightwire.shm import default_directory

__all__ = ["PAGE", "Segment", "default_directory", "remove_orphans", "segment_name"]

PAGE = 4096
_MAGIC = 0x5757_4D45_4D31
_IDENTITY = slice(512, 1024)


def segment_name(session_id: str, role: str) -> str:
    return f"weightwire-{session_id}-{role}-{secrets.token_hex(6)}"


class Segment:
    """A shared file, mapped.

    Raises:
        TransferError: it can't be made; says why.
        PeerLost: it can't be opened: its maker is gone.
    """

    def __init__(self, path: Path, nbytes: int, *, create: bool) -> None:
        self.path = path
        self.nbytes = nbytes
        self._owner = create
        try:
            flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0)
            descriptor = os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o600)
            try:
                if create:
                    _reserve(descriptor, nbytes)
                elif os.fstat(descriptor).st_size != nbytes:
                    raise PeerLost(
                        f"shared memory {path.name} has another size: its maker restarted"
                    )
                self._map = mmap.mmap(descriptor, nbytes)
            finally:
                os.close(descriptor)
        except OSError as error:
            if create:
                path.unlink(missing_ok=True)
                raise TransferError(
                    f"shared memory of {nbytes} bytes in {path.parent} can't be made "
                    f"({error.strerror}): free some, or set the option 'directory'"
                ) from error
            raise PeerLost(
                f"shared memory {path.name} can't be opened ({error.strerror}): its maker "
                "is gone, or runs on another host"
            ) from error
        self.words: NDArray[np.uint64] = np.frombuffer(self._map, np.uint64, nbytes // 8)
        if create:
            identity = process.identity().encode()[:512]
            self._map[_IDENTITY.start : _IDENTITY.start + len(identity)] = identity
            self.words[0] = _MAGIC
        elif int(self.words[0]) != _MAGIC:
            raise PeerLost(f"shared memory {path.name} isn't ours: its maker restarted")

    def tensor(self, begin: int, nbytes: int) -> Tensor:
        """Bytes of the segment as a uint8 tensor that shares them."""
        if not nbytes:  # of a group, an owner may hold nothing but empty shards
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._map, dtype=torch.uint8, count=nbytes, offset=begin)

    def read(self, begin: int, nbytes: int) -> bytes:
        return self._map[begin : begin + nbytes]

    def write(self, begin: int, payload: bytes) -> None:
        self._map[begin : begin + len(payload)] = payload

    def give_up(self, policy: Policy | None) -> None:
        """Tell the other side that this policy won't go on; None takes it back."""
        self.words[1] = 0
        if policy is not None:
            self.words[2:4] = (policy.version, policy.attempt)
            self.words[1] = policy.incarnation

    def has_given_up(self, policy: Policy) -> bool:
        return tuple(int(word) for word in self.words[1:4]) == (
            policy.incarnation,
            policy.version,
            policy.attempt,
        )

    def discard(self) -> None:
        """Free the pages now, also those that others have mapped: all of it reads as zeros.

        A reader that was left behind sees a generation that isn't the one it read by.
        """
        if sys.platform == "linux":  # elsewhere they go with the last mapping
            with contextlib.suppress(OSError):  # not every filesystem can
                self._map.madvise(mmap.MADV_REMOVE)

    def close(self) -> None:
        """Remove the file if we made it; the memory goes with its last tensor."""
        if self._owner:
            self.path.unlink(missing_ok=True)
            self._owner = False


def remove_orphans(directory: Path, session_id: str) -> None:
    """Remove a session's files whose maker on this host is gone."""
    for path in _files(directory, session_id):
        try:
            with path.open("rb") as file:
                head = file.read(_IDENTITY.stop)
        except OSError:
            continue
        identity = head[_IDENTITY].rstrip(b"\0").decode("utf-8", "replace")
        if identity and process.is_gone(identity):
            path.unlink(missing_ok=True)


def _files(directory: Path, session_id: str) -> Iterator[Path]:
    yield from directory.glob(f"weightwire-{session_id}-*")


def _reserve(descriptor: int, nbytes: int) -> None:
    """Allocate now: a sparse file would end a later write with SIGBUS."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, nbytes)
    else:
        os.ftruncate(descriptor, nbytes)
