"""A trainer that FSDP shards over the GPUs, replicas beside it, and what goes wrong.

Every process that is killed or stopped is so in the middle of a transfer, by itself, just
before its third group.  The others have to say within the deadline what is wrong, and the
next version has to reach everybody; the trainer's own NCCL group has to be as it was, also
after a time in which torch's watchdog would have ended the process.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from gpu_children import Child, Role, processes
from gpu_models import digest
from torch import Tensor, nn

import weightwire
from weightwire.table import Region

__all__ = ["ROLES", "run"]

TIMEOUT = 6.0
WATCHDOG = 8
PATIENCE = 30.0
AT_GROUP = 3
LAYERS = 16


class Layers(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


class Armed:
    """Counts groups, and sends this process a signal at one of them."""

    def __init__(self) -> None:
        self._signal = 0
        self._left = 0

    def arm(self, number: int) -> None:
        self._signal, self._left = number, AT_GROUP

    def group(self) -> None:
        if self._signal:
            self._left -= 1
            if not self._left:
                number, self._signal = self._signal, 0
                os.kill(os.getpid(), number)


class ShardedTrainer(Role):
    """One rank of a trainer; FSDP has a default group of its own."""

    def open(self, rank: int, world: int, store: str, **options: Any) -> str:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        os.environ["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] = str(WATCHDOG)
        library = "nccl" if self.device.type == "cuda" else "gloo"
        dist.init_process_group(
            library,
            store=dist.FileStore(store, world),
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=WATCHDOG),
        )
        torch.manual_seed(7)
        mesh = init_device_mesh(self.device.type, (world,))
        self.model = Layers(self.setup["hidden"]).to(self.device, torch.bfloat16)
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.rank = rank
        self.sender = weightwire.open_sender(
            self.setup["backend"],
            source=self.model,
            rank=rank,
            world_size=world,
            group_bytes=4 * self.setup["hidden"] ** 2 + (1 << 16),  # two layers
            timeout=TIMEOUT,
            lease_ttl=2.0,
            **options,
        )
        self.armed = Armed()
        transport = self.sender._transport
        put = transport.put

        def counted(*arguments: Any) -> None:
            self.armed.group()
            put(*arguments)

        transport.put = counted  # type: ignore[method-assign]
        return self.sender.session_url

    def step(self, seed: int) -> dict[str, int]:
        """An optimizer step, through the trainer's own group; digests of the whole weights."""
        generator = torch.Generator(self.device).manual_seed(seed)
        x = torch.randn(8, self.setup["hidden"], generator=generator, device=self.device)
        self.model(x.bfloat16()).float().square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        found = {}
        for name, parameter in self.model.named_parameters():
            whole = parameter.full_tensor()  # type: ignore[attr-defined]  # a DTensor
            found[name] = digest(whole.detach().reshape(-1))
        self.sync()
        # A process that is stopped before torch's watchdog has seen its last collectives
        # end takes them for late when it goes on, whoever else is there.
        time.sleep(1.0)
        return found

    def arm(self, number: int) -> None:
        self.armed.arm(number)

    def send(self, version: int) -> dict[str, Any]:
        report = self.sender.send(version)
        return {"nbytes": report.nbytes, "seconds": report.seconds, "path": report.path}

    def own_group(self) -> float:
        """What an all-reduce over the trainer's own group gives."""
        import torch.distributed as dist

        value = torch.ones(1, device=self.device)
        dist.all_reduce(value)
        return float(value)

    def close(self) -> None:
        self.sender.close()


class ArmedTarget(weightwire.MappingTarget):
    def __init__(self, mapping: Mapping[str, Tensor]) -> None:
        super().__init__(mapping)
        self.armed = Armed()

    def write(self, group: int, tensors: Mapping[Region, Tensor]) -> None:
        self.armed.group()
        super().write(group, tensors)


