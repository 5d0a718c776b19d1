"""What the operating system lets this process do."""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import shutil
import struct
import sys
import time
from pathlib import Path
from typing import Any

from weightwire.doctor.check import CheckOptions, Verdict
from weightwire.shm import default_directory
from weightwire.units import human_bytes

__all__ = ["clocks", "locked_memory", "shared_memory"]

_SHARED = 32 << 20
_ROOMY = 1 << 30
_LOCKED = 64 << 20
_STA_UNSYNC = 0x40
_TIMEX_BYTES, _STATUS_AT = 256, 40
_MOST_DRIFT = 0.05


def shared_memory(_: CheckOptions) -> Verdict:
    """Reserve, write and read shared memory where the backends do."""
    directory = default_directory()
    path = directory / f"weightwire-doctor-{secrets.token_hex(6)}"
    enlarge = "enlarge it (docker run --shm-size=8g or --ipc=host; mount -o remount,size=8g)"
    payload = secrets.token_bytes(1 << 16)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            if sys.platform != "win32":
                path.unlink()  # nothing is left, should this process be killed
            if hasattr(os, "posix_fallocate"):  # a sparse file would end a write with SIGBUS
                os.posix_fallocate(descriptor, 0, _SHARED)
            else:
                os.ftruncate(descriptor, _SHARED)
            with mmap.mmap(descriptor, _SHARED) as memory:
                for at in range(0, _SHARED, len(payload)):
                    memory[at : at + len(payload)] = payload
                same = memory[-len(payload) :] == payload
        finally:
            os.close(descriptor)
    except OSError as error:
        return Verdict.failed(
            f"{human_bytes(_SHARED)} can't be reserved in {directory} ({error.strerror})",
            f"{enlarge}; look at ulimit -f; or set TMPDIR to a larger place",
        )
    finally:
        path.unlink(missing_ok=True)
    if not same:
        return Verdict.failed(f"what was written in {directory} reads back otherwise", enlarge)
    usage = shutil.disk_usage(directory)
    total, free = usage.total, usage.free
    details = {"directory": str(directory), "total_bytes": total, "free_bytes": free}
    summary = f"{human_bytes(free)} of {human_bytes(total)} free in {directory}"
    if free < _ROOMY:
        return Verdict.warning(f"only {summary}: slots may not fit", enlarge, **details)
    return Verdict.ok(summary, **details)


def locked_memory(_: CheckOptions) -> Verdict:
    """Lock more memory than small limits allow."""
    try:
        import resource
    except ImportError:
        return Verdict.absent("Windows has no limit of locked memory", "nothing is to be done")
    limits: Any = resource  # its functions aren't known for Windows
    if not hasattr(limits, "RLIMIT_MEMLOCK"):
        return Verdict.absent("this system has no limit of locked memory", "nothing is to be done")
    soft, hard = limits.getrlimit(limits.RLIMIT_MEMLOCK)
    shown = "unlimited" if soft == limits.RLIM_INFINITY else human_bytes(soft)
    details = {
        "soft_bytes": None if soft == limits.RLIM_INFINITY else soft,
        "hard_bytes": None if hard == limits.RLIM_INFINITY else hard,
    }
    libc = ctypes.CDLL(None, use_errno=True)
    with mmap.mmap(-1, _LOCKED) as memory:
        buffer = ctypes.c_char.from_buffer(memory)
        address = ctypes.c_void_p(ctypes.addressof(buffer))
        refused = libc.mlock(address, ctypes.c_size_t(_LOCKED))
        reason = os.strerror(ctypes.get_errno())
        if not refused:
            libc.munlock(address, ctypes.c_size_t(_LOCKED))
        del buffer
    if not refused:
        beyond = "" if soft == limits.RLIM_INFINITY or soft >= _LOCKED else ", and not enforced"
        return Verdict.ok(f"{human_bytes(_LOCKED)} locked; the limit is {shown}{beyond}", **details)
    summary = f"{human_bytes(_LOCKED)} can't be locked ({reason}); the limit is {shown}"
    remedy = (
        "raise it: ulimit -l unlimited, memlock in /etc/security/limits.conf, "
        "LimitMEMLOCK=infinity for systemd, docker run --ulimit memlock=-1"
    )
    if _has_rdma():
        return Verdict.failed(f"{summary}: RDMA can't register slots", remedy, **details)
    return Verdict.warning(f"{summary}: RDMA would need it", remedy, **details)


def _has_rdma() -> bool:
    try:
        return any(Path("/sys/class/infiniband").iterdir())
    except OSError:
        return False


def clocks(options: CheckOptions) -> Verdict:
    """The clock of leases must run at its pace; wall clocks only date what is shown."""
    began, wall = time.monotonic(), time.time()
    time.sleep(0.2)
    passed, shown = time.monotonic() - began, time.time() - wall
    remedy = "let chrony or systemd-timesyncd keep the host's time; restart the container after"
    if not 0.19 <= passed <= 30 or abs(passed - shown) > _MOST_DRIFT:
        return Verdict.failed(
            f"0.2 s took {passed:.3f} s by the monotonic clock and {shown:.3f} s by the wall clock",
            remedy,
        )
    probe = Path(options.directory or options.scratch)
    skew = _skew(probe if probe.is_dir() else Path(options.scratch))
    details: dict[str, object] = {
        "monotonic_resolution_s": time.get_clock_info("monotonic").resolution,
        "filesystem_skew_s": skew,
        "synchronised": _is_synchronised(),
    }
    if skew is not None and abs(skew) > 5:
        return Verdict.warning(
            f"the wall clock is {skew:+.1f} s away from that of the filesystem's host: ages that "
            "`inspect` shows are off by as much (leases are not)",
            remedy,
            **details,
        )
    ntp = {True: "kept by NTP", False: "not kept by NTP", None: "unknown whether kept by NTP"}
    return Verdict.ok(f"monotonic clock steady; wall clock {ntp[_is_synchronised()]}", **details)


def _skew(directory: Path) -> float | None:
    """This host's wall clock minus that of whoever stamps files there, in seconds."""
    path = directory / f".weightwire-doctor-{secrets.token_hex(6)}"
    try:
        path.touch(mode=0o600)
        try:
            return time.time() - path.stat().st_mtime
        finally:
            path.unlink(missing_ok=True)
    except OSError:
        return None


def _is_synchronised() -> bool | None:
    """What the kernel says of its clock; None where it can't be asked."""
    if not hasattr(os, "posix_fallocate"):  # Linux, more or less
        return None
    timex = (ctypes.c_char * _TIMEX_BYTES)()  # modes = 0: only asks
    try:
        if ctypes.CDLL(None).adjtimex(timex) < 0:
            return None
    except (OSError, AttributeError):
        return None
    status = struct.unpack_from("i", timex, _STATUS_AT)[0]
    return not status & _STA_UNSYNC
