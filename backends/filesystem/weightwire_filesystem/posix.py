"""The calls that Windows lacks; there ``probe`` refuses the backend before any is made."""

from __future__ import annotations

import os
import sys

__all__ = ["NOFOLLOW", "NONBLOCK", "fchmod", "preadv", "pwrite"]

if sys.platform == "win32":
    NOFOLLOW = 0
    NONBLOCK = 0

    def fchmod(fd: int, mode: int) -> None:
        raise NotImplementedError

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        raise NotImplementedError

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        raise NotImplementedError
else:
    NOFOLLOW = os.O_NOFOLLOW
    NONBLOCK = os.O_NONBLOCK

    def fchmod(fd: int, mode: int) -> None:
        os.fchmod(fd, mode)

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        return os.pwrite(fd, data, offset)

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)
