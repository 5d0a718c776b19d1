"""Which path UCX takes between two ranks, and who moves the bytes on it.

Both sides come to the same verdict from the same two descriptions.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import torch
from msgspec import Meta

from weightwire.errors import ConfigError
from weightwire.session.process import this_host
from weightwire_nixl.config import Direction

__all__ = ["Endpoint", "Route", "choose", "describe_endpoint", "path_between"]

PathKind = Literal["CMA", "NVLink or PCIe", "RDMA", "one GPU", "TCP"]

_Text = Annotated[str, Meta(max_length=512)]
_SHARED_MEMORY = {"sm", "shm", "cma", "mm", "posix", "sysv", "xpmem", "knem"}
_RDMA = {"ib", "rc", "rc_x", "rc_v", "rc_mlx5", "rc_verbs", "ud", "ud_x", "ud_v", "dc", "dc_x"}
_RDMA |= {"dc_mlx5", "srd", "gga_mlx5"}


class Endpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a rank can use.

    Attributes:
        host: boot id and pid namespace: equal for processes that see each other.
        user: effective user id.
        cma: whether it may use cross-memory attach, and UCX is allowed to.
        cuda_ipc, rdma: likewise.
        gpu: uuid of the device on which its arena lies; empty for host memory.
    """

    host: _Text
    user: int
    cma: bool
    cuda_ipc: bool
    rdma: bool
    gpu: _Text


@dataclass(frozen=True)
class Route:
    """How bytes get from a trainer rank to an inference rank.

    Attributes:
        push: whether the trainer writes; else the receiver reads.
        path: what UCX uses.
        why: the reason for the direction.
    """

    push: bool
    path: PathKind
    why: str

    @property
    def between_gpus(self) -> bool:
        """Whether one GPU reads or writes another's memory, of the same host."""
        return self.path == "NVLink or PCIe"

    def __str__(self) -> str:
        return f"{'push' if self.push else 'pull'} over {self.path}: {self.why}"


def describe_endpoint(device: torch.device, tls: str | None = None) -> Endpoint:
    """This process, with its arena on ``device``.

    Args:
        tls: UCX's transports; by default the environment's ``UCX_TLS``.
    """
    allowed = _Transports(os.environ.get("UCX_TLS", "all") if tls is None else tls)
    gpu = ""
    if device.type == "cuda":
        gpu = str(torch.cuda.get_device_properties(device).uuid)
    return Endpoint(
        host=this_host(),
        user=int(getattr(os, "geteuid", int)()),  # Linux only, and type-checked elsewhere, too
        cma=allowed.any_of({"cma"}, {"sm", "shm"}) and _may_attach(),
        cuda_ipc=allowed.any_of({"cuda_ipc"}, {"cuda"}),
        rdma=allowed.any_of(_RDMA) and _has_rdma(),
        gpu=gpu,
    )


def path_between(sender: Endpoint, reader: Endpoint) -> PathKind:
    """The fastest path that both may use."""
    here = bool(sender.host) and sender.host == reader.host
    if sender.gpu or reader.gpu:
        if sender.gpu == reader.gpu and here:
            return "one GPU"
        if sender.gpu and reader.gpu and here and sender.cuda_ipc and reader.cuda_ipc:
            return "NVLink or PCIe"
    elif here and sender.user == reader.user and sender.cma and reader.cma:
        return "CMA"
    return "RDMA" if sender.rdma and reader.rdma else "TCP"


def choose(
    sender: Endpoint, reader: Endpoint, wanted: Direction, *, unsafe_pull: bool, who: str
) -> Route:
    """Who moves the bytes, and why.

    Raises:
        ConfigError: pull was asked for on a path on which it can kill the trainer.
    """
    path = path_between(sender, reader)
    if wanted == "push":
        return Route(True, path, "asked for")
    if wanted == "pull":
        if path == "TCP" and not unsafe_pull:
            raise ConfigError(
                f"direction='pull' to {who} goes over TCP, where a receiver that dies while it "
                "reads can abort the trainer: use direction='auto', or say unsafe_pull=True"
            )
        return Route(False, path, "asked for")
    if path == "TCP":
        return Route(True, path, "a reader that dies in the midst of a read can abort its owner")
    if path == "one GPU":
        return Route(True, path, "reads on one device are emulated, writes run at its own speed")
    reasons = {
        "CMA": "one host, reads straight from the trainer's memory",
        "NVLink or PCIe": "two GPUs of one host, by cuda_ipc",
        "RDMA": "reads by the network card, without the trainer's processor",
    }
    return Route(False, path, reasons[path])


class _Transports:
    """``UCX_TLS``: a list of what is allowed, or, after ``^``, of what isn't."""

    def __init__(self, text: str) -> None:
        text = text.strip().lower() or "all"
        self._negated = text.startswith("^")
        self._names = {name.strip().lstrip("\\") for name in text.lstrip("^").split(",")}

    def any_of(self, names: set[str], groups: set[str] = frozenset()) -> bool:  # type: ignore[assignment]
        listed = bool((names | groups) & self._names)
        if self._negated:
            return not (listed or (names <= self._names))
        return listed or "all" in self._names


class _Piece(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def _may_attach() -> bool:
    """Whether the kernel lets this process use ``process_vm_readv`` at all."""
    source, target = ctypes.create_string_buffer(b"cma"), ctypes.create_string_buffer(3)
    here = _Piece(ctypes.cast(target, ctypes.c_void_p), 3)
    there = _Piece(ctypes.cast(source, ctypes.c_void_p), 3)
    try:
        read = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (OSError, AttributeError):
        return False
    read.restype = ctypes.c_ssize_t
    done = read(os.getpid(), ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
    return bool(done == 3)


def _has_rdma() -> bool:
    devices = Path("/sys/class/infiniband")
    try:
        return any(devices.iterdir())
    except OSError:
        return False
