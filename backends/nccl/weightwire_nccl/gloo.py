"""Gloo: frames and headers always, payload between CPUs.

Its point-to-point operations can't be polled, so that the thread that waits for
them blocks until they are done or the group is ended.
"""

from __future__ import annotations

import datetime
import threading
from typing import Any

import torch
from torch import Tensor

from weightwire.errors import TransferError
from weightwire.gloo import end_group
from weightwire_nccl.wire import Wire, WireBroken, WireLate, Work

__all__ = ["GlooWire"]

_THREADS = 1
_NEVER = datetime.timedelta(days=365)


class GlooWire(Wire):
    """Forms a group; blocks until every rank has come.

    Args:
        store: a torch store of this group alone.
        host: address of this process to listen on.
        seconds: most that forming may take.
    """

    def __init__(self, store: Any, rank: int, size: int, host: str, seconds: float) -> None:
        from torch.distributed import ProcessGroupGloo

        group_type: Any = ProcessGroupGloo  # its options aren't in the stub
        options = group_type._Options()
        try:
            # Connections on demand would be made while a group is under way, and hang there.
            options._devices = [group_type.create_device(hostname=host, lazy_init=False)]
        except RuntimeError as error:
            raise TransferError(
                f"Gloo can't open a socket on {host} here: raise `ulimit -n` if files ran out, or "
                f"set the nccl backend's option 'host' to an address of this machine\n{error}"
            ) from error
        options._timeout = datetime.timedelta(seconds=seconds)
        options._threads = _THREADS
        self.device = torch.device("cpu")
        self._lock = threading.Lock()
        self._aborted = False
        try:
            self._group: Any = group_type(store, rank, size, options)
        except RuntimeError as error:
            raise _translated(error) from error

    def send(self, tensor: Tensor, peer: int, tag: int) -> Work:
        return self._posted(lambda group: group.send([tensor], peer, tag), tensor)

    def recv(self, tensor: Tensor, peer: int, tag: int) -> Work:
        return self._posted(lambda group: group.recv([tensor], peer, tag), tensor)

    def broadcast(self, tensor: Tensor, root: int) -> Work:
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = root
        options.timeout = _NEVER  # of its own: the group's is that of forming it
        return self._posted(lambda group: group.broadcast([tensor], options), tensor)

    def _posted(self, post: Any, tensor: Tensor) -> Work:
        if self._group is None or self._aborted:
            raise WireBroken("the group was aborted")
        try:
            return _GlooWork(post(self._group), tensor)
        except RuntimeError as error:
            raise _translated(error) from error

    def abort(self) -> None:
        with self._lock:
            if not self._aborted and self._group is not None:
                end_group(self._group)
            self._aborted = True

    def close(self) -> None:
        with self._lock:
            self._group = None


class _GlooWork(Work):
    def __init__(self, work: Any, tensor: Tensor) -> None:
        self._work = work
        self._tensor = tensor

    def wait(self, seconds: float) -> None:
        try:
            self._work.wait(datetime.timedelta(seconds=max(0.001, seconds)))
        except RuntimeError as error:
            raise _translated(error) from error


def _translated(error: RuntimeError) -> WireBroken:
    text = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
    late = "imed out" in text or "timeout" in text.lower()
    return WireLate(text) if late and "pair closure" not in text else WireBroken(text)
