"""What schemes need to know of a session URL."""

from __future__ import annotations

import contextlib
import ipaddress
import re
from urllib.parse import SplitResult

__all__ = ["is_loopback", "shown", "without_credentials"]


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach this host name or address."""
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def without_credentials(url: SplitResult) -> str:
    """The URL for messages: without user and password."""
    return url._replace(netloc=url.netloc.rpartition("@")[2]).geturl()


def shown(text: object) -> str:
    """Anything that was given for a URL, for messages: what may be a password is left out."""
    return re.sub(r"//[^/].*@", "//...@", repr(text), flags=re.DOTALL)
