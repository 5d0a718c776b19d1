"""A trainer rank or an inference rank as a process that a test steps through its life.

Run as ``process_worker.py SOCKET``: imports once, then forks one worker for each
connection.  A worker's standard input and output are that connection, one JSON
object a line.  It ends when the connection does.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import ctypes
import faulthandler
import gc
import hashlib
import importlib.util
import json
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import seeded_models as models
import torch
from torch import Tensor

import weightwire
from weightwire.contract import (
    Backend,
    Context,
    Offer,
    Policy,
    ReceiverTransport,
    Seal,
    SenderTransport,
)
from weightwire.deadline import Watch
from weightwire.errors import BackendUnavailable
from weightwire.plugins import registry
from weightwire.sources import WeightSource, as_source
from weightwire.table import Region, TensorTable
from weightwire.targets import MappingTarget, ModuleTarget, WeightTarget
from weightwire_nccl.epoch import Epoch

PR_SET_PDEATHSIG = 1

# ------------------------------------------------------------------ what the test hears

_output_lock = threading.Lock()


def emit(**message: Any) -> None:
    line = (json.dumps(message) + "\n").encode()
    with _output_lock:
        view = memoryview(line)
        while view:
            view = view[os.write(1, view) :]


# ------------------------------------------------------------------ points at which to stop


class Gate:
    """What happens when a point is reached for the ``after + 1``-th time."""

    def __init__(self, do: str, after: int) -> None:
        self.do = do
        self.left = after
        self.open = threading.Event()


class Planned(RuntimeError):
    """An engine's own failure, raised because a test asked for it."""


GATES: dict[str, Gate] = {}
COUNTS: collections.Counter[str] = collections.Counter()


def reach(point: str, flip: Callable[[bool], None] | None = None) -> None:
    COUNTS[point] += 1
    gate = GATES.get(point)
    if gate is None:
        return
    if gate.left > 0:
        gate.left -= 1
        return
    del GATES[point]
    if gate.do == "stop":
        OPENABLE[point] = gate
        emit(event="at", point=point)
        gate.open.wait()
    elif gate.do == "raise":
        raise Planned(f"planned failure at {point}")
    elif gate.do.startswith("flip"):
        assert flip is not None, point
        flip(gate.do == "flip-small")
    elif gate.do == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


OPENABLE: dict[str, Gate] = {}


class SteppedSource(WeightSource):
    def __init__(self, model: models.Model) -> None:
        self._source = as_source(model)

    def tensors(self) -> Mapping[str, Tensor]:
        reach("source.tensors")
        return self._source.tensors()


class _Stepped:
    """Mixed into a target: stops where a test says."""

    staged = False

    def plan(self, table: TensorTable) -> Sequence[Region]:
        reach("target.plan")
        return super().plan(table)  # type: ignore[misc]

    def begin(self, version: int) -> None:
        reach("target.begin")
        super().begin(version)  # type: ignore[misc]

    def landing(self, region: Region) -> Tensor | None:
        return None if self.staged else super().landing(region)  # type: ignore[misc]

    def write(self, group: int, tensors: Mapping[Region, Tensor]) -> None:
        reach("target.write")
        super().write(group, tensors)  # type: ignore[misc]

    def commit(self) -> None:
        reach("target.commit")
        super().commit()  # type: ignore[misc]
        filled = dict(enumerate(self.current().values()))  # type: ignore[attr-defined]
        reach("target.committed", lambda small: _flip(filled, small))

    def rollback(self, error: BaseException) -> bool:
        reach("target.rollback")
        return super().rollback(error)  # type: ignore[misc]


class SteppedMapping(_Stepped, MappingTarget):
    pass


class SteppedModule(_Stepped, ModuleTarget):
    pass


# ------------------------------------------------------------------ a third party's backends

MOVING = threading.Event()
"""Set from the begin of a transport's version to its finish."""


