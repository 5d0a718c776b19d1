"""What can't be released, because a transfer that nobody can cancel may still touch it.

NIXL can't cancel: a read whose owner was stopped in its midst is still carried out
when the owner goes on, whatever was released meanwhile.  So handle, agent and
memory are set aside, alive and out of use, until the transfer is known to be over.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass

from weightwire.errors import WeightWireError

__all__ = ["Aside", "leave_behind"]


@dataclass(frozen=True)
class _Kept:
    is_over: Callable[[], bool]
    release: Callable[[], None]


class Aside:
    """Things set aside by one handle."""

    def __init__(self) -> None:
        self._kept: list[_Kept] = []

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, is_over: Callable[[], bool], release: Callable[[], None]) -> None:
        """Set something aside.

        Args:
            is_over: whether nothing touches it any more; cheap, and polled.
            release: called once, when it is over.
        """
        self._kept.append(_Kept(is_over, release))

    def sweep(self) -> None:
        """Release what is over."""
        over = [kept for kept in self._kept if _is_over(kept)]
        self._kept = [kept for kept in self._kept if kept not in over]
        for kept in over:
            kept.release()

    def close(self) -> None:
        """The handle closes: what isn't over stays until it is, or for ever."""
        self.sweep()
        for kept in self._kept:
            leave_behind(kept.is_over, kept.release)
        self._kept = []


def _is_over(kept: _Kept) -> bool:
    try:
        return kept.is_over()
    except WeightWireError:
        return False  # asked again later


_left = Aside()
_left_lock = threading.Lock()
_reaper: threading.Thread | None = None
_REAPER_PAUSE = 0.05
_exiting = threading.Event()
_EXIT_SECONDS = 5.0


def leave_behind(is_over: Callable[[], bool], release: Callable[[], None]) -> None:
    """Set something aside beyond its handle's life.

    A thread releases it when it is over, and ends with the last such thing.  It isn't
    freed when the interpreter ends, either: a transfer would then write into memory
    that is gone.
    """
    global _reaper
    references = (is_over, release)
    for thing in references:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))

    def let_go() -> None:
        release()
        for thing in references:
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(thing))

    with _left_lock:
        _left.keep(is_over, let_go)
        if _reaper is None:
            _reaper = threading.Thread(target=_reap, name="weightwire-nixl-aside", daemon=True)
            _reaper.start()


def _reap() -> None:
    global _reaper
    while not _exiting.wait(_REAPER_PAUSE):
        with _left_lock:
            _left.sweep()
            if not len(_left):
                _reaper = None
                return


def _stop_reaping() -> None:
    """Before the interpreter ends: a thread that it ends inside NIXL would abort the process."""
    _exiting.set()
    reaper = _reaper
    if reaper is not None:
        reaper.join(_EXIT_SECONDS)


atexit.register(_stop_reaping)
