"""What the rig needs of the system and Windows lacks; there it says so when it starts."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys

__all__ = [
    "CONTINUE",
    "DUMP_STACKS",
    "KILL",
    "STOP",
    "collect_children",
    "dump_stacks_when_asked",
    "fork",
    "is_root",
    "local_socket",
]

if sys.platform == "win32":
    KILL = STOP = CONTINUE = DUMP_STACKS = signal.SIGTERM

    def is_root() -> bool:
        return False

    def local_socket() -> socket.socket:
        raise OSError("the conformance rig forks processes and reads /proc: run it on Linux")

    def fork() -> int:
        raise NotImplementedError

    def collect_children(*, at_once: bool) -> None:
        raise NotImplementedError

    def dump_stacks_when_asked() -> None:
        raise NotImplementedError
else:
    KILL, STOP, CONTINUE = signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT
    DUMP_STACKS = signal.SIGUSR1

    def is_root() -> bool:
        """Whether this process may mount disks."""
        return os.geteuid() == 0

    def local_socket() -> socket.socket:
        """A socket between processes of one host."""
        return socket.socket(socket.AF_UNIX)

    def fork() -> int:
        return os.fork()

    def collect_children(*, at_once: bool) -> None:
        """Children that end are forgotten ``at_once``, or wait to be asked for."""
        signal.signal(signal.SIGCHLD, signal.SIG_IGN if at_once else signal.SIG_DFL)

    def dump_stacks_when_asked() -> None:
        """``DUMP_STACKS`` writes every thread's stack to stderr."""
        faulthandler.enable()
        faulthandler.register(DUMP_STACKS)