class SteppedSender(SenderTransport):
    """Passes everything on, and stops where a test says."""

    def __init__(self, inner: SenderTransport) -> None:
        self._inner = inner
        self.keep = inner.keep

    def set_table(self, table: TensorTable) -> None:
        self._inner.set_table(table)

    def describe(self) -> bytes:
        return self._inner.describe()

    @property
    def path(self) -> str:  # type: ignore[override]
        return self._inner.path

    def begin(self, offer: Offer, readers: Mapping[str, Sequence[bytes]]) -> None:
        reach("sender.begin")
        MOVING.set()
        self._inner.begin(offer, readers)

    def slot(self, group: int, nbytes: int) -> Tensor | None:
        self._in_slot = self._inner.slot(group, nbytes)
        return self._in_slot

    def put(self, group: int, tensors: Mapping[int, Tensor], seal: Seal) -> None:
        if self._in_slot is None:
            tensors = {i: tensor.clone() for i, tensor in tensors.items()}
        reach("sender.put", lambda small: _flip(tensors, small))
        self._inner.put(group, tensors, seal)

    def finish(self) -> None:
        reach("sender.finish")
        self._inner.finish()
        MOVING.clear()

    def publish(self) -> None:
        reach("sender.publish")
        self._inner.publish()

    def lose(self, receiver_id: str) -> None:
        self._inner.lose(receiver_id)

    def abort(self, error: BaseException) -> None:
        self._inner.abort(error)

    def drop(self, policy: Policy) -> None:
        self._inner.drop(policy)

    def close(self) -> None:
        self._inner.close()


class SteppedReceiver(ReceiverTransport):
    def __init__(self, inner: ReceiverTransport) -> None:
        self._inner = inner

    def check(self, offer: Offer) -> None:
        reach("receiver.check")
        self._inner.check(offer)

    def set_plan(self, table: TensorTable, regions: Sequence[Region]) -> None:
        self._inner.set_plan(table, regions)

    def describe(self) -> bytes:
        return self._inner.describe()

    @property
    def path(self) -> str:  # type: ignore[override]
        return self._inner.path

    def begin(self, offer: Offer) -> None:
        reach("receiver.begin")
        MOVING.set()
        self._inner.begin(offer)

    def slot(self, group: int, nbytes: int) -> Tensor | None:
        return self._inner.slot(group, nbytes)

    def post(self, group: int, regions: Mapping[int, Tensor]) -> None:
        reach("receiver.post")
        self._inner.post(group, regions)

    def landed(self, group: int) -> bool:
        return self._inner.landed(group)

    def fetch(self, group: int, regions: Mapping[int, Tensor]) -> Sequence[Seal]:
        reach("receiver.fetch")
        seals = self._inner.fetch(group, regions)
        reach("receiver.fetched", lambda small: _flip(regions, small))
        return seals

    def finish(self) -> None:
        reach("receiver.finish")
        self._inner.finish()
        MOVING.clear()

    def abort(self, error: BaseException) -> None:
        self._inner.abort(error)

    def close(self) -> None:
        self._inner.close()


