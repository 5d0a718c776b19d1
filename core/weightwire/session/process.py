"""Which process a member is, so that others on its host can see at once that it died."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["identity", "is_gone", "is_here", "this_host"]


def identity() -> str:
    """``boot/pid namespace/pid/start time`` on Linux, else an empty string."""
    host = this_host()
    start = _start_time(os.getpid())
    return f"{host}/{os.getpid()}/{start}" if host and start else ""


def is_gone(process: str) -> bool:
    """True only if ``process`` ran where this process can see it, and runs no more."""
    host, _, rest = process.rpartition("/")
    host, _, pid = host.rpartition("/")
    if not host or host != this_host() or not pid.isdigit():
        return False
    return _start_time(int(pid)) != rest


def is_here(process: str) -> bool:
    """True only if ``process`` runs where this process can see it."""
    return bool(process) and process.startswith(f"{this_host()}/") and not is_gone(process)


def this_host() -> str:
    """Names the kernel and the process namespace that this process runs in; or is empty."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _start_time(pid: int) -> str:
    """Field 22 of ``/proc/<pid>/stat``; empty for a process that is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
