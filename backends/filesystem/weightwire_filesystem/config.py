"""Options of the filesystem backend."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import Field, StringConstraints

from weightwire.contract import BackendConfig

__all__ = ["FilesystemConfig", "mode_bits"]

Mode = Annotated[str, StringConstraints(pattern=r"^0?[0-7]{3,4}$")]


class FilesystemConfig(BackendConfig):
    """Options of the filesystem backend.

    Attributes:
        directory: where versions lie, as this process sees it.  Default:
            ``versions`` in the session's directory.  One run, one directory.
        checkpoint_files: what makes a version loadable besides weights, such as
            ``config.json`` and the tokenizer: a directory (weights and indices
            in it are left out), or a list of files.  Sender's rank 0 only.
        keep: finished versions that stay readable.
        threads: threads that write or read.  Default: up to 4, no more than cores.
        files_per_rank: files over which a trainer rank spreads its tensors.  Most
            filesystems let one thread at a time write to a file, so at least
            ``threads``.  Equal on all trainer ranks.
        file_mode: permissions of files, in octal, whatever the umask.  ``"0640"``
            lets engines of the same group read.
        directory_mode: permissions of directories, likewise (``"0750"``).
        visible_within: seconds that a receiver waits for a published version to
            show up: network filesystems cache directory listings.
    """

    directory: Path | None = None
    checkpoint_files: Path | tuple[Path, ...] | None = None
    keep: int = Field(default=2, ge=1, le=1 << 20, strict=True)
    threads: int | None = Field(default=None, ge=1, le=64)
    files_per_rank: int = Field(default=4, ge=1, le=64)
    file_mode: Mode = "0600"
    directory_mode: Mode = "0700"
    visible_within: float = Field(default=5.0, ge=0, le=600)

    @property
    def thread_count(self) -> int:
        """Threads to use: as asked for, else by this process's cores."""
        if self.threads is not None:
            return self.threads
        return max(1, min(4, os.cpu_count() or 1))


def mode_bits(mode: str) -> int:
    """``"0640"`` as the integer that ``chmod`` takes."""
    return int(mode, 8)