def _flip(tensors: Mapping[int, Tensor], small: bool) -> None:
    """One bit of the smallest tensor that has any, or of the largest."""
    choose = min if small else max
    victim = choose((t for t in tensors.values() if t.nbytes), key=lambda tensor: tensor.nbytes)
    raw = victim.reshape(-1).view(torch.uint8)
    raw[raw.numel() // 2] ^= 4


class SteppedBackend(Backend):
    """``stepped-memory`` or ``stepped-filesystem``: the built-in one with points to stop at."""

    def __init__(self, inner: Backend) -> None:
        self._inner = inner
        self.name = f"stepped-{inner.name}"  # type: ignore[misc]
        self.summary = inner.summary  # type: ignore[misc]
        self.config = inner.config  # type: ignore[misc]
        self.capabilities = inner.capabilities  # type: ignore[misc]

    def open_sender(self, context: Context) -> SenderTransport:
        return SteppedSender(self._inner.open_sender(context))

    def open_receiver(self, context: Context) -> ReceiverTransport:
        return SteppedReceiver(self._inner.open_receiver(context))


def point_at_transfers() -> None:
    """A point at which a NIXL transfer of this process is under way: posted, and not done."""
    from weightwire_nixl.agent import Transfer

    post = Transfer.post

    def pointed(transfer: Transfer, message: bytes = b"") -> bool:
        done = post(transfer, message)
        if not done:
            reach("transfer.posted")
        return done

    Transfer.post = pointed  # type: ignore[method-assign]


class MissingLibraryBackend(SteppedBackend):
    """Installed, but its library isn't."""

    def probe(self) -> None:
        raise BackendUnavailable(
            "backend 'no-library' needs libfaraway, which isn't installed: "
            "install it with `pip install faraway`"
        )


class Describes:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @weightwire.hookimpl
    def weightwire_describe_backend(self) -> Backend:
        return self._backend


class Observer:
    """Remembers what it is told; a bad one then raises."""

    def __init__(self, bad: bool) -> None:
        self.bad = bad
        self.seen: list[dict[str, Any]] = []

    def _note(self, hook: str, record: weightwire.VersionRecord) -> None:
        self.seen.append(
            {
                "hook": hook,
                "role": record.role,
                "member": record.member_id,
                "version": record.version,
                "session": record.session_url,
                "digest": record.report.digest if record.report is not None else None,
                "error": type(record.error).__name__ if record.error is not None else None,
            }
        )
        if self.bad:
            raise RuntimeError("this observer always fails")

    @weightwire.hookimpl
    def weightwire_published(self, record: weightwire.VersionRecord) -> None:
        self._note("published", record)

    @weightwire.hookimpl
    def weightwire_applied(self, record: weightwire.VersionRecord) -> None:
        self._note("applied", record)

    @weightwire.hookimpl
    def weightwire_aborted(self, record: weightwire.VersionRecord) -> None:
        self._note("aborted", record)


def step_forming() -> None:
    """``nccl.form``: a member has come to the roll call, and isn't connected yet."""
    form = Epoch._form

    def stepped(self: Epoch, opening: Any) -> None:
        reach("nccl.form")
        form(self, opening)

    Epoch._form = stepped  # type: ignore[method-assign]


def install_plugins() -> None:
    for name in ("memory", "filesystem", "nccl", "nixl"):
        registry().register(Describes(SteppedBackend(registry().backend(name))), f"stepped-{name}")
    missing = MissingLibraryBackend(registry().backend("memory"))
    missing.name = "no-library"  # type: ignore[misc]
    registry().register(Describes(missing), "no-library")


# ------------------------------------------------------------------ what weightwire waits for

_noted: str | None = None


def _note_wait(waiting_for: str) -> None:
    global _noted
    if waiting_for != _noted and OPENED:
        _noted = waiting_for
        emit(event="waiting", for_what=waiting_for)


def report_waits() -> None:
    """Tell the test whenever a wait begins: it then acts at a known place, without sleeping."""
    check, until = Watch.check, Watch.until

    def noting_check(self: Watch, waiting_for: str = "the version", *rest: Any) -> None:
        _note_wait(waiting_for)
        check(self, waiting_for, *rest)

    def noting_until(self: Watch, condition: Any, waiting_for: str, *rest: Any, **more: Any) -> Any:
        _note_wait(waiting_for)
        return until(self, condition, waiting_for, *rest, **more)

    Watch.check = noting_check  # type: ignore[method-assign]
    Watch.until = noting_until  # type: ignore[method-assign]


OPENED = threading.Event()  # set while a command runs

# ------------------------------------------------------------------ commands


class Member:
    """One handle of this process, and its model."""

    def __init__(self, handle: Any, model_name: str, model: models.Model, seed: int) -> None:
        self.handle = handle
        self.model_name = model_name
        self.model = model
        self.seed = seed


MEMBERS: dict[str, Member] = {}
OBSERVERS: list[str] = []
OBSERVER: Observer | None = None
CANCEL = threading.Event()


def _member(name: str = "main") -> Member:
    return MEMBERS[name]


def do_open_sender(
    backend: Any, session: str, model: str, seed: int, name: str = "main", **options: Any
) -> dict[str, Any]:
    built = models.build(model)
    handle = weightwire.open_sender(
        backend, session=session, source=SteppedSource(built), **options
    )
    MEMBERS[name] = Member(handle, model, built, seed)
    return _about(handle)


def do_open_receiver(
    backend: Any,
    session: str,
    model: str,
    seed: int,
    receiver_id: str,
    name: str = "main",
    staged: bool = False,
    plain: bool = False,
    target_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    built = models.build(model)
    models.prefill(built)
    kind = SteppedModule if isinstance(built, torch.nn.Module) else SteppedMapping
    target: Any = built if plain else kind(built, **(target_options or {}))  # type: ignore[arg-type]
    if isinstance(target, WeightTarget):
        target.staged = staged  # type: ignore[attr-defined]
    handle = weightwire.open_receiver(
        backend, session=session, target=target, receiver_id=receiver_id, **options
    )
    MEMBERS[name] = Member(handle, model, built, seed)
    return _about(handle)


def _about(handle: Any) -> dict[str, Any]:
    session = handle._session
    return {
        "session_id": session.id,
        "url": session.url,
        "incarnation": handle._member.incarnation,
        "backend": handle.backend,
    }


def do_fill(version: int, name: str = "main") -> None:
    member = _member(name)
    models.fill(member.model_name, member.model, version, member.seed)


def do_scribble(name: str = "main") -> None:
    models.prefill(_member(name).model)


def do_replace_storage(version: int, name: str = "main") -> None:
    """New memory for every tensor, as an optimizer that offloads would give."""
    member = _member(name)
    if isinstance(member.model, torch.nn.Module):
        for parameter in member.model.parameters():
            parameter.data = torch.empty_like(parameter)
    else:
        for key in list(member.model):
            member.model[key] = torch.empty_like(member.model[key])  # type: ignore[index]
    do_fill(version, name)


def do_send(
    version: Any,
    name: str = "main",
    fill: bool = True,
    scribble: bool = False,
    **options: Any,
) -> dict[str, Any]:
    if fill and isinstance(version, int):
        do_fill(version, name)
    with timed():
        report = _member(name).handle.send(version, **options)
    if scribble:  # at once: the source may change when send has returned
        do_scribble(name)
    return report.to_dict()


def do_receive(name: str = "main", **options: Any) -> dict[str, Any]:
    with timed():
        return _member(name).handle.receive(**options).to_dict()


def _insist(call: Callable[[float], Any], seconds: float) -> int:
    """Call until it succeeds, as a training or serving loop does; returns the failures."""
    end = time.monotonic() + seconds
    failures = 0
    while True:
        try:
            call(max(0.1, end - time.monotonic()))
        except (weightwire.TransferError, weightwire.SessionError):
            failures += 1
            if time.monotonic() > end:
                raise
        else:
            return failures


def do_follow(minimum: int, seconds: float, name: str = "main") -> int:
    """Receive until a version of at least ``minimum`` is wholly there."""
    handle = _member(name).handle

    def call(left: float) -> None:
        if (handle.version or 0) < minimum:
            handle.receive(left, minimum=minimum)

    return _insist(call, seconds)


def do_lead(version: int, seconds: float, name: str = "main") -> int:
    """Send a version until every receiver of the roster has applied it."""
    do_fill(version, name)
    handle = _member(name).handle
    return _insist(lambda left: handle.send(version, wait="applied", timeout=left), seconds)


def do_begin(name: str = "main", **options: Any) -> int:
    with timed():
        return int(_member(name).handle.begin(**options).policy.version)


def do_fetch(name: str = "main") -> None:
    with timed():
        _member(name).handle.fetch()


def do_commit(name: str = "main") -> dict[str, Any]:
    with timed():
        return _member(name).handle.commit().to_dict()


def do_abort(name: str = "main") -> None:
    _member(name).handle.abort()


def do_poll(name: str = "main") -> int | None:
    with timed():
        return _member(name).handle.poll()


def do_close(name: str = "main") -> None:
    _member(name).handle.close()


def do_version(name: str = "main") -> int | None:
    return _member(name).handle.version


def do_tainted(name: str = "main") -> str | None:
    return _member(name).handle.tainted


def do_async(
    call: str, name: str = "main", cancellable: bool = False, **options: Any
) -> dict[str, Any]:
    """``asend`` or ``areceive``, with a ticker that shows whether the loop goes on."""
    member = _member(name)
    if call == "asend":
        do_fill(options["version"], name)

    async def tick(gaps: list[float]) -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0.005)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    async def cancel(task: asyncio.Task[Any]) -> None:
        while not CANCEL.is_set():
            await asyncio.sleep(0.005)
        task.cancel()

    async def body() -> dict[str, Any]:
        gaps: list[float] = []
        ticker = asyncio.ensure_future(tick(gaps))
        task = asyncio.ensure_future(getattr(member.handle, call)(**options))
        helpers = [ticker]
        if cancellable:
            helpers.append(asyncio.ensure_future(cancel(task)))
        try:
            with timed():
                report = (await task).to_dict()
            return {"cancelled": False, "report": report, "ticks": len(gaps), "gap": max(gaps)}
        except asyncio.CancelledError:
            return {"cancelled": True, "ticks": len(gaps), "gap": max(gaps, default=0.0)}
        finally:
            for helper in helpers:
                helper.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)

    return asyncio.run(body())


