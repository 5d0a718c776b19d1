"""A NIXL agent, wrapped: the only module that touches NIXL.

Locks.  NIXL runs in its STRICT mode, and each ``Agent`` has one re-entrant lock
around every call into it, because check-then-act on peers and handles needs more
than NIXL's own.  The lock is held for one call, never while waiting for a peer.
The only call that takes long is ``Transfer.post`` over shared memory: it makes
the copy itself, without the GIL.  Answers to peers' reads and their signals come
from NIXL's progress thread, which needs neither lock nor GIL.

It sleeps until something comes in: NIXL's Python wrapper leaves it spinning, at the
cost of a core, which is why the bindings below that wrapper are used here.

Never fork after an agent exists: its threads don't survive that.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import sys
import threading
import types
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weightwire.errors import BackendUnavailable, PeerLost, TransferError
from weightwire_nixl import ucx_log

__all__ = ["Agent", "Counters", "Descriptors", "Transfer", "library"]

log = logging.getLogger("weightwire.nixl")

Descriptors = NDArray[np.uint64]
"""N by 3: address, bytes, device."""

_CPU = torch.device("cpu")
Operation = Literal["READ", "WRITE"]

_PROGRESS_DELAY = {"cpu": 100, "cuda": 20}
"""Microseconds, by where the slots lie; 0 would spin.  A GPU moves a group within hundreds."""

_EXTRAS = {"nixl_cu12": "nixl", "nixl_cu13": "nixl-cu13"}
_importing = threading.Lock()
_library: Any = None


def library() -> Any:
    """NIXL's bindings, of the build that is installed and matches torch's CUDA.

    Raises:
        BackendUnavailable: none is, or it can't be imported; says what to install.
    """
    global _library
    with _importing:
        if _library is None:
            _library = _import(_choose())
        return _library


def _choose() -> str:
    installed = [name for name in _EXTRAS if importlib.util.find_spec(name) is not None]
    cuda = torch.version.cuda
    fits = list(_EXTRAS) if cuda is None else [f"nixl_cu{cuda.partition('.')[0]}"]
    for name in fits:
        if name in installed:
            return name
    extra = _EXTRAS.get(fits[0], "nixl")
    if installed:
        raise BackendUnavailable(
            f"the nixl backend has {installed[0]} here, and torch is built for CUDA {cuda}: "
            f"install the build that fits with `pip install 'weightwire[{extra}]'`"
        )
    raise BackendUnavailable(
        "the nixl backend needs NIXL, which isn't installed: install it with "
        f"`pip install 'weightwire[{extra}]'`"
    )


def _import(name: str) -> Any:
    """Import NIXL without what its logging module does to the process.

    That module closes every handler of the process (``dictConfig``), prints to
    stdout and clears ``logging.raiseExceptions``.  While its package is imported,
    another one stands in that hands out our logger; afterwards nothing is changed.
    """
    logging_name = f"{name}.logging"
    stands_in = logging_name not in sys.modules
    if stands_in:
        substitute = types.ModuleType(logging_name)
        substitute.get_logger = lambda _: log.getChild("library")  # type: ignore[attr-defined]
        sys.modules[logging_name] = substitute
    try:
        package = importlib.util.find_spec(name)
        for place in (package.submodule_search_locations or ()) if package is not None else ():
            ucx_log.capture(Path(place).resolve().parent / f"{name}.libs")
        return importlib.import_module(f"{name}._bindings")
    except ImportError as error:
        raise BackendUnavailable(
            f"NIXL ({name}) is installed, and can't be imported ({error}): reinstall it with "
            f"`pip install --force-reinstall 'weightwire[{_EXTRAS[name]}]'`"
        ) from error
    finally:
        if stands_in:
            del sys.modules[logging_name]


@dataclass
class Counters:
    """What an agent did: preparation must not grow from version to version.

    Attributes:
        registrations: memory regions registered.
        peers: peers added.
        lists: descriptor lists prepared.
        transfers: transfers prepared.
        descriptors: of all these transfers, at one end.
        posts: transfers posted; grows with every group.
    """

    registrations: int = 0
    peers: int = 0
    lists: int = 0
    transfers: int = 0
    descriptors: int = 0
    posts: int = 0

    def prepared(self) -> tuple[int, ...]:
        """All but the posts."""
        return (self.registrations, self.peers, self.lists, self.transfers, self.descriptors)


class Agent:
    """One incarnation of one rank's end of NIXL.

    Args:
        role: for the name, which is unique: ``role#uuid``.
        options: parameters of the UCX engine.
        counters: where to count; by default its own.
        device: where the rank's slots lie.

    Raises:
        BackendUnavailable: UCX can't be started here.
    """

    def __init__(
        self,
        role: str,
        options: Mapping[str, str] | None = None,
        counters: Counters | None = None,
        device: torch.device = _CPU,
    ) -> None:
        self._nixl = library()
        self.name = f"{role}#{uuid.uuid4().hex}"
        self.counters = counters if counters is not None else Counters()
        self._lock = threading.RLock()
        self._peers: set[str] = set()
        self._transfers: set[Transfer] = set()
        self._registered: list[Any] = []
        options = dict(options or {})
        self._shared_from = int(options.get("split_batch_size", 0))
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = True
        config.useListenThread = False
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_STRICT
        config.pthrDelay = _PROGRESS_DELAY.get(device.type, 100)
        try:
            self._agent = self._nixl.nixlAgent(self.name, config)
            self._agent.createBackend("UCX", options)
        except Exception as error:
            ucx_log.take_over()
            raise BackendUnavailable(
                f"NIXL can't start UCX here ({_text(error)}): check UCX_TLS and UCX_NET_DEVICES "
                "(UCX_TLS=sm alone isn't enough: add tcp, and cuda where there are GPUs)"
            ) from error
        self._errors = _errors_of(self._nixl)

    # ---------------------------------------------------------------------- memory

    def register(self, memory: Tensor, what: str) -> None:
        """Make contiguous memory readable and writable for peers.

        Raises:
            TransferError: it can't be registered; says what to do.
        """
        with self._lock:
            try:
                region = (memory.data_ptr(), memory.nbytes, max(0, memory.get_device()), "")
                regions = self._nixl.nixlRegDList(self._segment(memory.device.type), [region])
                self._agent.registerMem(regions, [])
                self._registered.append(regions)
            except Exception as error:
                raise TransferError(
                    f"{what} ({memory.nbytes} bytes on {memory.device}) can't be registered with "
                    f"NIXL ({_text(error)}): {_registration_remedy(memory.device.type)}"
                ) from error
            self.counters.registrations += 1

    def register_pieces(self, pieces: Sequence[tuple[int, int, int]], device: str) -> bytes:
        """Register pieces of memory: address, bytes, device number (below 0: host memory).

        Returns:
            Metadata of these alone, for peers that know this agent: ``extend``.

        Raises:
            TransferError: one can't be registered; says what to do.
        """
        with self._lock:
            rows = [(address, nbytes, max(0, number), "") for address, nbytes, number in pieces]
            regions = self._nixl.nixlRegDList(self._segment(device), rows)
            try:
                self._agent.registerMem(regions, [])
            except Exception as error:
                raise TransferError(
                    f"{len(rows)} pieces of the trainer's memory on {device} can't be registered "
                    f"with NIXL ({_text(error)}): {_registration_remedy(device)}, or use "
                    "zero_copy=False"
                ) from error
            self._registered.append(regions)
            self.counters.registrations += len(rows)
            with self._translated("this agent", "describe"):
                return bytes(self._agent.getLocalPartialMD(regions, False, []))

    def extend(self, name: str, metadata: bytes, who: str) -> None:
        """Learn of more memory of a peer that is known.

        Raises:
            PeerLost: it can't be reached.
        """
        with self._lock, self._translated(who, "read what is new from"):
            self._agent.loadRemoteMD(metadata)

    def metadata(self) -> bytes:
        """What peers need to reach this agent and its registered memory."""
        with self._lock, self._translated("this agent", "describe"):
            return bytes(self._agent.getLocalMD())

    # ---------------------------------------------------------------------- peers

    def add(self, name: str, metadata: bytes, who: str) -> None:
        """Make a peer reachable; nothing happens if it is already.

        Raises:
            PeerLost: it can't be reached; or it isn't the one that was named.
        """
        with self._lock:
            if name in self._peers:
                return
            try:
                with self._translated(who, "reach"):
                    found = self._agent.loadRemoteMD(metadata)
            except TransferError as error:
                if self._is_closed or isinstance(error, PeerLost):
                    raise
                # Its metadata came whole: nobody answers there.
                raise PeerLost(
                    f"{who} can't be reached (NIXL: {_text(error.__cause__)}): it is gone, or no "
                    "transport connects the two; restart it, or check UCX_TLS on both sides"
                ) from error
            found = found.decode() if isinstance(found, bytes) else str(found)
            if found != name:
                raise PeerLost(f"{who} describes another NIXL agent than its own: restart it")
            self._peers.add(name)
            self.counters.peers += 1

    def knows(self, name: str) -> bool:
        return name in self._peers

    def remove(self, name: str) -> None:
        """Forget a peer.  Transfers with it are released first, by whoever made them."""
        with self._lock:
            if name in self._peers:
                self._peers.discard(name)
                # It is gone already when the connection broke.
                with contextlib.suppress(Exception):
                    self._agent.invalidateRemoteMD(name)

    def notify(self, name: str, message: bytes, who: str) -> None:
        """Send a message, which arrives once, in whatever order.

        Raises:
            PeerLost: the peer is gone.
        """
        with self._lock, self._translated(who, "signal"):
            self._agent.genNotif(name, message)

    def drain(self) -> dict[str, list[bytes]]:
        """Messages that have come in, by sender; each is returned once."""
        with self._lock, self._translated("this agent", "ask"):
            found = self._agent.getNotifs({}, [])
        return cast("dict[str, list[bytes]]", found)

    # ---------------------------------------------------------------------- transfers

    def prepare(
        self,
        operation: Operation,
        peer: str,
        here: Descriptors,
        there: Descriptors,
        *,
        devices: tuple[str, str],
        who: str,
        cut: bool = False,
    ) -> Transfer:
        """A transfer that can be posted again and again.

        Args:
            here, there: equally many, of equal lengths; sorted by address so that NIXL
                merges neighbours.
            devices: torch device types here and there.
            cut: neighbours stay apart, for threads to share them.
        """
        with self._lock, self._translated(who, "prepare a transfer with"):
            local = self._list(self._nixl.NIXL_INIT_AGENT, here, devices[0])
            remote = self._list(peer, there, devices[1])
            indices = np.arange(len(here), dtype=np.int32)
            handle = self._agent.makeXferReq(
                self._operation(operation), local, indices, remote, indices, b"", [], cut
            )
            self.counters.lists += 2
            self.counters.transfers += 1
            self.counters.descriptors += len(here)
            is_shared = 0 < self._shared_from <= len(here)
            transfer = Transfer(self, handle, (local, remote), who, is_shared)
            self._transfers.add(transfer)
            return transfer

    def _list(self, peer: str, descriptors: Descriptors, device: str) -> int:
        found = self._nixl.nixlXferDList(self._segment(device), descriptors)
        return int(self._agent.prepXferDlist(peer, found, []))

    def _operation(self, operation: Operation) -> Any:
        return self._nixl.NIXL_READ if operation == "READ" else self._nixl.NIXL_WRITE

    def _segment(self, device: str) -> Any:
        return self._nixl.DRAM_SEG if device == "cpu" else self._nixl.VRAM_SEG

    # ---------------------------------------------------------------------- the end

    @property
    def in_flight(self) -> bool:
        """Whether a transfer may still touch memory."""
        with self._lock:
            return any(not transfer.is_over() for transfer in self._transfers)

    def close(self) -> None:
        """Release everything.  Only with nothing in flight: what is can't be cancelled."""
        with self._lock:
            if self._is_closed:
                return
            agent = self._agent
            for transfer in list(self._transfers):
                transfer.release()
            for name in list(self._peers):
                self.remove(name)
            for registered in self._registered:
                with contextlib.suppress(Exception):
                    agent.deregisterMem(registered, [])
            self._registered.clear()
            del self._agent

    @property
    def _is_closed(self) -> bool:
        return not hasattr(self, "_agent")

    @contextlib.contextmanager
    def _translated(self, who: str, doing: str) -> Iterator[None]:
        """NIXL's exceptions have no base in common: each becomes one of ours."""
        if self._is_closed:
            raise TransferError(f"can't {doing} {who}: this agent is closed")
        try:
            yield
        except self._errors.lost as error:
            ucx_log.take_over()
            raise PeerLost(
                f"{who} is gone (NIXL: {_text(error)}): restart it, and send again"
            ) from error
        except self._errors.others as error:
            ucx_log.take_over()
            raise TransferError(
                f"NIXL can't {doing} {who} ({_text(error)}): its log on stderr says why; "
                "NIXL_LOG_LEVEL=DEBUG says more"
            ) from error


