"""NCCL: payload between GPUs.  All that is particular to it is in this module.

torch's watchdog ends the whole process when an operation of a group outlasts the
group's timeout or its communicator fails.  Deadlines are ours, so this group's
timeout is out of reach, and error handling and the monitor are switched off while
it is made: torch reads those variables then, and only this group is affected.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from weightwire.errors import ConfigError
from weightwire_nccl.wire import Wire, WireBroken, WireLate, Work

__all__ = ["NcclWire", "gpu_here", "use_own_stream"]

_NEVER = datetime.timedelta(days=365)
_QUIET = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
}
_environment = threading.Lock()
_FIRST_PAUSE = 0.00002
_LAST_PAUSE = 0.0002  # a group takes a few milliseconds


def gpu_here(library: str, device: torch.device) -> tuple[int | None, str, str]:
    """Index and UUID of the GPU to use; or None, an empty string, and why there is none.

    Args:
        library: the backend's option.
        device: where the tensors lie; for those on the CPU the current GPU is used.

    Raises:
        ConfigError: tensors lie on a GPU, and the library is Gloo.
    """
    import torch.distributed

    if library == "gloo":
        if device.type != "cpu":
            raise ConfigError(
                f"tensors that lie on {device} never travel over Gloo: set library='auto' on all "
                "sides, or move them to the CPU"
            )
        return None, "", "library='gloo'"
    if not torch.distributed.is_nccl_available():
        return None, "", "its torch has no NCCL"
    if not torch.cuda.is_available():
        return None, "", "it has no GPU"
    index = torch.cuda.current_device() if device.index is None else device.index
    return index, str(torch.cuda.get_device_properties(index).uuid), ""


def use_own_stream(device: torch.device) -> None:
    """Let this thread's copies and waits hold up no other thread's."""
    torch.cuda.set_device(device)
    torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]  # torch


class NcclWire(Wire):
    """Forms a group on the current GPU; blocks until every rank has come.

    Args:
        store: a torch store of this group alone.
        device: this process's GPU.
    """

    def __init__(self, store: Any, rank: int, size: int, device: torch.device) -> None:
        from torch.distributed import ProcessGroupNCCL

        self.device = device
        self._aborted = threading.Event()
        self._aborting = threading.Lock()
        self._is_ended = False
        options = ProcessGroupNCCL.Options()
        options._timeout = _NEVER
        with _quiet():
            try:
                self._group: Any = ProcessGroupNCCL(store, rank, size, options)
                self._group.eager_connect_single_device(device)
            except RuntimeError as error:
                raise WireBroken(str(error).splitlines()[0]) from error

    def send(self, tensor: Tensor, peer: int, tag: int) -> Work:
        return self._posted(lambda group: group.send([tensor], peer, tag), tensor)

    def recv(self, tensor: Tensor, peer: int, tag: int) -> Work:
        return self._posted(lambda group: group.recv([tensor], peer, tag), tensor)

    def broadcast(self, tensor: Tensor, root: int) -> Work:
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = root
        options.asyncOp = True
        return self._posted(lambda group: group.broadcast([tensor], options), tensor)

    def together(self, post: Callable[[], Sequence[Work]]) -> Sequence[Work]:
        with self._broken():
            self._group._start_coalescing()
        works = post()  # what raises here ends the group: this thread posts nothing any more
        with self._broken():
            ends = self._group._end_coalescing()
        return [_NcclWork(ends, works, self.device, self._aborted)]

    def _posted(self, post: Callable[[Any], Any], tensor: Tensor) -> Work:
        with self._broken():
            # torch's NCCL stream waits for the current one: everything staged there is seen.
            return _NcclWork(post(self._group), tensor, self.device, self._aborted)

    @contextlib.contextmanager
    def _broken(self) -> Iterator[None]:
        if self._aborted.is_set():
            raise WireBroken("the group was aborted")
        try:
            yield
        except RuntimeError as error:
            raise WireBroken(str(error).splitlines()[0]) from error

    def fence(self) -> Callable[[], None]:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # so are the stubs
        event.record(torch.cuda.current_stream(self.device))
        return lambda: torch.cuda.current_stream(self.device).wait_event(event)

    def flush(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()

    def abort(self) -> None:
        self._aborted.set()
        with self._aborting:  # who comes second returns when nothing moves any more, too
            if not self._is_ended:
                self._is_ended = True
                with contextlib.suppress(RuntimeError):
                    self._group.abort()

    def close(self) -> None:
        if self._group is not None:
            # Without an abort the destructor would wait for peers that may be gone.
            self.abort()
            self._group = None


class _NcclWork(Work):
    """An operation, or several that left as one; it keeps their tensors."""

    def __init__(
        self, work: Any, kept: object, device: torch.device, aborted: threading.Event
    ) -> None:
        self._work = work
        self._kept = kept
        self._device = device
        self._aborted = aborted

    def follow(self) -> None:
        with contextlib.suppress(RuntimeError):  # the next wait says so
            self._work.wait()  # doesn't block: the current stream follows the operation's

    def wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        pause = _FIRST_PAUSE
        try:
            self._work.wait()  # doesn't block: the current stream follows the operation's
            done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch
            done.record(torch.cuda.current_stream(self._device))
            while not done.query():
                if self._aborted.is_set():
                    raise WireBroken("the group was aborted")
                if time.monotonic() > end:
                    raise WireLate(f"no completion within {seconds:g} s")
                time.sleep(pause)
                pause = min(pause * 1.5, _LAST_PAUSE)
        except RuntimeError as error:
            raise WireBroken(str(error).splitlines()[0]) from error
        # An abort lets the operation end early: what it moved may be half there.
        if self._aborted.is_set():
            raise WireBroken("the group was aborted")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with _environment:
        before = {name: os.environ.get(name) for name in _QUIET}
        os.environ.update(_QUIET)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