def do_cancel() -> None:
    CANCEL.set()


def do_holds(versions: Sequence[int], name: str = "main") -> Any:
    """Which of these versions the model is, byte for byte; or ``pristine``, or ``mixed``."""
    member = _member(name)
    have = {key: models.raw(value) for key, value in models.tensors_of(member.model).items()}
    for version in versions:
        want = models.expected(member.model_name, member.model, version, member.seed)
        if all(have[key] == models.raw(value) for key, value in want.items()):
            return version
    fresh = models.build(member.model_name)
    models.prefill(fresh)
    pristine = {key: models.raw(value) for key, value in models.tensors_of(fresh).items()}
    return "pristine" if have == pristine else "mixed"


def do_compare(version: int, name: str = "main") -> dict[str, str]:
    """Tensor by tensor: ``new`` (this version), ``pristine`` or ``other``."""
    member = _member(name)
    want = models.expected(member.model_name, member.model, version, member.seed)
    fresh = models.build(member.model_name)
    models.prefill(fresh)
    pristine = models.tensors_of(fresh)
    result = {}
    for key, value in models.tensors_of(member.model).items():
        raw = models.raw(value)
        result[key] = (
            "new"
            if raw == models.raw(want[key])
            else "pristine"
            if raw == models.raw(pristine[key])
            else "other"
        )
    return result


