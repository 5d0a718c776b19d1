"""Where a session is, as its URL says."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import SplitResult, unquote

from weightwire.errors import ConfigError
from weightwire.session.urls import is_loopback, without_credentials

__all__ = ["Address", "parse"]

_PORT = 6379
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,126}\Z")
_FORM = "redis://[user:password@]host[:port]/[database/]name"


@dataclass(frozen=True)
class Address:
    """A session's server, database and name.

    Attributes:
        url: for messages and records: without credentials.
    """

    url: str
    host: str
    port: int
    database: int
    name: str
    tls: bool
    user: str | None = None
    password: str | None = field(default=None, repr=False)


def parse(url: SplitResult, *, authenticated: bool) -> Address:
    """The address of a session.

    Args:
        authenticated: the session has a token, so that nobody else can write its records.

    Raises:
        ConfigError: the URL is malformed, or the server open to anybody.
    """
    text = without_credentials(url)
    try:
        port = url.port or _PORT
    except ValueError as error:
        raise ConfigError(
            f"session URL {text!r} has no valid port ({error}): write {_FORM}"
        ) from None
    *database, name = url.path.strip("/").split("/")
    if (
        not url.hostname
        or len(database) > 1
        or not all(re.match(r"\d{1,5}\Z", n) for n in database)
    ):
        raise ConfigError(f"session URL {text!r} is incomplete: write {_FORM}")
    if not _NAME.match(name) or name.isdigit():
        # A number alone is a database in other programs' URLs.
        raise ConfigError(
            f"session URL {text!r} names no session: write {_FORM}, the name of A-Z a-z 0-9 . _ - "
            "and not a number"
        )
    password = unquote(url.password) if url.password else None
    user = unquote(url.username) if url.username else None
    if user and not password:
        raise ConfigError(f"session URL {text!r} has a user and no password: write {_FORM}")
    if not (authenticated or password or is_loopback(url.hostname)):
        raise ConfigError(
            f"session URL {text!r} is open to the network: set WEIGHTWIRE_TOKEN on all members, "
            "or give Redis a password"
        )
    return Address(
        url=text,
        host=url.hostname,
        port=port,
        database=int(database[0]) if database else 0,
        name=name,
        tls=url.scheme == "rediss",
        user=user,
        password=password,
    )