class Replica(Role):
    """A replica of one rank."""

    def open(self, receiver_id: str, session: str) -> None:
        hidden = self.setup["hidden"]
        shapes = {"weight": (hidden, hidden), "bias": (hidden,)}
        self.weights = {
            f"layers.{i}.{name}": torch.zeros(shape, dtype=torch.bfloat16, device=self.device)
            for i in range(LAYERS)
            for name, shape in shapes.items()
        }
        self.target = ArmedTarget(self.weights)
        self.receiver = weightwire.open_receiver(
            self.setup["backend"],
            session=session,
            target=self.target,
            receiver_id=receiver_id,
            timeout=TIMEOUT,
            lease_ttl=2.0,
        )

    def arm(self, number: int) -> None:
        self.target.armed.arm(number)

    def receive(self, version: int) -> dict[str, Any]:
        report = self.receiver.receive(minimum=version)
        return {"version": report.version, "path": report.path, "nbytes": report.nbytes}

    def digests(self) -> dict[str, int]:
        return {name: digest(tensor.reshape(-1)) for name, tensor in self.weights.items()}

    def close(self) -> None:
        self.receiver.close()


ROLES: dict[str, type[Role]] = {"sharded-trainer": ShardedTrainer, "replica": Replica}


class World:
    """A trainer and its replicas, and what each of them said."""

    def __init__(
        self, children: list[Child], places: Sequence[str], replicas: Sequence[str], work: Path,
        setup: dict[str, Any],
    ) -> None:  # fmt: skip
        self.children, self.setup, self.work = children, setup, work
        self.places = list(places)
        self.trainers: list[Child] = []
        self.replicas: dict[str, Child] = {}
        self.version = 0
        self.stores = 0
        self.session = f"file://{work}/session"
        self.start_trainers()
        for number, place in enumerate(replicas):
            self.start_replica(f"replica-{number}", place)

    def _child(self, role: str, place: str) -> Child:
        self.children.append(Child(role, place, self.setup))
        return self.children[-1]

    def start_trainers(self) -> None:
        self.stores += 1
        self.trainers = [self._child("sharded-trainer", place) for place in self.places]
        options = {"session": self.session, "min_receivers": self.setup["replicas"]}
        for rank, child in enumerate(self.trainers):
            store = str(self.work / f"store-{self.stores}")
            child.start("open", rank=rank, world=len(self.places), store=store, **options)
        for child in self.trainers:
            child.answer()

    def start_replica(self, name: str, place: str) -> None:
        self.replicas[name] = self._child("replica", place)
        self.replicas[name].ask("open", receiver_id=name, session=self.session)

    def step(self) -> dict[str, int]:
        for child in self.trainers:
            child.start("step", seed=self.version)
        digests = [child.answer() for child in self.trainers]
        return digests[0]

    def begin(self) -> None:
        self.version += 1
        for child in self.replicas.values():
            child.start("receive", version=self.version)
        for child in self.trainers:
            child.start("send", version=self.version)

    def good_version(self) -> dict[str, Any]:
        """A version that everybody gets, bit for bit."""
        wanted = self.step()
        began = time.monotonic()
        self.begin()
        received = [child.answer() for child in self.replicas.values()]
        sent = [child.answer() for child in self.trainers]
        seconds = time.monotonic() - began
        for name, child in self.replicas.items():
            if child.ask("digests") != wanted:
                raise RuntimeError(f"{name} holds other bits than the trainer after {self.version}")
        return {
            "seconds": seconds,
            "nbytes_by_owner": [report["nbytes"] for report in sent],
            "nbytes_by_replica": [report["nbytes"] for report in received],
            "paths": [report["path"] for report in (*sent, *received)],
        }

    def check_own_group(self) -> None:
        for child in self.trainers:
            child.start("own_group")
        for child in self.trainers:
            if child.answer() != len(self.trainers):
                raise RuntimeError("the trainer's own group isn't what it was")

    def fault(self, victim: Child, others: Mapping[str, Child], number: int) -> dict[str, Any]:
        """What the others said of it; ``victim`` was killed or stopped at its third group."""
        self.step()
        victim.ask("arm", number=number)
        self.begin()
        victim.await_stop(PATIENCE)
        said = {name: child.answer_within(PATIENCE) for name, child in others.items()}
        limit = TIMEOUT * 1.1 + 0.5
        for name, answer in said.items():
            if answer["seconds"] > limit:
                raise RuntimeError(f"{name} took {answer['seconds']:.1f} s, its timeout {TIMEOUT}")
            if answer.get("kind", "PeerLost") not in ("PeerLost", "TransferTimeout"):
                raise RuntimeError(f"{name} said {answer}")
        return {
            name: answer.get("error", answer.get("result"))
            if "error" in answer
            else f"applied it: {answer['result'].get('version')}"
            for name, answer in said.items()
        }


