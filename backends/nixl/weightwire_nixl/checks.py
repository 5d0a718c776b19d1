"""What ``weightwire doctor`` tries for the nixl backend."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import re
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weightwire.deadline import Deadline
from weightwire.doctor.check import CheckOptions, Verdict
from weightwire.doctor.children import Step, together
from weightwire.errors import BackendUnavailable, TransferTimeout
from weightwire_nixl.fabric import find_ports, nearest_ports, pci_address

__all__ = ["own", "ports", "read", "read_from", "transports", "ucx_transports"]

_NBYTES = 8 << 20
_SEED = 20
_BUILDS = ("nixl_cu12", "nixl_cu13")
_MODULE = "weightwire_nixl.checks:"
_PAUSE = 0.0005
_RMA = 2
_FEATURES_GIVEN = 1
_PARAMS_BYTES = 512
_RESOURCE = re.compile(r"resource\s+\d+\s*:.*--\s*(\S+)/(\S+)")
_NO_MATTER = "nothing, unless it must be used: pip install 'weightwire[nixl]'"


def _missing() -> Verdict | None:
    """What is to be said where NIXL can't be used."""
    from weightwire_nixl.agent import library

    try:
        library()
    except BackendUnavailable as error:
        summary, _, remedy = str(error).partition(": ")
        found = [name for name in _BUILDS if importlib.util.find_spec(name) is not None]
        if found:
            return Verdict.failed(str(error)[:2000], remedy or str(error), builds=found)
        return Verdict.absent(summary[:2000], remedy or _NO_MATTER)
    return None


def transports(options: CheckOptions) -> Verdict:
    """Start UCX as NIXL does, and list what it found."""
    del options
    if (missing := _missing()) is not None:
        return missing
    from weightwire_nixl.agent import Agent

    try:
        Agent("doctor").close()
    except BackendUnavailable as error:
        summary, _, remedy = str(error).partition(": ")
        return Verdict.failed(summary[:2000], remedy or str(error), environment=_settings())
    found = ucx_transports()
    if found is None:
        return Verdict.warning(
            "UCX starts, and this build doesn't say which transports it has",
            "run a sync with UCX_PROTO_INFO=y, which prints the path that each operation takes",
        )
    names = sorted(found)
    given = _settings()
    details = {"transports": found, "environment": given}
    summary = f"UCX has {', '.join(names)}"
    if given:
        summary += f" ({', '.join(f'{name}={value}' for name, value in given.items())})"
    if not {"cma", "knem", "xpmem"} & found.keys():
        return Verdict.warning(
            f"{summary}: no copy from process to process, so that hosts' own memory goes over TCP",
            "allow ptrace between them (docker run --cap-add=SYS_PTRACE; sysctl "
            "kernel.yama.ptrace_scope=0), and leave cma in UCX_TLS",
            **details,
        )
    return Verdict.ok(summary, **details)


def _settings() -> dict[str, str]:
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith("UCX_")}


def ucx_transports() -> dict[str, list[str]] | None:
    """UCX's transports with their devices, by its own word; None if it can't be asked."""
    loaded = _loaded("libucp")
    if loaded is None:
        return None
    try:
        ucp = ctypes.CDLL(loaded)
        major, minor, release = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint()
        ucp.ucp_get_version(ctypes.byref(major), ctypes.byref(minor), ctypes.byref(release))
        parameters = (ctypes.c_char * _PARAMS_BYTES)()
        struct.pack_into("QQ", parameters, 0, _FEATURES_GIVEN, _RMA)
        context = ctypes.c_void_p()
        if ucp.ucp_init_version(major, minor, parameters, None, ctypes.byref(context)) != 0:
            return None
        said = _printed(lambda stream: ucp.ucp_context_print_info(context, stream))
        ucp.ucp_cleanup(context)
    except (OSError, AttributeError):
        return None
    found: dict[str, list[str]] = {}
    for name, device in _RESOURCE.findall(said):
        found.setdefault(name, []).append(device)
    return found or None


