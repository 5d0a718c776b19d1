"""UCX's settings for a device and the fabric of this host, passed to NIXL's own options.

UCX chooses well by itself on one host.  Between hosts it may spread over ports that
are far from the GPU: there the port nearest to it is named.  Nothing is written to
the environment, and what the environment sets is left alone: NIXL's ``engine_config``
gives way to it, and ``device_list``, which doesn't, is only used where it is unset.

No list of transports is ever given: one that leaves out ``tcp`` can't even start.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

__all__ = [
    "SHARED_FROM",
    "Fabric",
    "Port",
    "choose_fabric",
    "find_ports",
    "nearest_ports",
    "pci_address",
]

_SYSFS = Path("/sys")
_SHOWN = ("UCX_TLS", "UCX_NET_DEVICES")
_PCI = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\Z")
_NVIDIA = "0x10de"
_UP_AND_RUNNING = 0x41
SHARED_FROM = 32
_NO_COMMON_ROOT = 1 << 16


@dataclass(frozen=True)
class Port:
    """A port of an InfiniBand or RoCE adapter.

    Attributes:
        device: such as ``mlx5_0``.
        number: from 1 on.
        gigabits: its rate, a second.
        pci: the adapter's place in sysfs.
        numa: its NUMA node, or -1.
    """

    device: str
    number: int
    gigabits: float
    pci: Path
    numa: int

    def __str__(self) -> str:
        return f"{self.device}:{self.number}"


@dataclass(frozen=True)
class Fabric:
    """What to start UCX with, and why.

    Attributes:
        options: of NIXL's UCX backend.
        why: for reports; names what the environment decides.
        copy_threads: threads of NIXL that share transfers of ``SHARED_FROM`` descriptors
            or more.
    """

    options: dict[str, str] = field(default_factory=dict)
    why: str = "UCX's own choice of devices"

    copy_threads: int = 0

    def __str__(self) -> str:
        return self.why

    def with_copiers(self, threads: int) -> Fabric:
        """The same, with threads that share the copies of large transfers."""
        if not threads:
            return self
        shared = {"num_threads": str(threads), "split_batch_size": str(SHARED_FROM)}
        why = f"{self.why}; {threads} threads copy"
        return replace(self, options={**self.options, **shared}, why=why, copy_threads=threads)


def choose_fabric(
    device: torch.device,
    environment: Mapping[str, str] | None = None,
    sysfs: Path = _SYSFS,
    address: str | None = None,
) -> Fabric:
    """Settings for a rank whose arena lies on ``device``.

    Args:
        environment: by default this process's.
        address: the device's on the PCI bus; by default torch is asked.
    """
    environment = os.environ if environment is None else environment
    given = [f"{name}={environment[name]}" for name in _SHOWN if environment.get(name)]
    if given:
        # Who names transports or devices knows the fabric: a port of ours might not fit.
        return Fabric(why=f"{', '.join(given)} by the environment")
    if device.type != "cuda":
        return Fabric()
    address = pci_address(device) if address is None else address
    ports = nearest_ports(address, find_ports(sysfs), sysfs)
    if not ports:
        return Fabric()
    port = ports[_turn(address, ports, sysfs) % len(ports)]
    why = f"{port}, the nearest port to {device}, of {port.gigabits:g} Gb/s"
    if port.number != 1:
        # Lists of several don't pass through engine_config, and device_list knows port 1 only.
        return Fabric({"engine_config": f"NET_DEVICES={port}"}, why)
    # NIXL splits the list at ", " and appends ":1" to each part: interfaces for TCP, which
    # have no port number, go before the adapter in one part.
    devices = ",".join([*_interfaces(sysfs), port.device])
    return Fabric({"device_list": devices}, f"{why}, and TCP")


def find_ports(sysfs: Path = _SYSFS) -> list[Port]:
    """The ports that are active, by name."""
    found = []
    for adapter in _listed(sysfs / "class/infiniband"):
        place = _resolved(adapter / "device")
        for entry in _listed(adapter / "ports"):
            if not entry.name.isdecimal() or "ACTIVE" not in _text(entry / "state"):
                continue
            rate = _text(entry / "rate").partition(" ")[0]  # "400 Gb/sec (4X NDR)"
            gigabits = 0.0
            with contextlib.suppress(ValueError):
                gigabits = float(rate)
            found.append(
                Port(adapter.name, int(entry.name), gigabits, place, _numa(adapter / "device"))
            )
    return sorted(found, key=lambda port: (_natural(port.device), port.number))


def nearest_ports(address: str, ports: list[Port], sysfs: Path = _SYSFS) -> list[Port]:
    """Those nearest to a PCI address, all equally good.

    By hops on the PCI bus; below different roots all are equally far, and by the
    NUMA node; then by rate.
    """
    if not _PCI.match(address):
        return []
    entry = sysfs / "bus/pci/devices" / address
    if not entry.exists():
        return []
    here, node = _resolved(entry), _numa(entry)

    def cost(port: Port) -> tuple[int, bool, float]:
        return (_hops(here, port.pci), node != port.numa, -port.gigabits)

    least = min(map(cost, ports), default=None)
    return [port for port in ports if cost(port) == least]


def _turn(address: str, ports: list[Port], sysfs: Path) -> int:
    """Which of several GPUs with the same nearest ports this is: they take different ones."""
    if len(ports) == 1:
        return 0
    everything = find_ports(sysfs)
    alike = [
        entry.name
        for entry in _listed(sysfs / "bus/pci/devices")
        if _text(entry / "vendor") == _NVIDIA
        and _text(entry / "class").startswith("0x03")
        and nearest_ports(entry.name, everything, sysfs) == ports
    ]
    return sorted(alike).index(address) if address in alike else 0


def _hops(a: Path, b: Path) -> int:
    """Steps between two devices by the bridges that both lie below."""
    ours, theirs = a.parts, b.parts
    common = 0
    for x, y in zip(ours, theirs, strict=False):
        if x != y:
            break
        common += 1
    if not any(part.startswith("pci") for part in ours[:common]):
        return _NO_COMMON_ROOT
    return len(ours) + len(theirs) - 2 * common


def _interfaces(sysfs: Path) -> list[str]:
    """Network interfaces that TCP may use."""
    found = []
    for entry in _listed(sysfs / "class/net"):
        flags = 0
        with contextlib.suppress(ValueError):
            flags = int(_text(entry / "flags"), 16)
        # Those that belong to a bond or bridge have no address of their own.
        if flags & _UP_AND_RUNNING == _UP_AND_RUNNING and not (entry / "master").exists():
            found.append(entry.name)
    return sorted(found)


def pci_address(device: torch.device) -> str:
    """A GPU's address on the PCI bus, such as ``0000:3b:00.0``."""
    found: Any = torch.cuda.get_device_properties(device)  # torch's stub lacks these three
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


def _numa(device: Path) -> int:
    try:
        return int(_text(device / "numa_node"))
    except ValueError:
        return -1


def _listed(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _resolved(path: Path) -> Path:
    try:
        return path.resolve(strict=True)
    except (OSError, RuntimeError):
        return Path()


def _natural(name: str) -> tuple[str, int, str]:
    """``mlx5_10`` comes after ``mlx5_9``."""
    match = re.match(r"(.*?)(\d+)\Z", name)
    return (match[1], int(match[2]), name) if match else (name, -1, name)
