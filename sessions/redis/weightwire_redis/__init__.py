"""weightwire sessions in Redis: ``redis://host/run42``, for pools that outlive a trainer."""

from __future__ import annotations

from weightwire_redis.scheme import RedisScheme, TlsRedisScheme

__all__ = ["RedisScheme", "TlsRedisScheme"]
