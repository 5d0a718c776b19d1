"""The faults: what each does to a world, while a version is on its way."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from weightwire_conformance.rig import posix

if TYPE_CHECKING:
    from weightwire_conformance.chaos.world import World
    from weightwire_conformance.rig import Side

__all__ = ["FAULTS", "SLOWEST", "Fault"]

_FILLER = "filler"
SLOWEST = 0.2
"""Seconds by which a connection is slowed at most, each way."""


@dataclass(frozen=True)
class Fault:
    """One kind of fault.

    Attributes:
        inject: does it, and undoes it where it would last; called while ``send`` runs.
            It says whether it could: there may have been nothing to do it to.
        possible: why it can't be had in a world; empty if it can.
    """

    name: str
    inject: Callable[[World], bool | None]
    possible: Callable[[World], str] = lambda world: ""


def _kill_trainer_rank(world: World) -> None:
    """The other ranks hear of it; then all are started again."""
    world.dice.choice(world.sender.workers).kill()
    world.sender_must_restart = True


def _kill_receiver_rank(world: World) -> None:
    replica = world.any_replica()
    world.dice.choice(replica.workers).kill()
    world.must_restart.add(replica.name)


def _stop(world: World, side: Side) -> None:
    seconds = world.dice.choice([0.1, 1.5]) * world.lease
    world.excused.update(worker.pid for worker in side.workers)
    for worker in side.workers:
        os.kill(worker.pid, posix.STOP)
    try:
        time.sleep(seconds)
    finally:
        for worker in side.workers:
            os.kill(worker.pid, posix.CONTINUE)


def _stop_sender(world: World) -> None:
    _stop(world, world.sender)


def _stop_receiver(world: World) -> None:
    _stop(world, world.any_replica())


def _interrupt_sender(world: World) -> None:
    world.sender.first.interrupt()


def _join(world: World) -> None:
    world.add_replica(world.new_name(), ranks=world.dice.choice([1, 2]))


def _leave(world: World) -> None:
    world.let_leave(world.any_replica())


def _restart_receiver(world: World) -> None:
    replica = world.any_replica()
    world.let_leave(replica)
    world.add_replica(replica.name, ranks=len(replica.workers))


def _restart_sender(world: World) -> None:
    """In good order, once its call has ended."""
    world.sender_must_restart = True


def _go_slow(world: World) -> None:
    """Bytes come slowly, a group at a time."""
    world.sender.arm("sender.put", "slow")
    world.slow = True


def _cut_connections(world: World) -> bool:
    """Of one process, with whomever it has any; or all to the session's server."""
    if world.proxy is not None and world.dice.random() < 0.5:
        return world.proxy.cut() > 0
    sides = [world.sender, *(world.replicas[name] for name in sorted(world.replicas))]
    worker = world.dice.choice([worker for side in sides for worker in side.workers])
    return bool(world.ask(worker, "cut_connections", now=True))


def _slow_connections(world: World) -> None:
    """To the session's server, for as long as this version takes."""
    assert world.proxy is not None  # noqa: S101 - it is possible
    world.proxy.delay = world.dice.choice([0.02, SLOWEST])
    world.slowed = 2  # this version's calls, and those that go on during the next


def _restart_server(world: World) -> None:
    assert world.options.restart_server is not None  # noqa: S101 - it is possible
    world.options.restart_server()


def _restartable(world: World) -> str:
    if world.options.restart_server is not None:
        return ""
    return "nobody says how the session's server is started again"


def _proxied(world: World) -> str:
    return "" if world.proxy is not None else "no session of --session is behind a proxy"


def _stored(world: World) -> str:
    return "" if world.fleet.stores else "this backend writes no files"


def _truncate(world: World) -> None:
    """The newest stored version loses half of a file."""
    files = [path for path in world.versions.rglob("*.safetensors") if path.is_file()]
    if files:
        path = world.dice.choice(sorted(files)[-4:])
        try:
            os.truncate(path, path.stat().st_size // 2)
        except FileNotFoundError:
            return  # it was retired meanwhile
        world.damaged = True


def _disk_full(world: World) -> None:
    try:
        with filler_of(world).open("wb", buffering=0) as file:
            while True:
                file.write(bytes(64 << 10))
    except OSError:
        pass  # full


def _small_disk(world: World) -> str:
    return _stored(world) or ("" if world.has_small_disk else "a small tmpfs needs root")


def filler_of(world: World) -> Path:
    """The file that fills the disk while it is there."""
    return world.versions / _FILLER


FAULTS = (
    Fault("kill-trainer-rank", _kill_trainer_rank),
    Fault("kill-receiver-rank", _kill_receiver_rank),
    Fault("stop-sender", _stop_sender),
    Fault("stop-receiver", _stop_receiver),
    Fault("interrupt-sender", _interrupt_sender),
    Fault("join", _join),
    Fault("leave", _leave),
    Fault("restart-receiver", _restart_receiver),
    Fault("restart-sender", _restart_sender),
    Fault("slow-sender", _go_slow),
    Fault("cut-connections", _cut_connections),
    Fault("slow-connections", _slow_connections, _proxied),
    Fault("restart-session-server", _restart_server, _restartable),
    Fault("truncated-file", _truncate, _stored),
    Fault("full-disk", _disk_full, _small_disk),
)
