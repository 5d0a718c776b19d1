"""Where reports go: looked at before a run, so that it isn't made for nothing."""

from __future__ import annotations

import os
from pathlib import Path

from weightwire.errors import ConfigError

__all__ = ["check_place"]


def check_place(option: str, path: Path, *, makes_directories: bool = False) -> None:
    """Refuse a file that couldn't be written.

    Args:
        option: that names it, for the message.
        makes_directories: whoever writes it makes the directories above it.

    Raises:
        ConfigError: its directory doesn't exist, or one of the two can't be written.
    """
    if path.is_dir():
        raise ConfigError(f"{option} {path} is a directory: name a file in it")
    directory = path.absolute().parent
    while makes_directories and not directory.exists():
        directory = directory.parent
    if not directory.is_dir():
        what = "isn't one" if directory.exists() else "doesn't exist"
        raise ConfigError(f"{option} {path}: directory {directory} {what}: make it, or correct it")
    if not os.access(path if path.exists() else directory, os.W_OK):
        raise ConfigError(f"{option} {path} can't be written: choose another file")
