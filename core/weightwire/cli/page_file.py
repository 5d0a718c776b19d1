"""Files for ``--html``."""

from __future__ import annotations

import secrets
from pathlib import Path

from weightwire.errors import ConfigError

__all__ = ["refuse_page", "write_page"]


def refuse_page(path: Path | None) -> None:
    """Say what is wrong with ``--html`` before anything is done for it.

    Raises:
        ConfigError: there is no such directory.
    """
    if path is not None and not path.absolute().parent.is_dir():
        raise ConfigError(f"--html {path}: there is no directory {path.absolute().parent}: make it")


def write_page(path: Path, text: str) -> None:
    """Whole, or not at all: a browser may be reloading it.  Devices and pipes are written to.

    Raises:
        ConfigError: it can't be written; names it and the reason.
    """
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
            return
        place = path.resolve()  # a link goes on being one
        temporary = place.with_name(f".{place.name[:100]}.{secrets.token_hex(4)}.tmp")
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(place)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except (OSError, RuntimeError) as error:  # the latter for links in a circle
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise ConfigError(f"--html {path} can't be written ({reason}): name another") from error
