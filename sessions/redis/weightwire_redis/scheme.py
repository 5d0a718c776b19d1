"""``redis://`` and, over TLS, ``rediss://``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightwire.errors import BackendUnavailable
from weightwire.session import OpenRequest, SessionScheme

if TYPE_CHECKING:
    from weightwire_redis.store import RedisStore

__all__ = ["RedisScheme", "TlsRedisScheme"]


class RedisScheme(SessionScheme):
    """``redis://[user:password@]host[:port]/[database/]name``."""

    scheme = "redis"
    summary = "a Redis server, which outlives every member"

    def open(self, request: OpenRequest) -> RedisStore:
        """Open the store.

        Raises:
            BackendUnavailable: redis-py isn't installed.
            ConfigError: the URL is malformed.
            AuthenticationError: wrong user or password.
            SessionError: the server can't be reached or used.
        """
        from weightwire_redis.address import parse

        address = parse(request.url, authenticated=request.authenticated)
        try:
            import redis  # noqa: F401 - only to see whether it is there
        except ImportError as error:
            raise BackendUnavailable(
                f"session {address.url} needs redis-py ({error}): pip install 'weightwire[redis]'"
            ) from error
        from weightwire_redis.store import RedisStore

        return RedisStore(address, request.deadline, read_only=request.read_only)


class TlsRedisScheme(RedisScheme):
    """``rediss://…``: the same over TLS; the server's certificate is verified."""

    scheme = "rediss"
    summary = "a Redis server over TLS"