def do_same_bits(one: str, other: str, name: str = "main") -> bool:
    tensors = models.tensors_of(_member(name).model)
    return models.raw(tensors[one]) == models.raw(tensors[other])


def do_addresses(name: str = "main") -> dict[str, int]:
    return {key: t.data_ptr() for key, t in models.tensors_of(_member(name).model).items()}


STORE_OPERATIONS: list[str] = []


def do_watch_store(name: str = "main") -> None:
    """From now on note what the thread that moves bytes asks of the session's store."""
    store = _member(name).handle._session.store
    main = threading.current_thread()

    def watched(operation: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any, **more: Any) -> Any:
            if MOVING.is_set() and threading.current_thread() is main:
                STORE_OPERATIONS.append(f"{operation} {args[0]}")
            return call(*args, **more)

        return noting

    for operation in ("get", "put", "create", "delete", "children", "delete_tree"):
        setattr(store, operation, watched(operation, getattr(store, operation)))


def do_store_operations() -> list[str]:
    """What was asked of it between the begin and the finish of a version."""
    return STORE_OPERATIONS


def do_nixl(name: str = "main") -> dict[str, Any]:
    """What the nixl transport of a handle has prepared and set aside."""
    transport = _member(name).handle._transport
    transport = getattr(transport, "_inner", transport)
    agent = transport._agent
    slots = transport._pool.slots if hasattr(transport, "_pool") else transport._slots
    return {
        "prepared": list(transport.counters.prepared()),
        "posts": transport.counters.posts,
        "path": transport.path,
        "agent": agent.name if agent is not None else None,
        "peers": len(agent._peers) if agent is not None else 0,
        "aside": len(transport._aside) if hasattr(transport, "_aside") else 0,
        "arena": hashlib.blake2b(slots._memory.numpy()).hexdigest(),
        "slots": [slot.index for slot in transport._pool if slot.outstanding]
        if hasattr(transport, "_pool")
        else [],
    }


