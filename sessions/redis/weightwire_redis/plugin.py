"""The plug-ins that the entry points name: one a scheme."""

from __future__ import annotations

from weightwire.hookspecs import hookimpl
from weightwire.session import SessionScheme
from weightwire_redis.scheme import RedisScheme, TlsRedisScheme

__all__: list[str] = []


class RedisPlugin:
    @hookimpl
    def weightwire_describe_session_scheme(self) -> SessionScheme:
        return RedisScheme()


class TlsRedisPlugin:
    @hookimpl
    def weightwire_describe_session_scheme(self) -> SessionScheme:
        return TlsRedisScheme()


redis = RedisPlugin()
rediss = TlsRedisPlugin()
