"""What senders and receivers have in common: one call at a time, in one process, until closed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch.distributed

from weightwire.config import BackendChoice, select
from weightwire.contract import Backend
from weightwire.deadline import Deadline, Watch, calling
from weightwire.errors import ConfigError, HandleError, UnsupportedOperation
from weightwire.session.session import Session

__all__ = ["Handle", "close_all", "ranks_of", "slot_device"]

T = TypeVar("T")

_CLOSE_SECONDS = 60.0


class Handle:
    """Base of ``WeightSender`` and ``WeightReceiver``.

    A handle belongs to the process that opened it and runs one call at a time;
    anything else raises ``HandleError`` at once.

    Args:
        part_of: the watch of the handle that this one is a part of: it runs no calls of
            its own, but takes part in those.
    """

    def __init__(
        self, role: str, choice: BackendChoice, timeout: float, part_of: Watch | None = None
    ) -> None:
        self._role = role
        self._backend, self._config = select(choice)
        self._timeout = Deadline(timeout).seconds
        self._watch = part_of or Watch()
        self._is_part = part_of is not None
        self._pid = os.getpid()
        self._busy = threading.Lock()
        self._owner: int | None = None  # thread that runs the call
        self._closed = False
        self._is_released = False

    @property
    def backend(self) -> str:
        """Name of the backend that moves the bytes."""
        return self._backend.name

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def _is_forked(self) -> bool:
        """True in a fork of the process that opened the handle and owns all that it holds."""
        return os.getpid() != self._pid

    def _start_watch(self, deadline: Deadline) -> None:
        """Outside any call; a part is in the midst of its whole's."""
        if not self._is_part:
            self._watch.start(deadline)

    def _open_session(
        self, where: str | Session, deadline: Deadline, token: str | None, *, serve: bool = False
    ) -> Session:
        """The session with this URL, or the one in which this handle has its part."""
        if isinstance(where, Session):
            return where
        return Session.open(where, deadline=deadline, serve=serve, token=token)

    def _check_usable(self) -> None:
        if self._is_forked:
            raise HandleError(
                f"this {self._role} was opened in process {self._pid} and used in its fork "
                f"{os.getpid()}: open one after forking"
            )
        if self._closed:
            raise HandleError(f"this {self._role} is closed: open a new one")

    def _enter(self, timeout: float | None) -> None:
        """Take the handle for one call and start its deadline."""
        deadline = Deadline(self._timeout if timeout is None else timeout)
        self._take()
        self._watch.start(deadline)
        if self._closed:  # while we took it: close() waits for us
            self._leave()
            self._check_usable()

    def _take(self) -> None:
        self._check_usable()
        if not self._busy.acquire(blocking=False):
            raise HandleError(
                f"this {self._role} is busy with another call: wait for it, or open a second one"
            )
        self._owner = threading.get_ident()

    def _leave(self) -> None:
        self._owner = None
        self._busy.release()
        if self._closed and not self._is_released:
            self.close()  # it was asked for on this thread, in the middle of the call

    def close(self) -> None:
        """Leave the session and release everything.  Idempotent; in a fork it does nothing.

        A call that runs on another thread is aborted and waited for.  Called from
        within a call (a signal handler, an observer), it ends that call first.

        Raises:
            HandleError: the call on the other thread doesn't end.
        """
        if self._is_released or self._is_forked:
            return
        self._closed = True
        if not self._is_part:
            self._watch.cancel(f"the {self._role} was closed")
        if self._owner == threading.get_ident():
            return
        if not self._busy.acquire(timeout=_CLOSE_SECONDS):
            raise HandleError(
                f"this {self._role} can't be closed: its call on another thread hasn't ended "
                f"within {_CLOSE_SECONDS:g} s of being cancelled: look at what it runs"
            )
        try:
            if not self._is_released:
                self._is_released = True
                self._release()
        finally:
            self._busy.release()

    def _release(self) -> None:
        """Release what the handle holds; no call runs."""
        raise NotImplementedError

    @contextlib.contextmanager
    def _call(self, timeout: float | None) -> Iterator[None]:
        self._enter(timeout)
        try:
            with calling(self._watch.deadline):
                yield
        finally:
            self._leave()

    async def _in_thread(self, body: Callable[[], T], timeout: float | None) -> T:
        """Run a call's body on a thread of its own; cancelling the task aborts the call."""
        self._enter(timeout)
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def finish(setter: Callable[[Any], None], value: object) -> None:
            if not done.done():
                setter(value)

        def run() -> None:
            self._owner = threading.get_ident()
            try:
                with calling(self._watch.deadline):
                    result = body()
            except BaseException as error:
                tell(done.set_exception, error)
            else:
                tell(done.set_result, result)

        def tell(setter: Callable[[Any], None], value: object) -> None:
            self._leave()
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody listens
                loop.call_soon_threadsafe(finish, setter, value)

        thread = threading.Thread(target=run, name=f"weightwire-{self._role}", daemon=True)
        try:
            thread.start()
        except BaseException:
            self._leave()
            raise
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            self._watch.cancel(f"the task that ran this {self._role}'s call was cancelled")
            while not done.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([done])
            if not done.cancelled():
                done.exception()  # retrieved: the cancellation is what the caller sees
            raise
        except GeneratorExit:  # the task was dropped with its loop: nothing can be awaited
            self._watch.cancel(f"the task that ran this {self._role}'s call is gone")
            raise
        finally:
            if done.done():
                thread.join()


def ranks_of(
    rank: int | None, world_size: int | None, group: torch.distributed.ProcessGroup | None
) -> tuple[int, int]:
    """A side's rank and world size, from numbers or from a process group."""
    for name, number in (("rank", rank), ("world_size", world_size)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int)):
            raise ConfigError(f"{name}={number!r} isn't a whole number: pass an int")
    if group is not None:
        if rank is not None or world_size is not None:
            raise ConfigError("group= and rank=/world_size= say the same thing: give one of them")
        if not isinstance(group, torch.distributed.ProcessGroup):
            raise ConfigError(f"group={group!r} isn't a torch.distributed process group")
        return group.rank(), group.size()
    if rank is None and world_size is not None and world_size > 1:
        raise ConfigError(f"world_size={world_size} without rank=: say which rank this process is")
    rank, world_size = rank or 0, 1 if world_size is None else world_size
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank {rank} isn't below world_size {world_size}: count ranks from 0")
    return rank, world_size


def slot_device(wanted: str | None, own: torch.device, backend: Backend) -> torch.device:
    """Where a transport's slots should lie.

    Args:
        wanted: what the caller asked for.
        own: where the tensors lie.

    Raises:
        ConfigError: ``wanted`` is no device.
        UnsupportedOperation: the backend can't use it.
    """
    devices = backend.capabilities.devices
    if wanted is None:
        return own if own.type in devices else torch.device("cpu")
    try:
        device = torch.device(wanted)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device={wanted!r} is no device: write 'cpu' or 'cuda:0'") from error
    if device.type not in devices:
        raise UnsupportedOperation(
            f"backend {backend.name!r} can't use device {wanted!r}, only "
            f"{', '.join(sorted(devices))}: leave device= out, or choose another backend"
        )
    return device


def close_all(*closers: Callable[[], object]) -> None:
    """Run every closer; raise the first error once all have run."""
    with contextlib.ExitStack() as stack:
        for closer in reversed(closers):
            stack.callback(closer)