def do_counts() -> dict[str, int]:
    """How often each point was reached."""
    return dict(COUNTS)


def do_hash(name: str = "main") -> str:
    total = hashlib.blake2b(digest_size=16)
    for key, value in sorted(models.tensors_of(_member(name).model).items()):
        total.update(key.encode() + models.raw(value))
    return total.hexdigest()


def do_distinct(key: str, name: str = "main") -> int:
    return int(models.tensors_of(_member(name).model)[key].unique().numel())


def do_arm(point: str, do: str = "stop", after: int = 0) -> None:
    GATES[point] = Gate(do, after)


def do_release(point: str) -> None:
    OPENABLE.pop(point).open.set()


def do_disarm() -> None:
    GATES.clear()
    while OPENABLE:
        OPENABLE.popitem()[1].open.set()


def do_observe(bad: bool = False) -> None:
    global OBSERVER
    OBSERVER = Observer(bad)
    registry().register(OBSERVER, "observer", "observing test")


def do_observed() -> list[dict[str, Any]]:
    assert OBSERVER is not None
    return OBSERVER.seen


def do_fork(call: str, name: str = "main", **options: Any) -> dict[str, Any]:
    """What a call on the handle does in a forked child."""
    handle = _member(name).handle
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            getattr(handle, call)(**options)
            answer = {"error": None, "message": ""}
        except BaseException as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        os.write(writing, json.dumps(answer).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text)


def do_break_connections() -> int:
    """Cut this process's TCP connections to others, as networks do; says how many there were."""
    found: dict[tuple[Any, Any], socket.socket] = {}
    with contextlib.ExitStack() as stack:
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                connection = stack.enter_context(socket.socket(fileno=os.dup(int(name))))
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    found[connection.getsockname(), connection.getpeername()] = connection
        others = [c for (here, there), c in found.items() if (there, here) not in found]
        for connection in others:
            connection.shutdown(socket.SHUT_RDWR)
    return len(others)


def do_usage() -> dict[str, Any]:
    """What must stay flat over many versions."""
    gc.collect()
    for thread in threading.enumerate():
        if "sweeper" in thread.name:
            thread.join(10)  # it holds a directory open while it deletes
    resident = 0
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            resident = int(line.split()[1]) << 10
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "fds": _descriptors(),
        "maps": Path("/proc/self/maps").read_text().count("weightwire-"),
        "rss": resident,
    }


def do_release_buffers(name: str = "main") -> dict[str, int]:
    """Bytes that this process holds before and after; nccl's buckets by its own count."""
    member = _member(name)
    transport = member.handle._transport
    transport = getattr(transport, "_inner", transport)

    def in_use() -> int:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what malloc keeps for later isn't held by anybody
        return int(do_usage()["rss"])

    before, staged = in_use(), getattr(transport, "staged_nbytes", 0)
    member.handle.release_buffers()
    left = getattr(transport, "staged_nbytes", 0)
    return {"before": before, "after": in_use(), "staged": staged, "left": left}


