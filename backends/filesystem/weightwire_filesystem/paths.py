"""Where versions lie."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightwire.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from weightwire.contract import Context
    from weightwire_filesystem.config import FilesystemConfig

__all__ = ["versions_directory"]


def versions_directory(context: Context, config: FilesystemConfig) -> Path:
    """The directory that holds the versions, as this process sees it.

    Raises:
        ConfigError: neither the option nor the session gives one.
    """
    if config.directory is not None:
        return config.directory.absolute()
    if context.session_dir is None:
        raise ConfigError(
            "the filesystem backend needs the option `directory`: "
            f"session {context.session_url} has no directory of its own"
        )
    return context.session_dir.absolute() / "versions"
