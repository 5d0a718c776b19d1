"""What a worker can be told to do."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

import weightwire
from weightwire.config import select
from weightwire.deadline import Watch
from weightwire.errors import WeightWireError
from weightwire.plugins import probe, registry
from weightwire.targets import MappingTarget, WeightTarget
from weightwire_conformance import oracle
from weightwire_conformance.digest import digest
from weightwire_conformance.rig import edge
from weightwire_conformance.rig.leavings import Leavings, usage
from weightwire_conformance.rig.placements import Placed, part
from weightwire_conformance.rig.points import Action, Points

__all__ = ["Commands"]


@dataclass
class _Member:
    """The worker's handle and its weights."""

    handle: weightwire.WeightSender | weightwire.WeightReceiver
    model: oracle.Model
    tensors: dict[str, Tensor]
    seed: int
    cuts: oracle.Cuts = oracle.whole
    placed: Placed | None = None


class Clock(threading.local):
    """Of each thread: commands may run beside each other.

    Attributes:
        seconds: None where the command made no such call.
    """

    seconds: float | None = None


def _end(address: tuple[Any, ...]) -> tuple[str, int]:
    """One end of a connection, alike whether its socket is of IPv4 or an IPv6 one that maps it."""
    return address[0].removeprefix("::ffff:"), address[1]


def _now() -> float:
    """This thread's clock, which stands still while it waits for a processor.

    What a busy machine does to a call isn't the library's fault.
    """
    waited = Path("/proc/thread-self/schedstat").read_text().split()[1]
    return time.monotonic() - int(waited) * 1e-9


