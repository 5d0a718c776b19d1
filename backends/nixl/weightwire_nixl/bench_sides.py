"""The two processes of the benchmark: a trainer and an engine, alike but for what they open."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

import weightwire
from weightwire.bench_model import llama_shapes
from weightwire.errors import ConfigError, TransferError
from weightwire.grouping import make_groups
from weightwire.layout import Place, lay_out
from weightwire.options import DEFAULT_GROUP_BYTES
from weightwire.table import Shard, TensorEntry
from weightwire_nixl.agent import Agent, Operation, Transfer
from weightwire_nixl.arena import Slots

__all__ = ["Side", "round_trips", "usable_device"]

_PATIENCE = 60.0
_DIGEST_WORDS = 1 << 24


def usable_device(name: str) -> torch.device:
    """The device of this name.

    Raises:
        ConfigError: there is none.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r} isn't one: write cpu or cuda:0") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is none of NIXL's: write cpu or cuda:0")
    if device.type == "cuda":
        there = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= there:
            raise ConfigError(f"device {name!r}: there are {there} GPUs here; use another")
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    return device


class Side:
    """A model on a device, a handle for each mode, and this side's part of the raw costs.

    Args:
        role: ``"sender"`` or ``"receiver"``.
        modes: options of the backend, by name; each has a session of its own, and the one
            called ``unverified`` has ``verify="off"``.
    """

    def __init__(
        self, role: str, work: Path, nbytes: int, device: str, modes: dict[str, dict[str, Any]]
    ) -> None:
        self._device = usable_device(device)
        shapes = llama_shapes(nbytes // 2)
        self.tensors = {
            name: torch.zeros(shape, dtype=torch.bfloat16, device=self._device)
            for name, shape in shapes.items()
        }
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors.values())
        # Every dimension is a multiple of four elements.
        self._words = [tensor.view(-1).view(torch.int64) for tensor in self.tensors.values()]
        generator = torch.Generator(self._device).manual_seed(0)
        for words in self._words:
            words.random_(generator=generator)
        self.handles: dict[str, Any] = {}
        for mode, options in modes.items():
            choice = {"backend": "nixl", **options}
            session = (work / mode).as_uri()
            verify: Literal["off", "sample"] = "off" if mode == "unverified" else "sample"
            self.handles[mode] = (
                weightwire.open_sender(choice, session=session, source=self.tensors, verify=verify)
                if role == "sender"
                else weightwire.open_receiver(
                    choice, session=session, target=self.tensors, receiver_id="engine"
                )
            )
        self._raw = _Raw(role, self.tensors, self._device)

    def serve(self, command: str, argument: Any) -> Any:
        """Do what the other process asks for."""
        commands: dict[str, Callable[[Any], Any]] = {
            "receive": self._receive,
            "digest": lambda _: self.digest(),
            "describe": lambda _: self._raw.describe(),
            "meet": self._raw.meet,
            "copy": lambda _: self._raw.copy(),
            "move": lambda _: self._raw.move(),
            "move_live": lambda _: self._raw.move_live(),
            "echo": lambda count: echo(self._raw.agent, self._raw.peer, count),
        }
        return commands[command](argument)

    @property
    def raw(self) -> _Raw:
        return self._raw

    def _receive(self, mode: str) -> dict[str, Any]:
        report = self.handles[mode].receive()
        return {
            "version": report.version,
            "seconds": report.seconds,
            "phases": dict(report.phases),
            "path": report.path,
        }

    def change(self) -> None:
        """Other weights, as after an optimizer step: other bits in every word."""
        for words in self._words:
            words.mul_(6364136223846793005).add_(1442695040888963407)
        self._synchronise()

    def digest(self) -> int:
        """64 bits of every word and its place; equal for equal bits on any device."""
        total = 0
        for words in self._words:
            for begin in range(0, len(words), _DIGEST_WORDS):
                part = words[begin : begin + _DIGEST_WORDS]
                places = torch.arange(begin, begin + len(part), device=part.device)
                mixed = (part ^ (places * 7046029254386353131)) * 6364136223846793005
                total = total * 31 + int((mixed ^ (mixed >> 29)).sum())
        return total & ((1 << 64) - 1)

    def _synchronise(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        for handle in self.handles.values():
            handle.close()
        self._raw.close()


class _Raw:
    """The least that the same bytes cost: copies into and out of a slot, a prepared transfer.

    The same groups as the backend has, through one slot on each side; or, at the
    trainer, out of the tensors where they lie.
    """

    def __init__(self, role: str, tensors: dict[str, Tensor], device: torch.device) -> None:
        self._stages = role == "sender"
        self._device = device
        entries = [
            TensorEntry(
                name, tuple(t.shape), "bfloat16", (Shard(0, (0,) * t.ndim, tuple(t.shape)),)
            )
            for name, t in tensors.items()
        ]
        self._groups: list[tuple[list[Tensor], list[Place], int]] = []
        for group in make_groups(entries, DEFAULT_GROUP_BYTES):
            chosen = [tensors[entries[i].name] for i in group.tensors]
            places, nbytes = lay_out([(t.dtype, tuple(t.shape)) for t in chosen])
            self._groups.append((chosen, places, nbytes))
        self.agent = Agent(f"raw-{role}")
        self._slots = Slots(self.agent, 1, max(nbytes for *_, nbytes in self._groups), device)
        self._transfers: list[Transfer] = []
        self._live_transfers: list[Transfer] = []
        if self._stages:
            for name, tensor in tensors.items():
                self.agent.register(tensor, f"tensor {name!r}")
        self.peer = ""

    def describe(self) -> dict[str, Any]:
        return {
            "agent": self.agent.name,
            "metadata": self.agent.metadata().hex(),
            "address": self._slots.address,
            "device_id": self._slots.device_id,
            "device": self._slots.device.type,
            "tensors": [[t.data_ptr() for t in chosen] for chosen, *_ in self._groups],
        }

    def meet(self, other: dict[str, Any]) -> None:
        """Prepare the transfers with the other side: here a READ, at the trainer a WRITE."""
        self.peer = other["agent"]
        self.agent.add(self.peer, bytes.fromhex(other["metadata"]), "the other process")
        for (chosen, places, nbytes), addresses in zip(self._groups, other["tensors"], strict=True):
            begins = [place.begin for place in places]
            lengths = [place.nbytes for place in places]
            self._transfers.append(self._prepare(other, [0], [0], [nbytes]))
            if self._stages:
                live = [t.data_ptr() - self._slots.address for t in chosen]
                self._live_transfers.append(self._prepare(other, live, begins, lengths))
            else:
                live = [address - other["address"] for address in addresses]
                self._live_transfers.append(self._prepare(other, begins, live, lengths))

    def _prepare(
        self, other: dict[str, Any], ours: list[int], theirs: list[int], lengths: list[int]
    ) -> Transfer:
        """A transfer of pieces; where they begin counts from each side's slot."""
        here = [
            [self._slots.address + begin, nbytes, self._slots.device_id]
            for begin, nbytes in zip(ours, lengths, strict=True)
        ]
        there = [
            [other["address"] + begin, nbytes, other["device_id"]]
            for begin, nbytes in zip(theirs, lengths, strict=True)
        ]
        operation: Operation = "WRITE" if self._stages else "READ"
        return self.agent.prepare(
            operation,
            self.peer,
            np.array(here, dtype=np.uint64),
            np.array(there, dtype=np.uint64),
            devices=(self._slots.device.type, other["device"]),
            who="the other process",
        )

    def copy(self) -> float:
        """Seconds to stage the model (trainer), or to write it (engine), group by group."""
        began = time.perf_counter()
        for tensors, places, nbytes in self._groups:
            slot = self._slots.slot(0, nbytes)
            views = [place.view(slot) for place in places]
            if self._stages:
                torch._foreach_copy_(views, tensors)
            else:
                for tensor, view in zip(tensors, views, strict=True):
                    tensor.copy_(view)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - began

    def move(self) -> float:
        """Seconds to move the bytes from slot to slot, group by group."""
        return _move(self._transfers)

    def move_live(self) -> float:
        """Seconds to move the bytes from the trainer's tensors into a slot, group by group."""
        return _move(self._live_transfers)

    def close(self) -> None:
        self.agent.close()


def _move(transfers: Sequence[Transfer]) -> float:
    began = time.perf_counter()
    for transfer in transfers:
        finish(transfer)
    return time.perf_counter() - began


def finish(transfer: Transfer) -> float:
    """Post and complete a transfer; returns the seconds that posting took."""
    began = time.perf_counter()
    done = transfer.post()
    posted = time.perf_counter() - began
    end = began + _PATIENCE
    while not done:
        done = transfer.done()
        if time.perf_counter() > end:
            raise TransferError(f"a raw transfer didn't complete in {_PATIENCE:g} s: run it again")
    return posted


def round_trips(agent: Agent, peer: str, count: int) -> list[float]:
    """Seconds of ``count`` signals and their answers, one after another."""
    seconds = []
    for i in range(count):
        began = time.perf_counter()
        agent.notify(peer, i.to_bytes(8, "big"), "the other process")
        _await_one(agent)
        seconds.append(time.perf_counter() - began)
    return seconds


def echo(agent: Agent, peer: str, count: int) -> None:
    """Answer that many signals."""
    for _ in range(count):
        agent.notify(peer, _await_one(agent), "the other process")


def _await_one(agent: Agent) -> bytes:
    end = time.perf_counter() + _PATIENCE
    while time.perf_counter() < end:
        found: Sequence[bytes] = [m for each in agent.drain().values() for m in each]
        if found:
            return found[0]
        with contextlib.suppress(InterruptedError):
            time.sleep(0.00005)  # the peer may need the core
    raise TransferError(f"no signal came within {_PATIENCE:g} s: run the benchmark again")