class Transfer:
    """A prepared transfer: posted, polled, posted again.

    Attributes:
        lingers: it failed, and threads of NIXL shared it: when one has failed, NIXL lets go
            of the others' parts, which may still be copied as long as the peer lives.
    """

    def __init__(
        self, agent: Agent, handle: int, lists: tuple[int, int], who: str, is_shared: bool = False
    ) -> None:
        self._owner = agent
        self._handle = handle
        self._lists = lists
        self._who = who
        self._running = False
        self._failed = False
        self._is_shared = is_shared
        self.lingers = False

    def post(self, message: bytes = b"") -> bool:
        """Start it; True if it is done already.

        Args:
            message: for the peer, sent when the bytes are there.  A transfer is posted
                either always with one or never: NIXL repeats the last one otherwise.

        Raises:
            PeerLost: the peer is gone.
        """
        with self._owner._lock, self._owner._translated(self._who, "start a transfer with"):
            self._owner.counters.posts += 1
            self._running = True  # first: an interruption must not hide it
            self._failed = False
            try:
                state = self._owner._agent.postXferReq(self._handle, message)
            except Exception:
                self._fail()
                raise
            return self._done(state)

    def done(self) -> bool:
        """Whether it is complete.  Must be polled: that is what sends its message.

        Raises:
            PeerLost: the peer is gone.
        """
        with self._owner._lock:
            if self._failed:  # whoever asked first may have been told, and not who asks now
                raise PeerLost(f"{self._who} is gone: a transfer with it failed; send again")
            if not self._running:
                return True
            with self._owner._translated(self._who, "finish a transfer with"):
                try:
                    state = self._owner._agent.getXferStatus(self._handle)
                except Exception:
                    self._fail()
                    raise
                return self._done(state)

    def is_over(self) -> bool:
        """Whether it touches memory no more, done or failed."""
        with contextlib.suppress(TransferError):
            if not self.done():
                return False
        return not self.lingers

    def _fail(self) -> None:
        self._running, self._failed = False, True
        self.lingers = self._is_shared

    def release(self) -> None:
        """Give its lists back.  Only when it is over."""
        with self._owner._lock:
            if self not in self._owner._transfers:
                return
            self._owner._transfers.discard(self)
            agent = self._owner._agent
            with contextlib.suppress(Exception):
                agent.releaseXferReq(self._handle)
            for prepared in self._lists:
                with contextlib.suppress(Exception):
                    agent.releasedDlistH(prepared)

    def _done(self, state: Any) -> bool:
        nixl = self._owner._nixl
        self._running = state == nixl.NIXL_IN_PROG
        if state not in (nixl.NIXL_IN_PROG, nixl.NIXL_SUCCESS):
            self._fail()
            raise PeerLost(f"a transfer with {self._who} failed: restart it, and send again")
        return not self._running


@dataclass(frozen=True)
class _Errors:
    lost: tuple[type[BaseException], ...]
    others: tuple[type[BaseException], ...]


def _errors_of(bindings: Any) -> _Errors:
    found = {
        name: kind
        for name, kind in vars(bindings).items()
        if isinstance(kind, type) and issubclass(kind, Exception)
    }
    # A disconnect drops the peer's metadata: what comes after it isn't found.
    lost = [found.pop(name) for name in ("nixlRemoteDisconnectError",) if name in found]
    lost += [found.pop(name) for name in ("nixlNotFoundError",) if name in found]
    # pybind11 raises these for what it can't convert.
    return _Errors(tuple(lost), (*found.values(), RuntimeError, ValueError, TypeError))


def _text(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {error}"


def _registration_remedy(device: str) -> str:
    if device == "cuda":
        return (
            "expandable segments can't be registered; unset expandable_segments in "
            "PYTORCH_CUDA_ALLOC_CONF, or check that UCX has CUDA support here"
        )
    return "raise the limit of locked memory (`ulimit -l`), or lower group_bytes"
