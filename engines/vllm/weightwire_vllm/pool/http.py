"""A vLLM API server, by its HTTP routes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any

import httpx
import msgspec

from weightwire.errors import (
    AuthenticationError,
    ConfigError,
    PeerLost,
    TransferError,
    TransferTimeout,
    UnsupportedOperation,
)
from weightwire.session.urls import shown
from weightwire.units import printable
from weightwire_vllm.pool.engines import EngineControl, PauseMode

__all__ = ["HttpEngine"]

_MOST_BYTES = 1 << 20
_MOST_REASON = 8000
_NOT_UP = (502, 503, 504)
_RETRIES = 3
_FIRST_PAUSE = 0.2
_ONE_REQUEST_EACH = httpx.Limits(max_keepalive_connections=0)
"""A server closes a connection that was idle or whose call failed, maybe as it is used again.

What may not be asked twice would be lost with it.
"""


class HttpEngine(EngineControl):
    """One server.

    Args:
        url: such as ``http://host:8000``.
        api_key: what ``--api-key`` of the server says, if anything.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.name = _base(url)
        headers = {"Accept-Encoding": "identity"}  # a bomb stays as small as it travels
        if api_key is not None:
            headers["Authorization"] = f"Bearer {_checked_key(api_key)}"
        # A proxy of the environment has no business between a trainer and its engines.
        self._client = httpx.AsyncClient(
            base_url=self.name, headers=headers, trust_env=False, limits=_ONE_REQUEST_EACH
        )

    async def check(self, timeout: float) -> None:
        await self._call("GET", "/health", timeout)
        # The routes below aren't behind the key; whoever drives the engine should have it.
        await self._call("GET", "/v1/models", timeout)
        said = await self._call("GET", "/is_paused", timeout)
        if not isinstance(said.get("is_paused"), bool):
            raise UnsupportedOperation(
                f"{self.name} doesn't say whether it is paused: is it a vLLM API server?"
            )

    async def pause(self, mode: PauseMode, timeout: float) -> None:
        await self._call("POST", f"/pause?mode={mode}&clear_cache=false", timeout, repeat=True)

    async def resume(self, timeout: float) -> None:
        await self._call("POST", "/resume", timeout, repeat=True)

    async def is_paused(self, timeout: float) -> bool:
        return (await self._call("GET", "/is_paused", timeout)).get("is_paused") is not False

    async def wake(self, tags: Sequence[str], timeout: float) -> None:
        query = "&".join(f"tags={tag}" for tag in tags)
        await self._call("POST", f"/wake_up?{query}", timeout, repeat=True)

    async def attach(self, info: dict[str, Any], timeout: float) -> None:
        path = "/init_weight_transfer_engine"
        await self._call("POST", path, timeout, {"init_info": info}, repeat=True)

    async def detach(self, timeout: float) -> None:
        await self._call("POST", "/shutdown_weight_transfer_engine", timeout, repeat=True)

    async def start(self, timeout: float) -> None:
        await self._call("POST", "/start_weight_update", timeout)

    async def update(self, info: dict[str, Any], timeout: float) -> None:
        await self._call("POST", "/update_weights", timeout, {"update_info": info})

    async def finish(self, timeout: float) -> None:
        await self._call("POST", "/finish_weight_update", timeout)

    async def name_version(self, version: str, timeout: float) -> str:
        body = {"new_version": version}
        await self._call("POST", "/update_weight_version", timeout, body, repeat=True)
        said = await self._call("GET", "/weight_info", timeout)
        return printable(str(said.get("weight_version"))[:_MOST_REASON])

    async def reset_caches(self, timeout: float) -> None:
        path = "/reset_prefix_cache?reset_running_requests=true&reset_external=true"
        said = await self._call("POST", path, timeout, repeat=True)
        if said.get("success") is not True:
            raise TransferError(f"{self.name} could not reset its prefix cache: {str(said)[:200]}")
        await self._call("POST", "/reset_mm_cache", timeout, repeat=True)
        await self._call("POST", "/reset_encoder_cache", timeout, repeat=True)

    async def close(self) -> None:
        await self._client.aclose()

    async def _call(
        self,
        method: str,
        path: str,
        timeout: float,
        body: dict[str, Any] | None = None,
        *,
        repeat: bool = False,
    ) -> dict[str, Any]:
        """One request; those that never left are made again, others only if ``repeat``.

        Raises:
            TransferTimeout, PeerLost, AuthenticationError, UnsupportedOperation,
            TransferError: see ``EngineControl``.
        """
        try:
            async with asyncio.timeout(timeout):
                for again in range(_RETRIES):
                    try:
                        return await self._once(method, path, body)
                    except httpx.TransportError as error:
                        was_sent = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
                        if again == _RETRIES - 1 or (was_sent and not repeat and method != "GET"):
                            raise
                    await asyncio.sleep(_FIRST_PAUSE * 2**again)
        except TimeoutError:
            raise TransferTimeout(
                f"{self.name} didn't answer {_route(path)} within {timeout:.1f} s"
            ) from None
        except httpx.TransportError as error:
            said = str(error) or type(error).__name__
            raise PeerLost(
                f"{self.name} can't be reached ({said}): start it, or mend the URL"
            ) from (error)
        raise AssertionError("unreachable")

    async def _once(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        # Deadlines are the caller's: an update takes as long as it takes.
        request = self._client.build_request(method, path, json=body, timeout=None)
        answer = await self._client.send(request, stream=True)
        try:
            payload = b""
            async for chunk in answer.aiter_raw():
                payload += chunk
                if len(payload) > _MOST_BYTES:
                    raise TransferError(f"{self.name} answers {_route(path)} with too many bytes")
        finally:
            await answer.aclose()
        if not answer.is_success:
            raise self._refusal(answer, path, payload)
        body = _decoded(payload) if payload else {}
        if body is None:
            raise TransferError(
                f"{self.name} answers {_route(path)} with no JSON object: "
                "give the URL of a vLLM API server, and not of what is before it"
            )
        return body

    def _refusal(self, answer: httpx.Response, path: str, payload: bytes) -> Exception:
        status, route, reason = answer.status_code, _route(path), _reason(payload)
        if answer.is_redirect:
            place = printable(answer.headers.get("location", "elsewhere")[:200])
            return TransferError(
                f"{self.name} redirects {route} to {place}: give the server's own URL"
            )
        if status in _NOT_UP:
            return PeerLost(f"{self.name} isn't up ({status} to {route}): start it, or wait for it")
        if status in (401, 403):
            return AuthenticationError(
                f"{self.name} answers {status} to {route}: give its key (api_key, --api-key-env)"
            )
        if status == 404:
            return UnsupportedOperation(
                f"{self.name} has no {route}: start the server with VLLM_SERVER_DEV_MODE=1"
            )
        if "Weight transfer not configured" in reason:
            return UnsupportedOperation(
                f"{self.name} has no weight transfer engine: start the server with "
                """--weight-transfer-config '{"backend": "weightwire"}'"""
            )
        return TransferError(f"{self.name}: {route} failed: {reason or f'status {status}'}")


def _route(path: str) -> str:
    return path.partition("?")[0]


def _base(url: str) -> str:
    """The URL before the routes.

    Raises:
        ConfigError: it isn't one, or has parts that engines' URLs may not have.
    """
    try:
        parts = httpx.URL(url)
        fits = parts.scheme in ("http", "https") and bool(parts.host)
        fits = fits and (parts.port is None or 0 < parts.port < 1 << 16)
    except (httpx.InvalidURL, TypeError, ValueError):
        fits = False
    if not fits:
        raise ConfigError(f"engine {shown(url)[:200]} is no URL: write http://host:port")
    if parts.userinfo:
        raise ConfigError("an engine's URL may not hold a password: give its key by api_key")
    if parts.query or parts.fragment:
        raise ConfigError(f"engine {shown(url)[:200]} has a '?' or '#': write http://host:port")
    return str(parts).rstrip("/")


def _checked_key(key: str) -> str:
    """A key that a header can hold; the error doesn't show it, as the HTTP library's would."""
    if not key or not key.isascii() or not key.isprintable() or key != key.strip():
        raise ConfigError(
            "the engines' API key is empty, or has spaces around it, a line's end, or what isn't "
            "ASCII: give what --api-key of the servers says"
        )
    return key


def _decoded(payload: bytes) -> dict[str, Any] | None:
    """The JSON object, or None if it is none."""
    try:
        body = msgspec.json.decode(payload)
    except (msgspec.DecodeError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


def _reason(payload: bytes) -> str:
    """What vLLM says went wrong, from the shapes in which it says so."""
    body = _decoded(payload) or {}
    error = body.get("error", body.get("detail", ""))
    text = error.get("message", "") if isinstance(error, dict) else error
    text = str(text or payload[:2000].decode(errors="replace"))
    if len(text) > _MOST_REASON:  # its end says what the engine holds
        text = f"{text[: _MOST_REASON // 2]} ... {text[-_MOST_REASON // 2 :]}"
    # Its executor wraps what a worker raised.
    found = re.search(r"Worker failed with error '(.*)', please check", text, re.DOTALL)
    return printable((found[1] if found else text).replace("\\n", "\n"))