def _loaded(library: str) -> str | None:
    """Path of a library that this process has loaded."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")[2]
        if Path(path).name.startswith(library):
            return f"/{path}"
    return None


def _printed(show: Callable[[ctypes.c_void_p], object]) -> str:
    """What a C function writes to a stream."""
    libc = ctypes.CDLL(None)
    libc.fdopen.restype = ctypes.c_void_p
    reader, writer = os.pipe()
    stream = ctypes.c_void_p(libc.fdopen(writer, b"w"))
    show(stream)  # some hundred bytes: less than the pipe holds
    libc.fclose(stream)
    with open(reader, "rb") as file:  # noqa: PTH123 - by descriptor
        return file.read().decode(errors="replace")


def read(options: CheckOptions) -> Verdict:
    """8 MiB of one process are read by another; every byte is compared."""
    if (missing := _missing()) is not None:
        return missing
    seconds = options.seconds - 10
    steps = [
        Step(f"{_MODULE}own", [options.scratch, seconds]),
        Step(f"{_MODULE}read_from", [options.scratch, seconds]),
    ]
    owned, got = together(steps, options.scratch, seconds)
    if owned != got["digest"]:
        return Verdict.failed(
            "a READ said that it was done, with other bytes than the owner's",
            "unset UCX_TLS and UCX_NET_DEVICES; upgrade NIXL; don't use this fabric until then",
        )
    took = got["seconds"]
    return Verdict.ok(
        f"{_NBYTES >> 20} MiB read by another process at {_NBYTES / took / 1e9:.2f} GB/s, "
        "every byte compared",
        seconds=took,
        gigabytes_per_second=_NBYTES / took / 1e9,
    )


def own(scratch: str, seconds: float) -> str:
    """The owner: the digest of what it let others read."""
    from weightwire_nixl.agent import Agent

    place, deadline = Path(scratch), Deadline(seconds)
    generator = torch.Generator().manual_seed(_SEED)
    memory = torch.randint(0, 256, (_NBYTES,), dtype=torch.uint8, generator=generator)
    agent = Agent("doctor-owner")
    agent.register(memory, "the doctor's memory")
    _put(place / "owner-name", agent.name.encode())
    _put(place / "owner-address", str(memory.data_ptr()).encode())
    _put(place / "owner-metadata", agent.metadata())
    _wait_for(place / "read", deadline)
    agent.close()
    return _digest(memory)


def read_from(scratch: str, seconds: float) -> dict[str, Any]:
    """The reader: the digest of what it read, and the seconds that took."""
    from weightwire_nixl.agent import Agent

    place, deadline = Path(scratch), Deadline(seconds)
    memory = torch.zeros(_NBYTES, dtype=torch.uint8)
    agent = Agent("doctor-reader")
    agent.register(memory, "the doctor's memory")
    metadata = _wait_for(place / "owner-metadata", deadline)
    name = _wait_for(place / "owner-name", deadline).decode()
    there = int(_wait_for(place / "owner-address", deadline))
    agent.add(name, metadata, "the owner")
    transfer = agent.prepare(
        "READ",
        name,
        np.array([[memory.data_ptr(), _NBYTES, 0]], dtype=np.uint64),
        np.array([[there, _NBYTES, 0]], dtype=np.uint64),
        devices=("cpu", "cpu"),
        who="the owner",
    )
    began = time.perf_counter()
    over = transfer.post()
    while not over:
        if deadline.passed():  # this process ends by os._exit: nothing releases what is in flight
            raise TransferTimeout(f"a READ of {_NBYTES} bytes isn't done after {seconds:g} s")
        time.sleep(_PAUSE)
        over = transfer.done()
    took = time.perf_counter() - began
    _put(place / "read", b"")
    agent.close()
    return {"digest": _digest(memory), "seconds": took}


def _digest(memory: torch.Tensor) -> str:
    return hashlib.blake2b(memory.numpy().data).hexdigest()


def _put(path: Path, payload: bytes) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(payload)
    temporary.replace(path)


def _wait_for(path: Path, deadline: Deadline) -> bytes:
    while not path.exists():
        if deadline.passed():
            raise TransferTimeout(f"the other process didn't write {path.name}: see its error")
        time.sleep(_PAUSE)
    return path.read_bytes()


def ports(_: CheckOptions, root: str = "/") -> Verdict:
    """Active ports by sysfs; each adapter's device file is opened; the nearest to each GPU."""
    sysfs = Path(root) / "sys"
    found = find_ports(sysfs)
    if not found:
        return Verdict.absent(
            "no active InfiniBand or RoCE port",
            "nothing on one host, or where TCP is fast enough; else see ibstat and the driver",
        )
    details: dict[str, Any] = {
        "ports": [
            {"port": str(port), "gigabits": port.gigabits, "numa": port.numa} for port in found
        ]
    }
    refused = [
        name for name in sorted({port.device for port in found}) if not _opens(Path(root), name)
    ]
    if refused:
        return Verdict.failed(
            f"{', '.join(refused)}: active, and its device in /dev/infiniband can't be opened",
            "pass it to the container (docker run --device=/dev/infiniband --cap-add=IPC_LOCK), "
            "or give this user the right to it",
            **details,
        )
    nearest = {}
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        near = nearest_ports(pci_address(torch.device("cuda", index)), found, sysfs)
        nearest[f"cuda:{index}"] = [str(port) for port in near]
    details["nearest"] = nearest
    shown = "; ".join(f"{gpu}: {'/'.join(near) or 'none'}" for gpu, near in nearest.items())
    listed = ", ".join(f"{port} ({port.gigabits:g} Gb/s)" for port in found)
    return Verdict.ok(f"{listed}; nearest {shown or 'to no GPU: there is none'}", **details)


def _opens(root: Path, device: str) -> bool:
    """Whether the adapter's verbs can be opened."""
    for entry in (root / "sys/class/infiniband_verbs").glob("uverbs*"):
        try:
            if (entry / "ibdev").read_text().strip() == device:
                special = root / "dev/infiniband" / entry.name
                os.close(os.open(special, os.O_RDWR))
                return True
        except OSError:
            continue
    return False