def _descriptors() -> int:
    """Open files, without the session record that the lease's thread may be writing now."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            count += "/records" not in str(Path(f"/proc/self/fd/{name}").readlink())
    return count


def do_reset() -> dict[str, Any]:
    """Close and forget everything; says what is left behind."""
    global OBSERVER
    do_disarm()
    CANCEL.clear()
    COUNTS.clear()
    MOVING.clear()
    STORE_OPERATIONS.clear()
    for member in list(MEMBERS.values()):
        member.handle.close()
    MEMBERS.clear()
    if OBSERVER is not None:
        registry().unregister("observer", "observing test")
        OBSERVER = None
    left = [
        thread.name
        for thread in threading.enumerate()
        if thread.name.startswith("weightwire") and not _ends_soon(thread)
    ]
    return {"threads": left}


def _ends_soon(thread: threading.Thread) -> bool:
    thread.join(10)  # an idle executor's thread needs a moment to see that it is over
    return not thread.is_alive()


def do_hello() -> int:
    return os.getpid()


def do_run(script: str, function: str, **args: Any) -> Any:
    """A function of a test folder's own script, which finds this module as ``process_worker``."""
    name = Path(script).stem
    if name not in sys.modules:
        sys.modules["process_worker"] = sys.modules[__name__]
        spec = importlib.util.spec_from_file_location(name, script)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return getattr(sys.modules[name], function)(**args)


# ------------------------------------------------------------------ serving

LAST_SECONDS = 0.0


@contextlib.contextmanager
def timed() -> Iterator[None]:
    """Seconds of the library's call alone, however it ends."""
    global LAST_SECONDS
    began = time.monotonic()
    try:
        yield
    finally:
        LAST_SECONDS = time.monotonic() - began


def run(message: dict[str, Any]) -> None:
    global LAST_SECONDS, _noted
    number = message["id"]
    command = globals()[f"do_{message['do']}"]
    began = time.monotonic()
    on_main = threading.current_thread() is threading.main_thread()
    if on_main:
        LAST_SECONDS, _noted = 0.0, None
    try:
        if on_main:
            OPENED.set()
        result = command(**message["args"])
        answer = {"id": number, "result": result}
    except BaseException as error:
        if on_main:
            OPENED.clear()
        names = [kind.__name__ for kind in type(error).__mro__]
        answer = {"id": number, "error": names, "message": str(error)}
        if not isinstance(error, weightwire.WeightWireError | KeyboardInterrupt):
            traceback.print_exc()
    finally:
        if on_main:
            OPENED.clear()
    seconds = LAST_SECONDS if on_main and LAST_SECONDS else time.monotonic() - began
    emit(seconds=seconds, **answer)


def serve() -> None:
    commands: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            message = json.loads(line)
            if message.get("now"):  # beside whatever the main thread does
                threading.Thread(target=run, args=(message,), daemon=True).start()
            else:
                commands.put(message)
        os._exit(0)

    threading.Thread(target=read, name="reader", daemon=True).start()
    emit(id=0, result=os.getpid(), seconds=0.0)
    while True:
        run(commands.get())


def _interrupt(number: int, frame: object) -> None:
    """Ctrl-C, but only while a command runs: the rig's own steps aren't what is tested."""
    if OPENED.is_set():
        raise KeyboardInterrupt


def become_worker(connection: socket.socket) -> None:
    """In the forked child."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with connection.makefile("r") as file:
        log = file.readline().strip()
    errors = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(connection.fileno(), 0)
    os.dup2(connection.fileno(), 1)
    os.dup2(errors, 2)
    connection.close()
    os.close(errors)
    sys.stdin = open(0)  # noqa: SIM115 - for the life of the process
    sys.stdout = sys.stderr
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    signal.signal(signal.SIGINT, _interrupt)
    torch.set_num_threads(1)
    install_plugins()
    step_forming()
    point_at_transfers()
    report_waits()
    serve()


def main(address: str) -> None:
    registry()
    for plugin in ("memory.sender", "memory.receiver"):
        __import__(f"weightwire.{plugin}")
    for plugin in ("sender", "receiver"):
        __import__(f"weightwire_filesystem.{plugin}")
        __import__(f"weightwire_nccl.{plugin}")
    __import__("torch.distributed.tensor")  # slow: once for all workers
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped at once
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    print("ready", flush=True)
    parent = os.getpid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            # Even a stopped worker ends with this process, and this one with the tests.
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)
            listener.close()
            become_worker(connection)
        connection.close()


def _end_with_parent() -> None:
    os.read(0, 1)  # not sys.stdin: its lock would be held in every fork
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