class Commands:
    """One method ``do_NAME`` for each command, called with its JSON arguments.

    Attributes:
        clock: how long the library's own call took on this thread.
    """

    def __init__(self, tell: Callable[..., None]) -> None:
        self.clock = Clock()
        self._tell = tell
        self._points = Points(lambda point: tell(event="at", point=point))
        self._instrumented: set[str] = set()
        self._leavings = Leavings()
        self._open: _Member | None = None
        self._noted = ""
        self._report_waits()

    def run(self, do: str, arguments: Mapping[str, Any]) -> Any:
        command: Callable[..., Any] = getattr(self, f"do_{do}")
        return command(**arguments)

    def _report_waits(self) -> None:
        """Tell the scenario whenever a wait begins: it then acts without sleeping."""
        check, until = Watch.check, Watch.until

        def note(waiting_for: str) -> None:
            if waiting_for != self._noted:
                self._noted = waiting_for
                self._tell(event="waiting", for_what=waiting_for)

        # Whatever else they take is theirs.
        def noting_check(
            watch: Watch, waiting_for: str = "the version", *rest: Any, **more: Any
        ) -> None:
            note(waiting_for)
            check(watch, waiting_for, *rest, **more)

        def noting_until(
            watch: Watch, condition: Any, waiting_for: str, *rest: Any, **more: Any
        ) -> Any:
            note(waiting_for)
            return until(watch, condition, waiting_for, *rest, **more)

        Watch.check = noting_check  # type: ignore[method-assign,assignment]
        Watch.until = noting_until  # type: ignore[method-assign,assignment]

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        self._noted = ""
        began = _now()
        try:
            yield
        finally:
            self.clock.seconds = _now() - began

    @property
    def _member(self) -> _Member:
        if self._open is None:
            raise AssertionError("this worker has nothing open")
        return self._open

    @property
    def _sender(self) -> weightwire.WeightSender:
        handle = self._member.handle
        assert isinstance(handle, weightwire.WeightSender)  # noqa: S101 - a scenario's mistake
        return handle

    @property
    def _receiver(self) -> weightwire.WeightReceiver:
        handle = self._member.handle
        assert isinstance(handle, weightwire.WeightReceiver)  # noqa: S101 - a scenario's mistake
        return handle

    # -------------------------------------------------------------- about this process

    def do_hello(self) -> int:
        return os.getpid()

    def do_take(self, directory: str) -> None:
        """A scenario begins."""
        self._leavings.begin(Path(directory))

    def do_let_go(self) -> dict[str, Any]:
        """It ends: close and forget everything, and say what is left."""
        self._points.disarm()
        files = self._leavings.files()
        errors = []
        if self._open is not None:
            try:
                self._open.handle.close()
            except Exception as error:
                errors.append(f"close() raised {type(error).__name__}: {error}")
            if self._open.placed is not None:
                self._open.placed.leave()
        self._open = None
        return {"files": sorted(files), "problems": errors + self._leavings.problems()}

    def do_cut_connections(self) -> int:
        """Cut this process's TCP connections to others, as a network does; says how many."""
        found: dict[tuple[object, object], socket.socket] = {}
        with contextlib.ExitStack() as stack:
            for name in os.listdir("/proc/self/fd"):
                with contextlib.suppress(OSError):
                    connection = stack.enter_context(socket.socket(fileno=os.dup(int(name))))
                    if connection.family in (socket.AF_INET, socket.AF_INET6):
                        ends = _end(connection.getsockname()), _end(connection.getpeername())
                        found[ends] = connection
            others = [c for (here, there), c in found.items() if (there, here) not in found]
            for connection in others:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        return len(others)

    def do_usage(self) -> dict[str, Any]:
        return usage()

    def do_describe(self, backend: str) -> dict[str, Any]:
        """A backend's declaration, and whether it runs here."""
        found = registry().backend(backend)
        capabilities = asdict(found.capabilities)
        capabilities["devices"] = sorted(capabilities["devices"])
        capabilities["options"] = sorted(found.config.model_fields)
        with self._timed():
            probe(found)
        return {"capabilities": capabilities, "summary": found.summary, "api": found.api}

    def do_select(self, backend: Mapping[str, Any]) -> None:
        """Validate a choice of backend and options."""
        select(backend)

    # -------------------------------------------------------------- points

    def do_arm(self, point: str, action: Action = "stop", after: int = 0) -> None:
        self._points.arm(point, action, after)

    def do_disarm(self) -> None:
        self._points.disarm()

    def do_release(self, point: str) -> None:
        self._points.release(point)

    # -------------------------------------------------------------- handles

    def _instrument(self, backend: Mapping[str, Any]) -> None:
        name = backend["backend"]
        if name not in self._instrumented:
            self._instrumented.add(name)
            edge.instrument(registry().backend(name), self._points)

    def do_open_sender(
        self,
        backend: Mapping[str, Any],
        session: str,
        model: str,
        sizes: Mapping[str, Any],
        seed: int,
        memory: str = "cpu",
        placement: str | None = None,
        rendezvous: str = "",
        **options: Any,
    ) -> dict[str, Any]:
        """Open this rank's sender.

        Args:
            memory: device on which its tensors lie.
            placement: how the ranks' tensors are cut over them; None: all hold all.
            rendezvous: where the ranks of such a trainer meet.
        """
        self._instrument(backend)
        leaves = oracle.model(model, sizes)
        ranks = options["rank"], options["world_size"]
        placed = Placed(placement, rendezvous, *ranks, memory) if placement else None
        if placed:
            self._leavings.spare_ports()
        cuts = placed.cuts(leaves) if placed else oracle.whole
        tensors = oracle.source(leaves, 0, seed, None, cuts, memory)
        given = placed.place(leaves, tensors) if placed else tensors
        handle = weightwire.open_sender(
            backend,
            session=session,
            source=edge.PointedSource(given, self._points, oracle.CONVERSIONS.get(model)),
            **options,
        )
        self._open = _Member(handle, leaves, tensors, seed, cuts, placed)
        return {"pid": os.getpid(), "incarnation": handle.incarnation}

    def do_open_receiver(
        self,
        backend: Mapping[str, Any],
        session: str,
        model: str,
        sizes: Mapping[str, Any],
        seed: int,
        receiver_id: str,
        memory: str = "cpu",
        staged: bool = False,
        holds: str | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Open this rank's receiver.

        Args:
            memory: device on which its weights lie.
            staged: nothing lands in place.
            holds: which part of each tensor a rank holds: ``rows`` or ``columns``; None: all.
        """
        self._instrument(backend)
        leaves = oracle.model(model, sizes)
        cuts = part(holds, options["rank"], options["world_size"])
        tensors = oracle.target(leaves, cuts, memory)
        inner: WeightTarget = MappingTarget(tensors)
        if holds:
            pieces = {leaf.name: oracle.piece(leaf, cuts) for leaf in leaves}
            inner = edge.PartTarget(tensors, pieces)
        handle = weightwire.open_receiver(
            backend,
            session=session,
            target=edge.point_target(inner, self._points, staged=staged),
            receiver_id=receiver_id,
            **options,
        )
        self._open = _Member(handle, leaves, tensors, seed, cuts)
        return {"pid": os.getpid()}

    def do_release_buffers(self) -> None:
        with self._timed():
            self._member.handle.release_buffers()

    def do_close(self) -> None:
        with self._timed():
            self._member.handle.close()

    # -------------------------------------------------------------- sending

    def do_send(
        self, version: Any, fill: bool = True, scribble: bool = False, **options: Any
    ) -> dict[str, Any]:
        """Send a version.

        Args:
            fill: the version's own values come first.
            scribble: change the source at once when ``send`` has returned.
        """
        member = self._member
        if fill:
            oracle.source(member.model, version, member.seed, member.tensors, member.cuts)
        with self._timed():
            report = self._sender.send(version, **options)
        if scribble:
            oracle.source(member.model, -version, member.seed, member.tensors, member.cuts)
        return report.to_dict()

    def do_move_tensors(self) -> None:
        """New memory for every tensor, as an optimizer that offloads would give."""
        member = self._member
        device = str(next(iter(member.tensors.values())).device)
        moved = oracle.source(member.model, 0, member.seed, None, device=device)
        for name, tensor in moved.items():
            member.tensors[name] = tensor

    # -------------------------------------------------------------- receiving

    def do_receive(self, **options: Any) -> dict[str, Any]:
        with self._timed():
            return self._receiver.receive(**options).to_dict()

    def do_follow(self, timeout: float) -> None:
        """Receive again and again until the handle is closed; tell what is held after each call."""
        member, handle = self._member, self._receiver
        while not handle.closed:
            error: BaseException | None = None
            try:
                with self._timed():
                    handle.receive(timeout)
            except WeightWireError as caught:
                error = caught
            version = handle.version
            held = member.model, member.tensors
            self._tell(
                event="followed",
                version=version,
                tainted=handle.tainted,
                difference=None
                if version is None
                else oracle.difference(*held, version, member.seed, member.cuts),
                pristine=version is None and oracle.pristine(*held, member.cuts),
                error=[kind.__name__ for kind in type(error).__mro__] if error else [],
                message=str(error or ""),
                seconds=self.clock.seconds,
            )

    def do_begin(self, **options: Any) -> int:
        with self._timed():
            return self._receiver.begin(**options).policy.version

    def do_fetch(self) -> None:
        with self._timed():
            self._receiver.fetch()

    def do_commit(self) -> dict[str, Any]:
        with self._timed():
            return self._receiver.commit().to_dict()

    def do_poll(self) -> int | None:
        with self._timed():
            return self._receiver.poll()

    def do_version(self) -> int | None:
        return self._member.handle.version

    def do_tainted(self) -> str | None:
        return self._receiver.tainted

    def do_difference(self, version: int) -> str | None:
        """Where the target isn't this version; None when it is."""
        member = self._member
        held = member.model, member.tensors
        return oracle.difference(*held, version, member.seed, member.cuts)

    def do_digest(self, version: int) -> str:
        """Of a whole version, as the oracle computes it."""
        return digest(self._member.model, version, self._member.seed)

    def do_pristine(self) -> bool:
        return oracle.pristine(self._member.model, self._member.tensors, self._member.cuts)

    def do_addresses(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self._member.tensors.values()]

    def do_sizes(self) -> list[int]:
        """Bytes of each tensor as it travels, whole."""
        return [
            math.prod(leaf.shape) * (leaf.cast or leaf.dtype).itemsize
            for leaf in self._member.model
            if leaf.tied is None
        ]
