"""UCX's log, which goes to stdout unless told otherwise, as records of our logger.

UCX writes to a file in memory, and what it wrote is taken over after calls that fail and
when an agent is made or closed.  A handler of UCX's would be called on NIXL's progress
thread, which must never wait for Python.  Nothing is changed where the environment says
what becomes of the log, nor where somebody else has loaded this NIXL before us.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
from pathlib import Path

__all__ = ["capture", "take_over"]

log = logging.getLogger("weightwire.nixl.ucx")

_MOST_NBYTES = 1 << 20
_LEVELS = {
    "FATAL": logging.CRITICAL,
    "ERROR": logging.ERROR,
    "WARN": logging.WARNING,
    "DIAG": logging.INFO,
    "INFO": logging.INFO,
}
_OK = 0

_lock = threading.Lock()
_file: int | None = None
_taken = 0


def capture(library: Path) -> None:
    """Let UCX log to us from now on, before NIXL loads it.

    Args:
        library: the folder with the shared libraries of NIXL's wheel.
    """
    global _file
    with _lock:
        decided = any(name.startswith("UCX_LOG_") for name in os.environ)
        if _file is not None or decided or _is_loaded(library):
            return
        found = sorted(library.glob("libucs-*.so*"))
        with contextlib.suppress(OSError, AttributeError):
            ucs = ctypes.CDLL(str(found[0])) if len(found) == 1 else None
            if ucs is None or not hasattr(ucs, "ucs_log_init"):
                return
            file = _memory_file()
            path = f"/proc/self/fd/{file}".encode()
            if ucs.ucs_global_opts_set_value(b"LOG_FILE", path) != _OK:
                os.close(file)
                return
            ucs.ucs_log_cleanup()
            ucs.ucs_log_init()
            _file = file


def take_over() -> None:
    """Hand what UCX has written to our logger."""
    global _taken
    if _file is None:
        return
    with _lock:
        size = os.fstat(_file).st_size
        if size <= _taken:
            return
        begin = max(_taken, size - _MOST_NBYTES)
        os.lseek(_file, begin, os.SEEK_SET)  # UCX has opened it for itself: its place is another
        text = os.read(_file, size - begin).decode(errors="replace")
        _taken = size
    for line in text.splitlines():
        # [time] [host:pid:thread]  file:line  UCX  LEVEL  message
        _, _, rest = line.partition("UCX")
        level, _, message = rest.strip().partition(" ")
        log.log(_LEVELS.get(level, logging.WARNING), "%s", message.strip() or line)


def _memory_file() -> int:
    make = getattr(os, "memfd_create", None)
    if make is None:
        raise OSError("there are no files in memory here")
    return int(make("weightwire-ucx-log"))


def _is_loaded(library: Path) -> bool:
    try:
        return f"{library}/libucs" in Path("/proc/self/maps").read_text()
    except OSError:
        return True
