"""What a worker may leave behind: threads, children, ports, files, descriptors.

Linux only, as is the rig: it reads ``/proc``.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["Leavings", "shared_files", "usage"]

_SHM = "/dev/shm/"  # noqa: S108 - looked at, not written to
_DRIVER = f"{_SHM}cuda.shm."
"""What CUDA's driver keeps of processes that share memory, and removes itself."""
_LISTENING = "0A"
_SETTLE_SECONDS = 5.0  # spent only where something is left
_LOOKS = 5


class Leavings:
    """Watches this process from the moment a scenario takes it.

    Files that Python creates in shared memory or in directories for temporary
    files are noted as they are created; those that native code maps or holds
    open, when the scenario ends.
    """

    def __init__(self) -> None:
        self._created: set[str] = set()
        self._threads: set[threading.Thread] = set()
        self._watched: tuple[str, ...] = ()
        self._ports: set[int] = set()
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not self._watched or not isinstance(arguments[0], str):
            return
        path, mode, flags = arguments
        creates = bool(flags & os.O_CREAT) if isinstance(flags, int) else "w" in str(mode)
        if creates and path.startswith(self._watched):
            self._created.add(path)

    def begin(self, directory: Path) -> None:
        """A scenario takes this worker; its temporary files go to ``directory``."""
        tempfile.tempdir = None
        os.environ.pop("TMPDIR", None)
        outside = f"{tempfile.gettempdir()}/"
        os.environ["TMPDIR"] = str(directory)
        tempfile.tempdir = str(directory)
        self._watched = (_SHM, outside)
        self._created.clear()
        self._ports.clear()
        self._threads = set(threading.enumerate())

    def files(self) -> set[str]:
        """Files outside the scenario's own directory that may turn out to be left behind."""
        ours = str(Path(tempfile.gettempdir()).parents[1])
        found = self._created | shared_files() | set(_descriptors().values())
        return {
            path
            for path in found
            if path.startswith(self._watched) and not path.startswith((f"{ours}/", _DRIVER))
        }

    def problems(self) -> list[str]:
        """What is left of the scenario once its handles are closed."""
        gc.collect()
        checks: list[Callable[[], list[str]]] = [
            self._left_threads,
            _left_children,
            self._left_ports,
            self._left_descriptors,
        ]
        end = time.monotonic() + _SETTLE_SECONDS
        while True:
            found = [problem for check in checks for problem in check()]
            if not found or time.monotonic() > end:
                return found
            time.sleep(0.02)

    def _left_threads(self) -> list[str]:
        current = threading.current_thread()
        return [
            f"thread {thread.name!r} still runs"
            for thread in threading.enumerate()
            if thread not in self._threads and thread is not current
        ]

    def spare_ports(self) -> None:
        """Those that are listened on now are somebody else's, such as a trainer's own group's."""
        self._ports = set(_listening())

    def _left_ports(self) -> list[str]:
        return [
            f"port {port} is still listened on" for port in _listening() if port not in self._ports
        ]

    def _left_descriptors(self) -> list[str]:
        scenario = str(Path(tempfile.gettempdir()).parent)
        return [
            f"descriptor {number} is still open on {path}"
            for number, path in _descriptors().items()
            if path.startswith((_SHM, scenario)) and not path.startswith(_DRIVER)
        ]


def usage() -> dict[str, int]:
    """What must stay flat over many versions.

    The least of a few looks: a lease that is being renewed, or a file that is
    being deleted in the background, is no growth.
    """
    gc.collect()
    looks = []
    for _ in range(_LOOKS):
        looks.append(_usage())
        time.sleep(0.02)
    return {what: min(look[what] for look in looks) for what in looks[0]}


def _usage() -> dict[str, int]:
    resident = 0
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            resident = int(line.split()[1]) << 10
    return {
        "threads": threading.active_count(),
        "descriptors": len(_descriptors()),
        "children": len(_left_children()),
        "mappings": len(shared_files()),
        "resident": resident,
    }


def _descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = str(Path(f"/proc/self/fd/{name}").readlink())
        except OSError:
            continue  # the listing's own
    return found


def shared_files(process: int | str = "self") -> set[str]:
    """Files in shared memory that a process has mapped."""
    found = set()
    try:
        with Path(f"/proc/{process}/maps").open() as maps:
            for line in maps:
                fields = line.rstrip("\n").split(maxsplit=5)
                if len(fields) < 6 or fields[5].startswith(_DRIVER):
                    continue
                if fields[5].startswith(_SHM):
                    found.add(fields[5].removesuffix(" (deleted)"))
    except OSError:
        pass  # it is gone
    return found


def _left_children() -> list[str]:
    children = []
    for task in Path("/proc/self/task").iterdir():
        try:
            children += (task / "children").read_text().split()
        except OSError:
            continue  # the thread has just ended
    return [f"child process {pid} still runs: {_command_line(pid)}" for pid in children]


def _command_line(process: str) -> str:
    """What a process was started with; only its name, once it has ended."""
    found = []
    for what in ("cmdline", "comm"):
        with contextlib.suppress(OSError):  # it has just been waited for
            found += Path(f"/proc/{process}/{what}").read_bytes().replace(b"\0", b" ").splitlines()
    return next((line.decode(errors="replace").strip() for line in found if line.strip()), "?")


def _listening() -> list[int]:
    sockets = {
        path.removeprefix("socket:[").removesuffix("]")
        for path in _descriptors().values()
        if path.startswith("socket:[")
    }
    found = []
    for table in ("tcp", "tcp6"):
        lines = Path(f"/proc/self/net/{table}")
        for line in lines.read_text().splitlines()[1:] if lines.exists() else ():
            fields = line.split()
            if fields[3] == _LISTENING and fields[9] in sockets:
                found.append(int(fields[1].rpartition(":")[2], 16))
    return found