def run(places: Sequence[str], backend: Any, trainers: int, work: Path) -> dict[str, Any]:
    """Every fault, one after the other; with ``trainers=1`` each GPU has one process.

    Raises:
        RuntimeError: something isn't as it has to be.
    """
    work.mkdir()
    hidden = 4096 if places[0].startswith("cuda") else 256
    replicas = [places[1]] if trainers == 1 else list(places)
    setup = {"backend": backend, "hidden": hidden, "replicas": len(replicas)}
    found: dict[str, Any] = {"backend": backend, "trainer ranks": trainers, **setup}
    with processes([], [], setup) as children:
        world = World(children, places[:trainers], replicas, work, setup)
        found["first version"] = world.good_version()
        found["second version"] = world.good_version()
        last = f"replica-{len(replicas) - 1}"
        found["inference rank stopped"] = _stopped(world, last, is_trainer=False)
        found["inference rank killed"] = _replica_killed(world, last, replicas[-1])
        found["trainer rank stopped"] = _stopped(world, "", is_trainer=True)
        found["trainer rank killed"] = _trainer_killed(world)
    return found


def _everybody(world: World) -> dict[str, Child]:
    ranks = {f"trainer rank {rank}": child for rank, child in enumerate(world.trainers)}
    return {**ranks, **world.replicas}


def _stopped(world: World, name: str, *, is_trainer: bool) -> dict[str, Any]:
    victim = world.trainers[-1] if is_trainer else world.replicas[name]
    others = {name: child for name, child in _everybody(world).items() if child is not victim}
    began = time.monotonic()
    said = world.fault(victim, others, signal.SIGSTOP)
    time.sleep(max(0.0, 2 * WATCHDOG - (time.monotonic() - began)))  # torch's would be due
    victim.signal(signal.SIGCONT)
    answer = victim.answer_within(PATIENCE)
    if "error" not in answer:
        raise RuntimeError(f"who was stopped says that all is well: {answer}")
    said["who was stopped"] = answer["error"]
    world.check_own_group()
    return {"said": said, "next version": world.good_version()}


def _replica_killed(world: World, name: str, place: str) -> dict[str, Any]:
    victim = world.replicas.pop(name)
    others = {key: child for key, child in _everybody(world).items() if child is not victim}
    world.replicas[name] = victim
    said = world.fault(victim, others, signal.SIGKILL)
    del world.replicas[name]
    world.check_own_group()
    world.start_replica(f"{name}-again", place)
    return {"said": said, "next version": world.good_version()}


def _trainer_killed(world: World) -> dict[str, Any]:
    victim = world.trainers[-1]
    others = {name: child for name, child in _everybody(world).items() if child is not victim}
    said = world.fault(victim, others, signal.SIGKILL)
    for child in world.trainers[:-1]:  # FSDP can't go on without a rank
        with contextlib.suppress(ProcessLookupError):
            child.signal(signal.SIGKILL)
    world.start_trainers()
    world.version = 100 + world.version
    return {"said": said, "next version": world.good_version()}
